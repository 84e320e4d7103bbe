"""The arithmetic of the results, on records made by hand."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from penstock.services.bench.serve import distribution, summarize
from penstock.services.bench.workload import Record


def record(index: int, start: float, first: float, step: float, tokens: int, events: int = 0) -> Record:
    """A request whose tokens come every `step` seconds."""
    events = events or tokens
    last = first + step * (events - 1)
    return Record(index, 0, start, first, last, last + 0.01, events, tokens, 100, 10,
                  gaps=array("d", [step] * (events - 1)).tobytes())  # fmt: skip


def test_figures_of_two_requests() -> None:
    found = summarize([record(0, 10.0, 10.1, 0.02, 51), record(1, 10.5, 10.8, 0.04, 11)])
    assert (found.requests, found.completed, found.failed) == (2, 2, 0)
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (200, 20, 62)
    assert found.seconds == pytest.approx(1.21)  # 10.0 to 10.8 + 0.4 + 0.01
    assert found.output_tokens_per_second == pytest.approx(62 / 1.21, abs=0.01)
    assert found.total_tokens_per_second == pytest.approx(262 / 1.21, abs=0.01)
    assert found.ttft_ms is not None
    assert (found.ttft_ms.p50, found.ttft_ms.max) == (pytest.approx(200), pytest.approx(300))
    assert found.tpot_ms is not None
    assert found.tpot_ms.mean == pytest.approx(30)
    assert found.itl_ms is not None
    assert found.itl_ms.p50 == pytest.approx(20)  # 50 gaps of 20 ms, 10 of 40 ms
    assert found.itl_ms.p99 == pytest.approx(40)
    assert found.tokens_per_chunk == 1.0


def test_merged_chunks_do_not_flatter_time_per_token() -> None:
    found = summarize([record(0, 0.0, 1.0, 0.1, tokens=41, events=11)])
    assert found.tpot_ms is not None
    assert found.itl_ms is not None
    assert (found.tpot_ms.p50, found.itl_ms.p50) == (pytest.approx(25), pytest.approx(100))
    assert found.tokens_per_chunk == pytest.approx(41 / 11, abs=0.001)


def test_failed_requests_count_among_the_errors_alone() -> None:
    bad = Record(1, 0, 0.0, end=9.0, tokens=500, error="timeout", detail="late")
    found = summarize([record(0, 0.0, 0.1, 0.1, 10), bad, Record(2, 0, 0.0, end=1.0, error="timeout")])
    assert (found.completed, found.failed, found.output_tokens) == (1, 2, 10)
    assert found.errors == {"timeout": 2}
    assert found.error_examples == {"timeout": "late"}
    assert found.seconds == 9.0


def test_nothing_gives_nothing() -> None:
    found = summarize([])
    assert (found.requests, found.ttft_ms, found.output_tokens_per_second) == (0, None, 0.0)
    one = summarize([record(0, 0.0, 1.0, 0.0, 1)])
    assert one.tpot_ms is None
    assert one.ttft_ms is not None


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=1000)
    found = distribution(values)
    assert found is not None
    assert (found.p90, found.p99) == tuple(pytest.approx(np.percentile(values, p) * 1000) for p in (90, 99))
