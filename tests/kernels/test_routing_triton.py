"""Kernels that route and sort: against the plain form, and against a sort on the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels import routing_triton
from penstock.kernels.experts import route
from penstock.kernels.records import Routing
from penstock.kernels.routing_triton import Schedule, most_tiles, route_rows, sort_pairs


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("experts", "chosen", "dtype", "normalised"),
    [
        (8, 2, torch.float32, True), (128, 8, torch.bfloat16, True), (60, 5, torch.float16, False),
        (300, 3, torch.float32, False), (1, 1, torch.bfloat16, True), (4, 4, torch.float32, False),
    ],
)  # fmt: skip
def test_routes(experts: int, chosen: int, dtype: torch.dtype, normalised: bool, device: str) -> None:
    logits = (torch.randn(2, experts + 3) * 3).to(dtype)[:, :experts]  # rows that lie apart
    expected = route(logits, Routing(chosen, normalised))
    found = route_rows(logits.to(device), Routing(chosen, normalised))
    assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.shares.cpu(), expected.shares, rtol=1e-5, atol=1e-7)
    assert found.total == expected.total == experts


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_scores_biases_and_scales(normalised: bool, sigmoid: bool, biased: bool, device: str) -> None:
    logits, bias = torch.randn(5, 60) * 2, torch.randn(60) * 0.3 if biased else None
    expected = route(logits, Routing(6, normalised, sigmoid, 2.5, bias))
    found = route_rows(
        logits.to(device), Routing(6, normalised, sigmoid, 2.5, None if bias is None else bias.to(device))
    )
    assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.shares.cpu(), expected.shares, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("best", [1, 2])
@pytest.mark.parametrize(("experts", "groups", "top"), [(32, 8, 3), (20, 4, 1), (24, 3, 3), (160, 8, 3)])
def test_groups_limit_the_choice(experts: int, groups: int, top: int, best: int, device: str) -> None:
    for sigmoid in (True, False):
        logits, bias = torch.randn(5, experts) * 2, torch.randn(experts) * 0.3 - 1
        logits[0, 3] = torch.nan
        routing = Routing(4, True, sigmoid, 2.5, bias if sigmoid else None, groups, top, best)
        expected = route(logits, routing)
        found = route_rows(logits.to(device), routing._replace(bias=bias.to(device) if sigmoid else None))
        assert torch.equal(found.experts.cpu()[1:], expected.experts[1:])
        torch.testing.assert_close(found.shares.cpu(), expected.shares, rtol=1e-5, atol=1e-7, equal_nan=True)
        assert found.shares[0].isnan().all()
        assert ((found.experts >= 0) & (found.experts < experts)).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("experts", "chosen", "groups", "dtype"),
    [(8, 2, 1, torch.float32), (60, 4, 4, torch.bfloat16), (300, 7, 1, torch.float16)],
)
def test_a_shared_expert_is_the_last(
    experts: int, chosen: int, groups: int, dtype: torch.dtype, gated: bool, device: str
) -> None:
    """Its gates stand behind the logits."""
    both = (torch.randn(5, experts + 8) * 2).to(dtype)
    routing = Routing(chosen, True, scale=2.5, groups=groups, top_groups=(groups + 1) // 2, shared=True)
    expected = route(both[:, :experts], routing, both[:, experts] if gated else None)
    both = both.to(device)
    found = route_rows(both[:, :experts], routing, both[:, experts] if gated else None)
    assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.shares.cpu(), expected.shares, rtol=1e-5, atol=1e-7)
    assert found.total == experts


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shared", [False, True])
def test_tokens_of_padding_go_to_nobody(shared: bool, device: str) -> None:
    """No expert is theirs, also of those that all tokens go to, so none has a place in the order."""
    logits, real = torch.randn(5, 8), torch.tensor([3], dtype=torch.int32)
    routing = Routing(2, True, shared=shared)
    expected = route(logits, routing, real=real)
    found = route_rows(logits.to(device), routing, real=real.to(device))
    assert torch.equal(found.experts.cpu(), expected.experts)
    assert int(sort_pairs(found.experts, 0, 8 + shared, 16, sizes=(sizes := zeros(8 + shared, device))).total) > 0
    assert int(sizes.sum()) == 3 * (2 + shared)


def zeros(count: int, device: str) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def test_of_equals_the_first(device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0] * 5, [-2.0, -1.0, -1.0, -9.0, -1.0]], device=device)
    assert route_rows(logits, Routing(3, True)).experts.tolist() == [[1, 2, 4], [0, 1, 2], [1, 2, 4]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's own sums
@pytest.mark.parametrize("normalised", [False, True])
def test_rows_that_are_no_numbers_have_experts_and_stay_alone(normalised: bool, device: str) -> None:
    logits = torch.randn(6, 8)
    expected = route(logits, Routing(3, normalised))
    logits[1, 5], logits[2], logits[4, 0] = torch.nan, torch.nan, torch.inf
    found = route_rows(logits.to(device), Routing(3, normalised))
    for row in (1, 2, 4):
        assert found.shares[row].isnan().any()
    assert found.shares[1:3].isnan().all()
    assert ((found.experts >= 0) & (found.experts < 8)).all()
    for row in (0, 3, 5):
        assert torch.equal(found.experts[row].cpu(), expected.experts[row])
        torch.testing.assert_close(found.shares[row].cpu(), expected.shares[row], rtol=1e-5, atol=1e-7)


def check(schedule: Schedule, experts: Tensor, first: int, held: int, rows: int, places: Tensor | None = None) -> None:
    """Every pair of an expert that is held stands in one tile of that expert, in the order of pairs."""
    pairs = experts.flatten().cpu()
    tiles = schedule.tiles[: int(schedule.total)].cpu().tolist()
    assert len(tiles) <= len(schedule.tiles) == most_tiles(len(pairs), held, rows)
    order = schedule.order.cpu()
    expected = {expert: (pairs == first + expert).nonzero().flatten().tolist() for expert in range(held)}
    found: dict[int, list[int]] = {expert: [] for expert in range(held)}
    place = 0
    for expert, begin, size in tiles:
        assert (begin, 0 < size <= rows) == (place, True)  # without gaps
        assert len(found[expert]) % rows == 0  # only an expert's last tile is not full
        found[expert] += order[begin : begin + size].tolist()
        place += size
    assert found == expected
    assert [expert for expert, _, _ in tiles] == sorted(expert for expert, _, _ in tiles)
    if places is not None:
        assert torch.equal(places.cpu()[order[:place].long()], torch.arange(place, dtype=torch.int32))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [8, 128])
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "first", "held"),
    [(1, 8, 2, 0, 8), (37, 13, 3, 0, 13), (37, 16, 3, 4, 4), (5, 8, 2, 6, 2), (90, 3, 2, 0, 3)],
)
def test_schedules(tokens: int, count: int, chosen: int, first: int, held: int, rows: int, device: str) -> None:
    experts = torch.rand(tokens, count).argsort(1)[:, :chosen].int().contiguous().to(device)
    check(sort_pairs(experts, first, held, rows), experts, first, held, rows)


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_all_tokens_go_to_one_expert(expert: int, device: str) -> None:
    experts = torch.full((50, 1), expert, dtype=torch.int32, device=device)
    check(sort_pairs(experts, 0, 8, 16), experts, 0, 8, 16)
    check(sort_pairs(experts, 2, 3, 16), experts, 2, 3, 16)  # 3 alone is held


def test_more_pairs_than_are_counted_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = torch.randint(5, (400, 3), dtype=torch.int32, device=device)
    monkeypatch.setattr(routing_triton, "FEW", 64)
    monkeypatch.setattr(routing_triton, "CHUNK", 64)
    monkeypatch.setattr(routing_triton, "PART", 16)
    sizes, places = (torch.zeros(count, dtype=torch.int32, device=device) for count in (5, 1200))
    check(sort_pairs(experts, 0, 5, 64, sizes=sizes, places=places), experts, 0, 5, 64, places)
    assert torch.equal(sizes, experts.flatten().bincount(minlength=5).int())
    few = experts[:20].contiguous()
    check(sort_pairs(few, 1, 3, 16, places=places[:60]), few, 1, 3, 16, places[:60])
    check(sort_pairs(experts[:30].contiguous(), 0, 128, 16), experts[:30], 0, 128, 16)  # more experts than chunks


def test_numbers_that_are_no_experts_are_left_out(device: str) -> None:
    """What a prewarm leaves in memory is no route: still no tile is of an expert that there is not."""
    experts = torch.randint(-(2**30), 2**30, (40, 2), dtype=torch.int32, device=device)
    experts[7, 1] = 2
    schedule = sort_pairs(experts, 0, 4, 16)
    assert schedule.total.tolist() == [1]
    assert schedule.tiles[0].tolist() == [2, 0, 1]
    assert int(schedule.order[0]) == 15


@settings(max_examples=10)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.integers(0, 5), st.integers(1, 6), st.sampled_from([1, 4, 16]),
)  # fmt: skip
def test_any_routes_have_a_schedule(numbers: list[int], first: int, held: int, rows: int) -> None:
    experts = torch.tensor(numbers, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")[:, None]
    check(sort_pairs(experts, first, held, rows), experts, first, held, rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "count", "chosen"), [(64, 128, 8), (8192, 128, 8), (1, 8, 2), (8192, 8, 2)])
def test_a_gpu_gives_the_schedule(tokens: int, count: int, chosen: int) -> None:
    logits = torch.randn(tokens, count, device="cuda").bfloat16()
    found = route(logits, Routing(chosen, True))
    expected = route(logits.cpu(), Routing(chosen, True))
    assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.shares.cpu(), expected.shares, rtol=1e-4, atol=1e-6)
    for first, held in ((0, count), (count // 2, count // 2)):
        check(sort_pairs(found.experts, first, held, 64), found.experts, first, held, 64)
