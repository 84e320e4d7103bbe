"""The text of /metrics: every api process's numbers, told apart by the label `api`, and the engine's as of its last
heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from engine_core.histogram import cumulated
from protocol.figures import HistogramStatistics
from protocol.messages import EngineStatus
from protocol.version import VERSION
from services.api.aliases import vllm
from services.api.ledger import Entry

GAUGES: tuple[tuple[str, str], ...] = (  # fields of EngineStatus
    ("running", "Requests in the engine's slots"),
    ("waiting", "Requests waiting for a slot"),
    ("blocks", "KV blocks in all"),
    ("blocks_free", "KV blocks that hold nothing"),
    ("blocks_idle", "KV blocks whose content is cached and not in use"),
    ("step_age", "Seconds since the last step was applied, 0 when idle"),
    ("drain_rate", "Requests finished per second, recently"),
    ("epoch", "Epoch of the executors"),
)
UNITS: Mapping[str, str] = {"step_age": "step_age_seconds"}  # names that tell a unit which the field does not
TOTALS: tuple[tuple[str, str], ...] = (
    ("step", "Steps applied"),
    ("prompt_tokens", "Prompt tokens of admitted requests"),
    ("cached_tokens", "Prompt tokens found in the prefix cache"),
    ("output_tokens", "Tokens sampled"),
    ("finished", "Requests that finished"),
    ("aborted", "Requests that were aborted"),
    ("failed", "Requests that failed"),
    ("preemptions", "Requests put back to wait for blocks"),
    ("drafts", "Rows of steps that carried drafts"),
    ("draft_tokens", "Draft tokens that were verified"),
    ("accepted_tokens", "Draft tokens that stand in an output"),
)


API_TOTALS: tuple[tuple[str, str, Callable[[Entry], int]], ...] = (
    ("penstock_prompt_tokens", "Prompt tokens of answered requests", lambda entry: entry.traffic.prompt_tokens),
    ("penstock_completion_tokens", "Output tokens of answered requests", lambda entry: entry.traffic.completion_tokens),
    ("penstock_submitted_requests", "Requests handed to tokenizers", lambda entry: entry.pipeline.submitted),
    ("penstock_refused_requests", "Requests refused for want of room", lambda entry: entry.pipeline.refused),
)
API_GAUGES: tuple[tuple[str, str, Callable[[Entry], int]], ...] = (
    ("penstock_unfinished_requests", "Requests in the pipeline", lambda entry: entry.pipeline.unfinished),
    ("penstock_connected_tokenizers", "Tokenizers it is linked to", lambda entry: entry.pipeline.tokenizers),
)
API_TIMINGS: tuple[tuple[str, str, Callable[[Entry], HistogramStatistics]], ...] = (
    ("penstock_time_to_first_token_seconds", "Request to first token", lambda entry: entry.first_token),
    ("penstock_inter_token_latency_seconds", "Gap between deltas", lambda entry: entry.inter_token),
    ("penstock_request_duration_seconds", "Whole responses", lambda entry: entry.request),
)
Family = CounterMetricFamily | GaugeMetricFamily


class Scrape:
    """What one scrape finds, in the form that prometheus-client writes as text."""

    def __init__(
        self, entries: Sequence[Entry], status: EngineStatus | None, *, model: str = "", alias: str = "none"
    ) -> None:
        self._entries = entries
        self._status = status
        self._model = model
        self._alias = alias

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return bytes(generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        """Every family; called by `generate_latest`."""
        build = GaugeMetricFamily("penstock_build_info", "1; what runs", labels=["version", "model"])
        build.add_metric([VERSION, self._model], 1)
        yield build
        yield from self._of_apis()
        if self._status is not None:
            yield from engine_families(self._status)
        if self._alias == "vllm":
            yield from vllm(self._entries, self._status, self._model)

    def _of_apis(self) -> Iterable[Metric]:
        responses = CounterMetricFamily(
            "penstock_requests", "Responses by endpoint and HTTP status; 499: the client left",
            labels=["api", "endpoint", "status"],
        )  # fmt: skip
        for entry in self._entries:
            for (endpoint, status), count in sorted(entry.traffic.responses.items()):
                responses.add_metric([str(entry.index), endpoint, str(status)], count)
        yield responses
        for name, help_text, counted in API_TOTALS:
            yield self._filled(CounterMetricFamily(name, help_text, labels=["api"]), counted)
        for name, help_text, counted in API_GAUGES:
            yield self._filled(GaugeMetricFamily(name, help_text, labels=["api"]), counted)
        for name, help_text, timed in API_TIMINGS:
            family = HistogramMetricFamily(name, help_text, labels=["api"])
            for entry in self._entries:
                add_histogram(family, str(entry.index), timed(entry))
            yield family

    def _filled(self, family: Family, counted: Callable[[Entry], int]) -> Metric:
        for entry in self._entries:
            family.add_metric([str(entry.index)], counted(entry))
        return family


def add_histogram(family: HistogramMetricFamily, label: str, statistics: HistogramStatistics) -> None:
    family.add_metric([label], cumulated(statistics), statistics.total)


def engine_families(status: EngineStatus) -> Iterator[Metric]:
    """The engine's numbers as of its last heartbeat."""
    ready = GaugeMetricFamily("penstock_engine_ready", "1 when the engine takes requests")
    ready.add_metric([], float(status.ready))
    yield ready
    for name, help_text in GAUGES:
        gauge = GaugeMetricFamily(f"penstock_engine_{UNITS.get(name, name)}", help_text)
        gauge.add_metric([], getattr(status, name))
        yield gauge
    for name, help_text in TOTALS:
        total = CounterMetricFamily(f"penstock_engine_{name}", help_text)
        total.add_metric([], getattr(status, name))
        yield total
    places = CounterMetricFamily(
        "penstock_engine_accepted_tokens_by_position",
        "Draft tokens that stand in an output, by place in the draft from 0; a long draft's first places alone",
        labels=["position"],
    )
    for place, count in enumerate(status.accepted_at):
        places.add_metric([str(place)], count)
    yield places
