"""Histograms: what is observed, merged and told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.histogram import Histogram, HistogramStatistics, cumulated, merged

BOUNDS = (0.001, 0.01, 0.1, 1.0)
VALUES = st.lists(st.floats(0.0, 10.0, allow_nan=False), max_size=40)


def observed(values: list[float]) -> HistogramStatistics:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    return histogram.statistics()


@given(VALUES)
def test_each_observation_is_in_one_bucket_whose_bound_it_does_not_pass(values: list[float]) -> None:
    statistics = observed(values)
    assert sum(statistics.counts) == len(values)
    assert statistics.total == pytest.approx(sum(values))
    for bound, (text, count) in zip((*BOUNDS, float("inf")), cumulated(statistics), strict=True):
        assert float(text) == bound
        assert count == sum(value <= bound for value in values)


@given(VALUES, VALUES)
def test_merged_histograms_are_that_of_all_observations(first: list[float], second: list[float]) -> None:
    together, apart = observed(first + second), merged([observed(first), observed(second)])
    assert apart.counts == together.counts
    assert apart.total == pytest.approx(together.total)


def test_only_histograms_of_the_same_buckets_merge() -> None:
    with pytest.raises(ValueError):
        merged([observed([0.5]), Histogram((1.0,)).statistics()])
