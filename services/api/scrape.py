"""The text of /metrics: this process's numbers and the engine's as of its last heartbeat.

Each api process answers a scrape for itself, with its index as the label `api`, and for the engine, whose numbers all
of them share. With several processes on one port a scrape reaches one of them; the label keeps their series apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from protocol.messages import EngineStatus
from services.api.metrics import Histogram, Traffic
from services.api.pipeline import PipelineStatistics

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


class Scrape:
    """What one scrape finds, in the form that prometheus-client writes as text."""

    def __init__(
        self, api_index: int, traffic: Traffic, pipeline: PipelineStatistics, status: EngineStatus | None
    ) -> None:
        self._label = str(api_index)
        self._traffic = traffic
        self._pipeline = pipeline
        self._status = status

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
        for name, help_text, count in (
            ("penstock_prompt_tokens", "Prompt tokens of answered requests", statistics.prompt_tokens),
            ("penstock_completion_tokens", "Output tokens of answered requests", statistics.completion_tokens),
            ("penstock_submitted_requests", "Requests handed to tokenizers", self._pipeline.submitted),
            ("penstock_refused_requests", "Requests refused for want of room", self._pipeline.refused),
        ):
            total = CounterMetricFamily(name, help_text, labels=["api"])
            total.add_metric([self._label], count)
            yield total
        for name, help_text, count in (
            ("penstock_unfinished_requests", "Requests in the pipeline", self._pipeline.unfinished),
            ("penstock_connected_tokenizers", "Tokenizers that this process is linked to", self._pipeline.tokenizers),
        ):
            gauge = GaugeMetricFamily(name, help_text, labels=["api"])
            gauge.add_metric([self._label], count)
            yield gauge
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
