"""Counters and histograms of one api process, and /metrics: its own and the engine's as of the last heartbeat.

Each api process answers a scrape for itself, with its index as the label `api`, and for the engine, whose numbers all
of them share. With several processes on one port a scrape reaches one of them; the label keeps their series apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from protocol.messages import EngineStatus

FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 5.0)
WHOLE_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

GAUGES: tuple[tuple[str, str], ...] = (
    ("running", "Requests in the engine's slots"),
    ("waiting", "Requests waiting for a slot"),
    ("blocks", "KV blocks in all"),
    ("blocks_free", "KV blocks that hold nothing"),
    ("blocks_idle", "KV blocks whose content is cached and not in use"),
    ("step_age", "Seconds since the last step was applied, 0 when idle"),
    ("drain_rate", "Requests finished per second, recently"),
    ("epoch", "Epoch of the executors"),
)
TOTALS: tuple[tuple[str, str], ...] = (
    ("step", "Steps applied"),
    ("prompt_tokens", "Prompt tokens of admitted requests"),
    ("cached_tokens", "Prompt tokens found in the prefix cache"),
    ("output_tokens", "Tokens sampled"),
    ("finished", "Requests that finished"),
    ("aborted", "Requests that were aborted"),
    ("failed", "Requests that failed"),
    ("preemptions", "Requests put back to wait for blocks"),
)


class HistogramStatistics(msgspec.Struct, frozen=True):
    """Observations per bucket (the last one is unbounded) and their sum in seconds."""

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

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def statistics(self) -> HistogramStatistics:
        return HistogramStatistics(self._bounds, tuple(self._counts), self._total)


class Timings:
    """How long clients wait."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN)
        self.inter_token = Histogram(INTER_TOKEN)
        self.request = Histogram(WHOLE_REQUEST)


class TrafficStatistics(msgspec.Struct, frozen=True):
    """Responses by endpoint and status, and the tokens that went through this process."""

    responses: dict[tuple[str, int], int]
    prompt_tokens: int
    completion_tokens: int
    departures: int


class Traffic:
    """What this process has answered."""

    def __init__(self) -> None:
        self.timings = Timings()
        self._responses: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._departures = 0

    def answered(self, endpoint: str, status: int, prompt_tokens: int, completion_tokens: int, seconds: float) -> None:
        """Count one response. Status 499 is a client that left."""
        self._responses[endpoint, status] += 1
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        self._departures += status == 499
        self.timings.request.observe(seconds)

    def statistics(self) -> TrafficStatistics:
        return TrafficStatistics(
            dict(self._responses), self._prompt_tokens, self._completion_tokens, self._departures
        )


class Scrape:
    """What one scrape finds, in the form that prometheus-client writes as text."""

    def __init__(self, api_index: int, traffic: Traffic, status: EngineStatus | None, unfinished: int) -> None:
        self._label = str(api_index)
        self._traffic = traffic
        self._status = status
        self._unfinished = unfinished

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return bytes(generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        """Every family; called by `generate_latest`."""
        yield from self._own()
        if self._status is not None:
            yield from engine_families(self._status)

    def _own(self) -> Iterable[Metric]:
        statistics = self._traffic.statistics()
        responses = CounterMetricFamily(
            "penstock_requests", "Responses by endpoint and HTTP status; 499: the client left",
            labels=["api", "endpoint", "status"],
        )  # fmt: skip
        for (endpoint, status), count in sorted(statistics.responses.items()):
            responses.add_metric([self._label, endpoint, str(status)], count)
        yield responses
        for name, help_text, value in (
            ("penstock_prompt_tokens", "Prompt tokens of answered requests", statistics.prompt_tokens),
            ("penstock_completion_tokens", "Output tokens of answered requests", statistics.completion_tokens),
        ):
            total = CounterMetricFamily(name, help_text, labels=["api"])
            total.add_metric([self._label], value)
            yield total
        unfinished = GaugeMetricFamily("penstock_unfinished_requests", "Requests in the pipeline", labels=["api"])
        unfinished.add_metric([self._label], self._unfinished)
        yield unfinished
        timings = self._traffic.timings
        yield self._histogram("penstock_time_to_first_token_seconds", "Request to first token", timings.first_token)
        yield self._histogram("penstock_inter_token_latency_seconds", "Gap between deltas", timings.inter_token)
        yield self._histogram("penstock_request_duration_seconds", "Whole responses", timings.request)

    def _histogram(self, name: str, help_text: str, histogram: Histogram) -> Metric:
        statistics = histogram.statistics()
        family = HistogramMetricFamily(name, help_text, labels=["api"])
        running = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, statistics.bounds), "+Inf"), statistics.counts, strict=True):
            running += count
            buckets.append((bound, running))
        family.add_metric([self._label], buckets, statistics.total)
        return family


def engine_families(status: EngineStatus) -> Iterator[Metric]:
    """The engine's numbers as of its last heartbeat."""
    ready = GaugeMetricFamily("penstock_engine_ready", "1 when the engine takes requests")
    ready.add_metric([], float(status.ready))
    yield ready
    for name, help_text in GAUGES:
        gauge = GaugeMetricFamily(f"penstock_engine_{name}", help_text)
        gauge.add_metric([], getattr(status, name))
        yield gauge
    for name, help_text in TOTALS:
        total = CounterMetricFamily(f"penstock_engine_{name}", help_text)
        total.add_metric([], getattr(status, name))
        yield total
