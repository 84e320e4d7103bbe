"""Whether one more sequence fits: the exact future peak of KV blocks, given how long each one is expected to run.

The peak is that of LightLLM's past-future scheduler (Gong et al., ASPLOS 2025): memory only grows between two ends, so
its maximum is at some end. Sorted by remaining length, the sum over those still running at each end is a running
sum. Here it counts blocks, not tokens: with c = a*size - b positions now, t = u*size + v positions later a sequence
holds a + u + (1 if v > b) columns, so the exact count is one running sum and one running histogram of b. A column has a
block of each KV group that grows until the sequence's end. A group whose window is shorter than that counts with the
most that it holds from the start on, which is never too little.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine_core.kv.block_layout import BlockLayout
from penstock.engine_core.scheduling.running_batch import Slots

Ints = npt.NDArray[np.int64]
MEMORY = 1.0 / 32  # weight of one end in the running mean
FORGET = 0.98  # what one end leaves of the margin that preemptions added


class PeakEstimate(msgspec.Struct, frozen=True):
    """Newcomers and running sequences at one moment. Arrays are [sequences]."""

    positions: Ints  # KV positions after the next step
    further: Ints  # positions to come after those, as expected
    growing: Ints  # KV groups that take a block for every column until the end
    steady: Ints  # blocks of the other groups, at most
    spare: Ints  # blocks accounted to other sequences: not freed at this sequence's end
    base: int  # blocks accounted to no sequence: never freed


def new_estimate(layout: BlockLayout, positions: Ints, further: Ints, spare: Ints, base: int) -> PeakEstimate:
    """Of these sequences, whose groups follow from how long they become."""
    growing, steady = np.full(len(positions), layout.full), np.zeros(len(positions), np.int64)
    if layout.kinds:
        columns = -(-(positions + further) // layout.block_size)
        for most in layout.running:
            grows = columns <= most
            growing += grows
            steady += np.where(grows, 0, most)
    return PeakEstimate(positions, further, growing, steady, spare, base)


def peak_blocks(estimate: PeakEstimate, block_size: int) -> int:
    """The largest number of blocks held at any time from the next step on. O(sequences * block_size), vectorised."""
    if not len(estimate.positions):
        return estimate.base
    order = np.argsort(-estimate.further, kind="stable")
    positions, further, growing = estimate.positions[order], estimate.further[order], estimate.growing[order]
    columns = -(-positions // block_size)
    slack = columns * block_size - positions  # in 0 .. block_size-1
    whole, rest = np.divmod(further, block_size)
    counts = np.zeros((len(order), block_size + 1), np.int64)
    rank = np.arange(len(order))
    counts[rank, slack + 1] = growing
    smaller = counts.cumsum(axis=1).cumsum(axis=0)  # [i, v]: groups of sequences up to i whose slack is below v
    held = np.cumsum(growing * columns + estimate.steady[order] - estimate.spare[order])
    return estimate.base + int((held + np.cumsum(growing) * whole + smaller[rank, rest]).max())


class Forecast:
    """Owner of the expectation. It begins at the full allowance (1.0), with which nothing is ever preempted, and falls
    as sequences end early."""

    def __init__(self, expected_share: float) -> None:
        self._mean = expected_share
        self._deviation = 0.0
        self._margin = 0.0

    def share(self, running: int) -> float:
        """The share of its remaining allowance that each of `running` sequences is expected to use. What one uses
        beyond the mean another leaves, so the deviation of their sum grows with the root of their number."""
        return min(1.0, self._mean + 2.0 * self._deviation / math.sqrt(running or 1) + self._margin)

    def ended(self, outputs: int, allowance: int) -> None:
        """A sequence finished after this many of the tokens that it was allowed."""
        error = outputs / allowance - self._mean
        self._mean += MEMORY * error
        self._deviation += MEMORY * (abs(error) - self._deviation)
        self._margin *= FORGET

    def preempted(self) -> None:
        """The expectation was too low."""
        self._margin = min(1.0, 1.25 * self._margin + self._mean / 4 + 0.01)

    def further(self, tokens: Ints, limits: Ints, running: int) -> Ints:
        """Positions beyond the next step's. The last of a sequence's `tokens` tokens needs no KV at its end."""
        expected: Ints = np.ceil((limits - tokens) * self.share(running)).astype(np.int64)
        return np.maximum(expected - 1, 0)

    def estimate(self, slots: Slots, held: int, leaving: int) -> PeakEstimate:
        """The running sequences. `held`: blocks held in all; `leaving`: of those, given back when the fence opens."""
        rows, size = slots.occupied(), slots.blocks.layout.block_size
        limits = slots.limit[rows]
        tokens = np.minimum(np.maximum(slots.num_tokens[rows], slots.num_computed_tokens[rows] + 1), limits)
        spare = slots.blocks.borrowed[rows]
        base = held - leaving - int((slots.blocks.held[rows] - spare - slots.blocks.lent[rows]).sum())
        further = self.further(tokens, limits, len(rows))
        positions = np.minimum(tokens, limits - 1)
        ahead = np.maximum(
            slots.blocks.capacity[rows] - size + 1 - positions, 0
        )  # blocks that rejected drafts were given
        return new_estimate(slots.blocks.layout, positions + ahead, np.maximum(further - ahead, 0), spare, base)

    def fits(
        self, estimate: PeakEstimate, candidate: PeakEstimate, capacity: int, block_size: int
    ) -> PeakEstimate | None:
        """The estimate with the candidate (one sequence; its base is added), or None if its peak is too high."""
        both = PeakEstimate(
            np.concatenate((estimate.positions, candidate.positions)),
            np.concatenate((estimate.further, candidate.further)),
            np.concatenate((estimate.growing, candidate.growing)),
            np.concatenate((estimate.steady, candidate.steady)),
            np.concatenate((estimate.spare, candidate.spare)),
            estimate.base + candidate.base,
        )
        columns = -(-(both.positions + both.further) // block_size)
        if both.base + int((both.growing * columns + both.steady - both.spare).sum()) <= capacity:
            return both  # even if all ended at the same time
        return both if peak_blocks(both, block_size) <= capacity else None
