"""Observations counted by size, as Prometheus wants them: what a step or a request may pay for being seen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import msgspec


class HistogramStatistics(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Observations per bucket (the last one is unbounded) and their sum, in the unit of the bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts per bucket: an observation costs a bisection, since one falls due per token."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def statistics(self) -> HistogramStatistics:
        return HistogramStatistics(self._bounds, tuple(self._counts), self._total)


def merged(several: Sequence[HistogramStatistics]) -> HistogramStatistics:
    """At least one, of the same bounds, as one."""
    counts = tuple(map(sum, zip(*(each.counts for each in several), strict=True)))
    return HistogramStatistics(several[0].bounds, counts, sum(each.total for each in several))


def cumulated(statistics: HistogramStatistics) -> list[tuple[str, float]]:
    """Observations up to each bound, as Prometheus counts them, by the bound's text."""
    bounds = (*map(str, statistics.bounds), "+Inf")
    return list(zip(bounds, accumulate(statistics.counts), strict=True))
