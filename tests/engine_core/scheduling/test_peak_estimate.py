"""The peak against a simulation of it, and what ends and preemptions teach."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.kv.block_layout import BlockLayout
from penstock.engine_core.scheduling.peak_estimate import Forecast, PeakEstimate, new_estimate, peak_blocks
from penstock.engine_core.scheduling.request import Request, Sequence
from penstock.engine_core.scheduling.running_batch import Slots
from penstock.protocol.messages import Sampling, SubmitTokens
from tests.engine_core.kv.test_block_layout import held

RUNNING = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 5)), max_size=12)


def estimate(running: list[tuple[int, int, int]], base: int, size: int) -> PeakEstimate:
    columns = np.array(running, np.int64).reshape(-1, 3)
    positions, further, spare = columns.T
    return new_estimate(BlockLayout(size), positions, further, np.minimum(spare, -(-positions // size)), base)


def simulated(view: PeakEstimate, size: int) -> int:
    """Blocks held at every moment, one position at a time."""
    peak = view.base
    for moment in range(int(view.further.max(initial=0)) + 1):
        held = view.base
        for position, further, spare in zip(view.positions, view.further, view.spare, strict=True):
            if further >= moment:
                held += -(-int(position + moment) // size) - int(spare)
        peak = max(peak, held)
    return peak


@given(RUNNING, st.integers(0, 9), st.integers(1, 9))
def test_the_peak_is_exact(running: list[tuple[int, int, int]], base: int, size: int) -> None:
    view = estimate(running, base, size)
    assert peak_blocks(view, size) == simulated(view, size)


@given(RUNNING, st.integers(1, 9), st.sampled_from(((7,), (0, 5), (0, 12, 3))))
def test_windows_never_hold_more_than_the_peak(
    running: list[tuple[int, int, int]], size: int, windows: tuple[int, ...]
) -> None:
    columns = np.array(running, np.int64).reshape(-1, 3)
    layout, nothing = BlockLayout(size, windows, ahead=1), np.zeros(len(columns), np.int64)
    view = new_estimate(layout, columns[:, 0], columns[:, 1], nothing, 0)
    for moment in range(int(view.further.max(initial=0)) + 1):
        alive = [int(first + moment) for first, more, _ in columns if more >= moment]
        assert sum(held(layout, count - 1, count) for count in alive) <= peak_blocks(view, size)


@given(RUNNING, st.integers(0, 9), st.integers(1, 9), st.tuples(st.integers(1, 60), st.integers(0, 60)))
def test_a_newcomer_fits_exactly_when_the_peak_with_it_does(
    running: list[tuple[int, int, int]], base: int, size: int, newcomer: tuple[int, int]
) -> None:
    both = estimate([*running, (*newcomer, 0)], base + 1, size)
    peak = simulated(both, size)
    for capacity, fits in ((peak, True), (peak - 1, False), (10**6, True)):
        found = Forecast(1.0).fits(estimate(running, base, size), estimate([(*newcomer, 0)], 1, size), capacity, size)
        assert (found is not None) == fits
        if found is not None:
            assert found.base == base + 1
            assert found.positions.tolist() == both.positions.tolist()


def test_the_expectation_follows_what_ends_use_and_never_passes_the_allowance() -> None:
    forecast = Forecast(1.0)
    assert forecast.share(1) == 1.0
    for _ in range(300):
        forecast.ended(10, 100)
    assert 0.1 <= forecast.share(256) < 0.12
    for _ in range(300):
        forecast.ended(100, 100)
    assert 0.98 < forecast.share(256) <= 1.0


def test_deviations_of_many_cancel() -> None:
    forecast = Forecast(0.5)
    for outputs in (10, 90) * 200:
        forecast.ended(outputs, 100)
    assert forecast.share(1) == 1.0
    assert 0.5 < forecast.share(400) < 0.6


def test_preemptions_raise_the_expectation_and_ends_wear_it_off() -> None:
    forecast = Forecast(0.0)
    before = forecast.share(8)
    for _ in range(3):
        forecast.preempted()
    raised = forecast.share(8)
    assert raised > before
    for _ in range(200):
        forecast.ended(0, 100)
    assert forecast.share(8) < raised / 10
    for _ in range(100):
        forecast.preempted()
    assert forecast.share(8) == 1.0


def test_a_choice_at_its_limit_has_nothing_further() -> None:
    further = Forecast(1.0).further(np.array([9, 10, 1]), np.array([10, 10, 10]), 3)
    assert further.tolist() == [0, 0, 8]


def test_blocks_that_rejected_drafts_left_behind_are_held_now_and_not_needed_again() -> None:
    slots, forecast = Slots(2, BlockLayout(4)), Forecast(1.0)
    message = SubmitTokens(id=1, token_ids=b"", sampling=Sampling())
    choice = Sequence(Request(message, 0, 1, 3, 20, None, frozenset()), 0, (0, 1, 0), array("i", [1] * 5), [])
    slot = slots.enter(choice)
    slots.num_computed_tokens[slot], slots.num_tokens[slot] = 4, 5
    slots.blocks.held[slot], slots.blocks.capacity[slot] = 4, 16  # room for positions 0..15, of which 5 are used
    view = forecast.estimate(slots, 4, 0)
    assert peak_blocks(view, 4) == 5  # 19 positions at its limit
    slots.blocks.held[slot], slots.blocks.capacity[slot] = 2, 8
    assert forecast.estimate(slots, 2, 0).positions.tolist() == [5]
    slots.blocks.held[slot], slots.blocks.capacity[slot] = 4, 16
    slots.limit[slot] = 8  # its end is near and needs no more than it holds
    assert peak_blocks(forecast.estimate(slots, 4, 0), 4) == 4
