"""The exchange between processes of this machine, in memory of files, the kernel by Triton's interpreter. Each waits
for what the others have yet to send, as on GPUs: test_gpu_exchange.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine_core.distributed.custom_all_reduce import (
    MAX_ROWS,
    Exchange,
    empty_pair,
    open_exchange,
)
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.loading import load
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.layers import Norm
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.kernels.exchange import Inboxes, add_parts, inbox_bytes
from penstock.kernels.records import AttentionBatch
from tests.engine_core.execution.exchange_ranks import EPS, Pair, drawn, exchanged, opened
from tests.engine_core.execution.file_memory import FileMemory
from tests.ranks import Ranks

WIDTH = 24
TOKENS, PAGE = 2, 16


def check_exact(found: Sequence[Pair], parts: Sequence[Tensor], residual: Tensor, weight: Tensor) -> None:
    """Every rank has the same bits, which are right as far as their type goes."""
    normed, total = found[0]
    for other in found[1:]:
        assert torch.equal(other[0], normed)
        assert torch.equal(other[1], total)
    exact = torch.stack([part.double() for part in parts]).sum(0) + residual.double()
    step = torch.finfo(total.dtype).eps
    size = torch.stack([part.double().abs() for part in (*parts, residual)]).sum(0)
    assert ((total.double() - exact).abs() <= 2 * step * size + 1e-12).all()
    of_total = total.double() / (total.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), of_total, rtol=3 * step, atol=1e-6)


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_ranks_meet_whenever_they_come(few_ranks: Ranks, size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    sizes = (2, 1, 3, 1)
    found = few_ranks.run(size, exchanged, sizes, WIDTH, dtype, tmp_path, 7)
    for at, rows in enumerate(sizes):
        parts, residual, weight = drawn(7 + at, size, rows, WIDTH, dtype)
        check_exact([rank[at] for rank in found], parts, residual, weight)
        if dtype != torch.bfloat16:  # which the interpreter rounds towards zero
            assert torch.equal(found[0][at][1], add_parts(parts, residual, weight, EPS)[1])
    assert not list(tmp_path.iterdir()), "the memory was given back"


def normed(group: Group, folder: Path) -> list[tuple[bool, Tensor, Tensor]]:
    """What the norm finds of partial sums of several sizes, and whether the exchange was in it."""
    found = []
    with opened(group, WIDTH, torch.float32, folder) as exchange:
        norm = Norm(
            WIDTH,
            NormSpec(eps=EPS),
            Placement(torch.float32, torch.device("cpu"), replace(group, exchange=exchange.up_to(3))),
        )
        for seed, rows in enumerate((3, 4, 1)):
            parts, residual, weight = drawn(seed, group.size, rows, WIDTH, torch.float32)
            norm.weight.copy_(weight)
            before = exchange.inboxes.turns.clone()
            result = norm.add(parts[group.rank].clone(), residual)
            found.append((not torch.equal(exchange.inboxes.turns, before), *result))
    return found


def test_the_norm_takes_the_exchange_for_as_many_rows_as_are_quicker(few_ranks: Ranks, tmp_path: Path) -> None:
    by_rank = few_ranks.run(2, normed, tmp_path)
    for seed, (rows, expected) in enumerate(((3, True), (4, False), (1, True))):
        parts, residual, weight = drawn(seed, 2, rows, WIDTH, torch.float32)
        assert [found[seed][0] for found in by_rank] == [expected] * 2
        check_exact([found[seed][1:] for found in by_rank], parts, residual, weight)


@torch.inference_mode()
def hidden(group: Group, folder: Path, with_exchange: bool) -> Tensor:
    """Hidden states of the embedded model's first tokens."""
    spec = read_spec(demo_folder())
    if with_exchange:
        with opened(group, spec.hidden, torch.float32, folder) as exchange:
            return hidden(replace(group, exchange=exchange), folder, False)
    model = build(spec, torch.float32, torch.device("cpu"), PAGE, group=group)
    load(model, demo_folder())
    shape = 2, PAGE, model.placement.kv_heads(spec.attention.kv_heads), spec.attention.head_dim
    column = torch.tensor([0, TOKENS], dtype=torch.int32)
    batch = AttentionBatch(
        query_start=column, context=column[1:], slots=column[:1], block_tables=torch.ones(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(PAGE, PAGE + TOKENS), max_query=TOKENS, max_context=TOKENS,
    )  # fmt: skip
    pages = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.layers)]
    return model.forward(torch.arange(40, 40 + TOKENS), torch.arange(TOKENS), batch, pages)


def test_a_model_says_the_same_with_it(few_ranks: Ranks, tmp_path: Path) -> None:
    plain = few_ranks.run(2, hidden, tmp_path, False)
    found = few_ranks.run(2, hidden, tmp_path, True)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], plain[0], rtol=1e-4, atol=1e-4)


def refused(group: Group, folder: Path) -> tuple[str, int]:
    """The reason that there is no exchange where the last rank's memory cannot be opened, and files that are left."""
    assert group.ranks is not None
    memory = FileMemory(folder, "open" if group.rank == group.size - 1 else "")
    try:
        open_exchange(group.ranks, WIDTH, torch.float16, torch.device("cpu"), memory)
    except OSError as error:
        return str(error), len(memory.held)
    return "", 0


def test_all_ranks_have_one_or_none(few_ranks: Ranks, tmp_path: Path) -> None:
    assert few_ranks.run(3, refused, tmp_path) == [("rank 2: open: refused", 0)] * 3
    assert not list(tmp_path.iterdir())


def described(group: Group, folder: Path) -> tuple[int, int, int, int, int]:
    with opened(group, WIDTH, torch.bfloat16, folder) as exchange:
        inboxes, few = exchange.inboxes, exchange.up_to(8)
        return few.rows, inboxes.rows, exchange.memory._size, len(set(inboxes.addresses.tolist())), inboxes.rank


def test_what_an_exchange_holds(few_ranks: Ranks, tmp_path: Path) -> None:
    room = MAX_ROWS // 3
    size = inbox_bytes(3, room, WIDTH, torch.bfloat16)
    assert few_ranks.run(3, described, tmp_path) == [(8, room, size, 3, rank) for rank in range(3)]


@pytest.mark.parametrize(("shape", "dtype", "expected"), [
    ((1, 8), torch.float16, True), ((5, 8), torch.float16, True), ((6, 8), torch.float16, False),
    ((0, 8), torch.float16, False), ((1, 16), torch.float16, False), ((1, 8), torch.float32, False),
])  # fmt: skip
def test_what_it_takes(shape: tuple[int, int], dtype: torch.dtype, expected: bool) -> None:
    turns = torch.zeros(9, dtype=torch.int32)
    inboxes = Inboxes(torch.zeros(2, dtype=torch.int64), turns, 0, 8, torch.float16)
    exchange = Exchange(inboxes, None, 9).up_to(5)  # type: ignore[arg-type]
    assert exchange.takes(torch.zeros(shape, dtype=dtype)) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_empty_words_are_minus_zeros(dtype: torch.dtype) -> None:
    words = torch.zeros(4, dtype=torch.uint32).fill_(empty_pair(dtype)).view(dtype)
    assert (words == 0.0).all()
    assert words.signbit().all()
