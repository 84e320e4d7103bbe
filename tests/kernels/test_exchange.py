"""The exchange's kernel, one rank after the other in one process: what later ranks send lies in the inboxes before.
Ranks that wait for one another: tests/engine_core/distributed/test_custom_all_reduce.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import exchange_triton
from penstock.kernels.chip import CHIPS
from penstock.kernels.exchange import TURNS, Inboxes, add_parts, empty_word, inbox_bytes
from penstock.kernels.exchange_triton import exchange_rows, places, programs

ROWS = 6
EPS = 1e-5
TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Post:
    """The inboxes of all ranks, and each one's view of them."""

    def __init__(self, ranks: int, width: int, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.word = torch.int32 if dtype.itemsize == 4 else torch.int16
        shape = TURNS, ranks, ROWS, width
        self.boxes = [torch.full(shape, empty_word(dtype), dtype=self.word, device=device) for _ in range(ranks)]
        addresses = torch.tensor([box.data_ptr() for box in self.boxes], device=device)
        self.views = [
            Inboxes(addresses, torch.zeros(ROWS, dtype=torch.int32, device=device), rank, width, dtype)
            for rank in range(ranks)
        ]

    def lay(self, rank: int, sender: int, part: Tensor) -> None:
        """What a sender would send to a rank, each row to the half whose turn it is."""
        words = part.view(self.word).clone()
        words[words == empty_word(self.dtype)] = 0
        for row, turn in enumerate(self.views[rank].turns[: len(part)].tolist()):
            self.boxes[rank][turn, sender, row] = words[row]

    def exchange(self, parts: Sequence[Tensor], residual: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every rank's part of one exchange."""
        for rank in range(len(parts)):
            for sender in range(rank + 1, len(parts)):
                self.lay(rank, sender, parts[sender])
        found = []
        for view, part in zip(self.views, parts, strict=True):
            found.append(exchange_rows(part, residual, weight, EPS, view))
            for sender in range(view.rank):  # which has had what this one sent it
                self.boxes[sender][:, view.rank] = empty_word(self.dtype)
        return found

    def is_empty(self) -> bool:
        return all(bool((box == empty_word(self.dtype)).all()) for box in self.boxes)


def drawn(ranks: int, rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    tensors = [torch.randn(rows, width).to(dtype).to(device) for _ in range(ranks + 1)]
    return tensors[:-1], tensors[-1], torch.randn(width).to(dtype).to(device)


def check(found: tuple[Tensor, Tensor], parts: Sequence[Tensor], residual: Tensor, weight: Tensor) -> None:
    normed, total = found
    step = torch.finfo(total.dtype).eps
    size = torch.stack([part.double().abs() for part in (*parts, residual)]).sum(0)
    exact = torch.stack([part.double() for part in parts]).sum(0) + residual.double()
    assert ((total.double() - exact).abs() <= 2 * step * size + 1e-12).all()
    wide = total.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), expected, rtol=3 * step, atol=1e-6)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "ranks", "rows", "width"), [
    (torch.bfloat16, 1, 2, 8), (torch.float32, 2, 1, 64), (torch.bfloat16, 2, 2, 300), (torch.float16, 3, 6, 33),
    (torch.float32, 4, 3, 1000), (torch.float16, 4, 1, 24),
])  # fmt: skip
def test_every_rank_finds_the_sum_and_its_norm(
    dtype: torch.dtype, ranks: int, rows: int, width: int, device: str
) -> None:
    post = Post(ranks, width, dtype, device)
    parts, residual, weight = drawn(ranks, rows, width, dtype, device)
    found = post.exchange(parts, residual, weight)
    for one in found:
        assert one[0].dtype == one[1].dtype == dtype
        assert torch.equal(one[0], found[0][0])
        assert torch.equal(one[1], found[0][1])
    check(found[0], parts, residual, weight)
    if device == "cuda" or dtype != torch.bfloat16:  # which the interpreter rounds towards zero
        normed, total = add_parts(parts, residual, weight, EPS)
        assert torch.equal(found[0][1], total)
        torch.testing.assert_close(found[0][0], normed, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_parts_are_added_in_the_order_of_ranks(device: str) -> None:
    """1e8 + 1 is 1e8 in fp32, so the order is to be seen."""
    for numbers, expected in (((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0), ((1.0, 1e8, -1e8), 0.0)):
        parts = [torch.full((1, 8), number, device=device) for number in numbers]
        post = Post(3, 8, torch.float32, device)
        for _, total in post.exchange(parts, torch.zeros(1, 8, device=device), torch.ones(8, device=device)):
            assert (total == expected).all()


def test_a_sum_is_rounded_before_the_residual_is_added(device: str) -> None:
    """As one by one: in fp16 2048 + 1 is 2048, and stays it when another one comes."""
    parts = [torch.full((1, 8), number, dtype=torch.float16, device=device) for number in (2048.0, 1.0)]
    residual, weight = torch.ones(1, 8, dtype=torch.float16, device=device), torch.ones(8, device=device).half()
    for found in Post(2, 8, torch.float16, device).exchange(parts, residual, weight):
        assert torch.equal(found[1], add_parts(parts, residual, weight, EPS)[1])
        assert (found[1] == 2048.0).all()


def test_rows_take_turns_and_leave_inboxes_empty(device: str) -> None:
    dtype = torch.float16
    post = Post(2, 16, dtype, device)
    turns = torch.zeros(ROWS, dtype=torch.int32)
    for rows in (3, 1, 6, 2, 5):
        parts, residual, weight = drawn(2, rows, 16, dtype, device)
        for found in post.exchange(parts, residual, weight):
            check(found, parts, residual, weight)
        turns[:rows] = (turns[:rows] + 1) % TURNS
        assert all(torch.equal(view.turns.cpu(), turns) for view in post.views)
        assert post.is_empty()


def test_a_part_goes_to_every_other_rank_and_nowhere_else(device: str) -> None:
    post = Post(3, 16, torch.float32, device)
    parts, residual, weight = drawn(3, 4, 16, torch.float32, device)
    post.views[1].turns[2] = 1
    for sender in (0, 2):
        post.lay(1, sender, parts[sender])
    exchange_rows(parts[1], residual, weight, EPS, post.views[1])
    assert (post.boxes[1] == empty_word(torch.float32)).all()
    for other in (0, 2):
        sent = post.boxes[other].clone()
        for row, turn in enumerate((0, 0, 1, 0)):
            assert torch.equal(sent[turn, 1, row].view(torch.float32), parts[1][row])
            sent[turn, 1, row] = empty_word(torch.float32)
        assert (sent == empty_word(torch.float32)).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_minus_zeros_arrive_as_zeros(dtype: torch.dtype, device: str) -> None:
    """They would look as if nothing had come, and never be taken."""
    post = Post(2, 16, dtype, device)
    parts, _, weight = drawn(2, 2, 16, dtype, device)
    parts[0][:], parts[1][:, ::2] = -0.0, -0.0
    residual = torch.full_like(parts[0], -0.0)
    first, second = post.exchange(parts, residual, weight)
    assert torch.equal(first[1], parts[1] + 0.0)
    assert torch.equal(first[1].view(post.word), second[1].view(post.word)), "the signs of zeros, too"


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_is_no_number_comes_through(number: float, device: str) -> None:
    post = Post(2, 16, torch.bfloat16, device)
    parts, residual, weight = drawn(2, 3, 16, torch.bfloat16, device)
    parts[0][1, 3] = number
    for normed, total in post.exchange(parts, residual, weight):
        assert not total[1, 3].isfinite()
        assert normed[[0, 2]].isfinite().all(), "its neighbours are as they were"


def test_rows_of_a_wider_tensor(device: str) -> None:
    post = Post(2, 32, torch.float32, device)
    wide = torch.randn(2, 4, 80, device=device)
    parts, residual, weight = list(wide[:, :, 16:48]), torch.randn(4, 48, device=device)[:, :32], torch.ones(32)
    for found in post.exchange(parts, residual, weight.to(device)):
        check(found, parts, residual, weight.to(device))


@pytest.mark.parametrize("count", [1, 4])
def test_a_program_may_have_several_rows(count: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_triton, "places", lambda warps, registers, device: count)
    post = Post(2, 24, torch.float32, device)
    parts, residual, weight = drawn(2, ROWS, 24, torch.float32, device)
    for found in post.exchange(parts, residual, weight):
        assert torch.equal(found[1], parts[0] + parts[1] + residual)
    assert post.is_empty()


@pytest.mark.parametrize("most", [1, 7, 132])
def test_no_more_programs_than_places(most: int) -> None:
    for tokens in range(1, 600):
        found = programs(tokens, most)
        assert 1 <= found <= min(most, tokens)
        assert -(-tokens // found) == -(-tokens // min(most, tokens)), "nor more rows each than need be"


@pytest.mark.parametrize(
    ("warps", "registers", "each"), [(16, 64, 2), (8, 64, 4), (16, 128, 1), (4, 128, 4), (16, 255, 1)]
)
def test_places_have_the_registers_they_need(
    warps: int, registers: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_triton, "chip_of", lambda device: CHIPS["sm_90"])
    assert places(warps, registers, torch.device("cpu")) == 132 * each
    assert registers > 128 or each * warps * 32 * registers <= 65536
    assert each * warps * 32 <= 2048, "threads that a multiprocessor has"


@pytest.mark.skipif(not __debug__, reason="nothing is asserted")
def test_what_inboxes_have_no_place_for(device: str) -> None:
    inboxes = Post(2, 16, torch.float32, device).views[0]
    row, weight = torch.zeros(1, 16, device=device), torch.ones(16, device=device)
    for partial in (row.expand(ROWS + 1, 16), row[:0], row[:, :8], row.half()):
        with pytest.raises(AssertionError):
            exchange_rows(partial, partial, weight, EPS, inboxes)


def test_sizes() -> None:
    inboxes = Inboxes(torch.zeros(4, dtype=torch.int64), torch.zeros(9, dtype=torch.int32), 2, 100, torch.bfloat16)
    assert (inboxes.ranks, inboxes.rows) == (4, 9)
    assert inboxes.size == inbox_bytes(4, 9, 100, torch.bfloat16) == 2 * 4 * 9 * 100 * 2
    assert replace(inboxes, dtype=torch.float32).size == 2 * inboxes.size
    for dtype in TYPES:
        word = torch.int32 if dtype.itemsize == 4 else torch.int16
        assert torch.tensor([-0.0], dtype=dtype).view(word).item() == empty_word(dtype)
