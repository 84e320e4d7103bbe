"""The kernels of Gated DeltaNet and Mamba-2 against the definition in fp64, and against themselves otherwise cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import recurrence_triton
from penstock.kernels.recurrence_triton import recur_rows
from penstock.kernels.states import Gates, Part, RecurrentCache, StateBatch
from penstock.kernels.states_triton import launch_begin
from tests.kernels.state_scene import Layer, Row, batch_of, cache_of, cut_at, exact, layer

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

DRAFTS = 3
LENGTH = 150


def step(given: Layer, rows: list[Row], cache: RecurrentCache, batch: StateBatch) -> Tensor:
    """As the product calls it: queries and keys are columns of a wider product."""
    texts = [(row.text, slice(row.start, row.start + row.count)) for row in rows]
    q, k, v, decay, weight = (
        torch.cat([x[text, own] for text, own in texts]) for x in (given.q, given.k, given.v, given.decay, given.weight)
    )
    wide = torch.cat((q, k), 2)
    part = Part(wide[:, :, : q.shape[2]], wide[:, :, q.shape[2] :], v, Gates(decay, weight))
    return recur_rows(part, cache, batch, given.scale, given.skip)


def run(given: Layer, steps: list[list[Row]], most_steps: int = DRAFTS + 1) -> tuple[Tensor, Tensor, Tensor]:
    texts = len(given.v)
    cache = cache_of(given, texts + 1, most_steps)
    bases = torch.zeros(texts + 1, dtype=torch.int32, device=given.v.device)
    results = torch.full(given.v.shape, float("nan"), dtype=given.v.dtype)
    for rows in steps:
        found, first = step(given, rows, cache, batch_of(rows, bases, most_steps)).cpu(), 0
        for row in rows:
            results[row.text, row.start : row.start + row.count] = found[first : first + row.count]
            first += row.count
    return results, cache.states.cpu(), bases.cpu()


def mixed_steps() -> list[list[Row]]:
    """One text's chunks beside another's, then single tokens of one beside drafts of the other, half of them rejected,
    over the end of a piece."""
    steps = [[one, other] for one, other in zip(cut_at(0, 20, 62), cut_at(1, 110, 123), strict=True)]
    steps += [[Row(1, 123 + 2 * at, 4, True), Row(0, 62 + at, 1, True)] for at in range(4)]
    return [*steps, [Row(0, 66, 64), Row(1, 131, 1, True)]]


@pytest.mark.parametrize(
    ("heads", "dims", "delta"),
    [((1, 2), (16, 40), True), ((2, 2), (24, 16), True), ((1, 2), (32, 24), False)],
)
def test_definition(heads: tuple[int, int], dims: tuple[int, int], delta: bool, device: str) -> None:
    given = layer(2, LENGTH, heads, dims, delta=delta, seed=1)
    results, states, bases = run(given.to(device, torch.float32), mixed_steps())
    assert bases.tolist() == [0, 128, 128]
    for text, length in enumerate((130, 132)):
        expected, held = exact(given, text)
        torch.testing.assert_close(results[text, :length].double(), expected[:length], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[text + 1].double(), held[127], rtol=1e-4, atol=1e-5)


def test_few_programs_take_turns_at_the_pieces_of_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = layer(2, 70, (1, 2), (16, 16), delta=True, seed=11).to(device, torch.float32)
    steps = [[Row(0, 0, 63), Row(1, 0, 63)], *([Row(0, at, 1, True), Row(1, at, 1, True)] for at in (63, 64))]
    expected = run(given, steps, 1)
    monkeypatch.setattr(recurrence_triton, "PROGRAMS", 1)
    found = run(given, steps, 1)
    assert found[2].tolist() == expected[2].tolist() == [0, 64, 64]
    assert torch.equal(found[0][:, :65], expected[0][:, :65])
    assert torch.equal(found[1][1:], expected[1][1:])


@pytest.mark.parametrize("delta", [True, False])
def test_inputs_of_16_bits(delta: bool, device: str) -> None:
    """Of a width at which their loads are pipelined on a GPU, through three pieces."""
    given = layer(1, 200, (1, 1), (64, 64), delta=delta, seed=6).to("cpu", torch.float16)
    results, states, _ = run(given.to(device, torch.float16), [[Row(0, 0, 70)], [Row(0, 70, 130)]])
    expected, held = exact(given.to("cpu", torch.float64), 0)
    for found, wanted in ((results[0].double(), expected), (states[1].double(), held[191])):
        assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("delta", [True, False])
def test_bits_do_not_depend_on_cuts(delta: bool, device: str) -> None:
    """Of a chunk's results, wherever it begins and beside whatever; of the state, by whatever steps it came."""
    given = layer(2, LENGTH, (1, 1), (16, 16), delta=delta, seed=2).to(device, torch.float32)
    whole = run(given, [[Row(0, 0, LENGTH)]])
    other = Row(1, 0, 3)
    cut = run(given, [[other, Row(0, 0, 1)], [Row(0, 1, 69)], [Row(0, 70, 58), Row(1, 3, 1, True)], [Row(0, 128, 22)]])
    assert torch.equal(cut[0][0], whole[0][0])
    assert torch.equal(cut[1][1], whole[1][1])
    single = run(given, [[Row(0, 0, 120)], *([Row(0, at, 1, True)] for at in range(120, 130))])
    assert single[2].tolist() == whole[2].tolist() == [0, 128, 0]
    assert torch.equal(single[1][1], whole[1][1])


@pytest.mark.parametrize("delta", [True, False])
def test_snapshots_are_the_states_that_chunks_pass(delta: bool, device: str) -> None:
    """By the definition; and bit for bit what a slot holds whose text ends there, however the text is cut. Of another
    text in the step one is kept, too."""
    drawn = layer(2, LENGTH, (1, 2), (16, 24), delta=delta, seed=8)
    given = drawn.to(device, torch.float32)
    kept = {64: 2, 128: 0}
    ended = {at: run(given, [[Row(0, 0, at)]])[1][1] for at in kept}
    for cuts in ((LENGTH,), (63, 130, LENGTH)):
        cache = cache_of(given, 3, 1)
        bases = torch.zeros(3, dtype=torch.int32, device=given.v.device)
        for number, row in enumerate(cut_at(0, *cuts, kept=kept)):
            rows = [Row(1, 64 + number, 1, True), row] if number else [Row(1, 0, 64, kept={64: 3}), row]
            step(given, rows, cache, batch_of(rows, bases, 1))
        assert cache.snapshots is not None
        found = cache.snapshots.cpu()
        for at, place in kept.items():
            torch.testing.assert_close(found[place].double(), exact(drawn, 0)[1][at - 1], rtol=1e-4, atol=1e-5)
            assert torch.equal(found[place], ended[at])
        torch.testing.assert_close(found[3].double(), exact(drawn, 1)[1][63], rtol=1e-4, atol=1e-5)
        assert found[1].isnan().all()


def test_a_row_has_the_same_bits_beside_others(device: str) -> None:
    given = layer(3, 80, (1, 2), (16, 16), delta=True, seed=3).to(device, torch.float32)
    alone = run(given, [[Row(1, 0, 70)], [Row(1, 70, 1, True)], [Row(1, 71, 4, True)]])
    beside = run(given, [
        [Row(0, 0, 9), Row(1, 0, 70), Row(2, 0, 80)], [Row(0, 9, 1, True), Row(1, 70, 1, True)],
        [Row(0, 10, 2, True), Row(1, 71, 4, True)],
    ])  # fmt: skip
    assert torch.equal(beside[0][1, :75], alone[0][1, :75])
    assert torch.equal(beside[1][2], alone[1][2])


def test_keys_that_are_all_the_same(device: str) -> None:
    """A series of powers would lose all digits; the inverse by blocks keeps them."""
    drawn = layer(1, 64, (1, 1), (16, 16), delta=True, seed=5)
    given = Layer(
        drawn.q, drawn.k[:, :1].expand_as(drawn.k), drawn.v, torch.zeros(1, 64, 1), torch.ones(1, 64, 1), 0.25
    )
    results, states, _ = run(given.to(device, torch.float32), [[Row(0, 0, 64)]])
    expected, held = exact(given, 0)
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[1].double(), held[63], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_the_references(seed: int, device: str) -> None:
    """Rows of all kinds, those without tokens on one slot."""
    from penstock.kernels.states import PIECE, advance_bases

    random = torch.Generator().manual_seed(seed)
    rows = 1 + 11 * seed
    counts = torch.randint(0, 300, (rows,), generator=random) * torch.randint(0, 2, (rows,), generator=random)
    stepping = torch.randint(0, 2, (rows,), generator=random)
    counts = torch.where(stepping > 0, counts % 5, counts)
    slots = torch.where(counts > 0, 1 + torch.randperm(rows, generator=random), 0)
    starts = torch.randint(0, 400, (rows,), generator=random)
    starts = torch.where(stepping > 0, starts // PIECE * PIECE + PIECE - 2, starts)
    query_start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    bases = torch.randint(0, 6, (rows + 1,), generator=random) * PIECE
    given = [x.to(torch.int32) for x in (query_start, slots, starts, stepping, bases)]
    there = [x.clone().to(device) for x in given]
    found = launch_begin(*there, PIECE)
    expected = advance_bases(*given)
    assert torch.equal(there[4].cpu(), given[4])
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(one.cpu(), other)
    works = int(expected[2][0])
    assert torch.equal(found[2].cpu()[: works + 1], expected[2][: works + 1])
