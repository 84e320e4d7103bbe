"""The plain-torch references of Gated DeltaNet and Mamba-2 against their definitions, however texts are cut."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.states import PIECE
from tests.kernels.state_scene import Layer, Row, batch_of, cache_of, cut_at, exact, layer, run_step

pytestmark = pytest.mark.usefixtures("one_thread")

DRAFTS = 3
LENGTH = 200


def run(given: Layer, steps: list[list[Row]], states: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Results of all texts as they were left by the last step that computed them, states and bases."""
    texts = len(given.v)
    cache = cache_of(given, texts + 1, DRAFTS + 1, states)
    bases = torch.zeros(texts + 1, dtype=torch.int32)
    results = torch.full(given.v.shape, float("nan"), dtype=given.v.dtype)
    for rows in steps:
        found = run_step(given, rows, cache, batch_of(rows, bases, DRAFTS + 1))
        first = 0
        for row in rows:
            results[row.text, row.start : row.start + row.count] = found[first : first + row.count]
            first += row.count
    return results, cache.states, bases


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("heads", [(1, 1), (2, 4)])
def test_definition_in_double_precision(heads: tuple[int, int], delta: bool) -> None:
    """A prompt in chunks beside one in single tokens, then steps of drafts, half of which are rejected."""
    given = layer(2, LENGTH, heads, (8, 6), delta=delta, seed=1).to("cpu", torch.float64)
    steps = [[row, Row(1, row.start, 1, steps=True)] for row in cut_at(0, 1, 50, 66, 130)]
    steps = [[rows[0], Row(1, at, 1, steps=True)] for at, rows in enumerate(steps)]
    steps += [[Row(1, at, 1, steps=True)] for at in range(len(steps), 130)]
    steps += [[Row(0, at, 4, True), Row(1, at, 4, True)] for at in range(130, LENGTH - 3, 2)]
    results, states, bases = run(given, steps, torch.float64)
    assert bases.tolist() == [0, 192, 192]
    for text in range(2):
        expected, held = exact(given, text)
        torch.testing.assert_close(results[text], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(states[text + 1], held[191], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delta", [True, False])
def test_bits_do_not_depend_on_cuts(delta: bool, dtype: torch.dtype) -> None:
    """Chunks whole, cut anywhere, and one by one: all results and the state have the same bits."""
    given = layer(1, LENGTH, (1, 2), (16, 8), delta=delta, seed=2).to("cpu", dtype)
    whole = run(given, [[Row(0, 0, LENGTH)]])
    assert whole[2].tolist() == [0, 192]
    for steps in (
        [[row] for row in cut_at(0, 1, 63, 64, 65, 130, 199, LENGTH)],
        [[row] for row in cut_at(0, 128, 192, LENGTH)],
        [[Row(0, 0, 30)], *([Row(0, at, 1, True)] for at in range(30, LENGTH))],
    ):
        found = run(given, steps)
        assert torch.equal(found[0], whole[0])
        if found[2].tolist() == whole[2].tolist():
            assert torch.equal(found[1][1], whole[1][1])


@pytest.mark.parametrize("delta", [True, False])
def test_snapshots_are_the_states_that_chunks_pass(delta: bool) -> None:
    """By the definition; and bit for bit what a slot holds whose text ends there, however the text is cut."""
    given = layer(2, LENGTH, (1, 2), (8, 6), delta=delta, seed=7).to("cpu", torch.float64)
    kept = {64: 2, 128: 0, 192: 3}
    ended = {at: run(given, [[Row(0, 0, at)]], torch.float64)[1][1] for at in kept}
    for cuts in ((LENGTH,), (64, LENGTH), (65, 127, 192, LENGTH)):
        cache = cache_of(given, 3, 1, torch.float64)
        bases = torch.zeros(3, dtype=torch.int32)
        for number, row in enumerate(cut_at(0, *cuts, kept=kept)):
            run_step(given, rows := [Row(1, number, 1, True), row], cache, batch_of(rows, bases, 1))
        assert cache.snapshots is not None
        for at, place in kept.items():
            torch.testing.assert_close(cache.snapshots[place], exact(given, 0)[1][at - 1], rtol=1e-6, atol=1e-6)
            assert torch.equal(cache.snapshots[place], ended[at])
        assert cache.snapshots[1].isnan().all()


def test_rejected_drafts_leave_nothing() -> None:
    """Drafts that reach into the next piece, all rejected, change neither state nor results."""
    given = layer(1, LENGTH, (1, 1), (16, 16), delta=True, seed=3)
    plain = [[Row(0, 0, 60)], *([Row(0, at, 1, True)] for at in range(60, 140))]
    drafted = [[Row(0, 0, 60)], *([Row(0, at, 1 + DRAFTS, True)] for at in range(60, 140))]
    one, other = run(given, plain), run(given, drafted)
    assert one[2].tolist() == other[2].tolist() == [0, 128]
    assert torch.equal(one[0][0, :140], other[0][0, :140])
    assert torch.equal(one[1][1], other[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_costs(dtype: torch.dtype) -> None:
    """Of inputs of the type, against fp64: one rounding of the result."""
    given = layer(1, 300, (2, 2), (64, 64), delta=True, seed=4).to("cpu", dtype)
    results, states, _ = run(given, [[Row(0, 0, 300)]])
    expected, held = exact(given, 0)
    torch.testing.assert_close(results[0].double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
    torch.testing.assert_close(states[1].double(), held[255], rtol=1e-4, atol=1e-5)


def test_a_row_that_does_not_continue_begins_at_its_own_piece() -> None:
    """As in a dummy run: it ends, and other slots are as they were."""
    given = layer(1, 4 * PIECE, (1, 1), (8, 8), delta=True, seed=5)
    bases = torch.tensor([0, 2 * PIECE], dtype=torch.int32)
    batch = batch_of([Row(0, 10, 1, True)], bases, 1)
    assert (batch.bases.tolist(), bases.tolist()) == ([0], [0, 0])
    batch = batch_of([Row(0, 3 * PIECE + 1, 4)], bases, 1)
    assert (batch.bases.tolist(), bases.tolist(), batch.pieces.tolist()) == ([192], [0, 192], [0, 1])
    assert run_step(given, [Row(0, 3 * PIECE + 1, 4)], cache_of(given, 2, 1), batch).shape == (4, 1, 8)
