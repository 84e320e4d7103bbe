"""The text of /metrics: every process's figures. One of the api processes answers for all of them.

What clients saw has the label `api`, the number of the process that they came to; what a process tells of itself has
`role` and `index`, what an engine does `replica`. A process that is gone is not in what the others know, and so neither
are its series.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from penstock.engine_core.histogram import cumulated
from penstock.protocol import groups
from penstock.protocol.config import Config
from penstock.protocol.figures import HistogramStatistics, ProcessFigures
from penstock.protocol.links import Role
from penstock.protocol.version import VERSION
from penstock.services.metrics import definitions as catalogue
from penstock.services.metrics.aliases import vllm
from penstock.services.metrics.definitions import METRICS, Kind, Subject
from penstock.services.metrics.shared_files import Entry

API_TOTALS: tuple[tuple[str, str, Callable[[Entry], int]], ...] = (
    ("penstock_prompt_tokens", "Prompt tokens of answered requests", lambda entry: entry.traffic.prompt_tokens),
    ("penstock_completion_tokens", "Output tokens of answered requests", lambda entry: entry.traffic.completion_tokens),
    ("penstock_submitted_requests", "Requests handed to tokenizers", lambda entry: entry.pipeline.submitted),
    ("penstock_refused_requests", "Requests refused for want of room", lambda entry: entry.pipeline.refused),
    ("penstock_moved_requests", "Requests that went on at another tokenizer", lambda entry: entry.pipeline.moved),
)
API_GAUGES: tuple[tuple[str, str, Callable[[Entry], int]], ...] = (
    ("penstock_unfinished_requests", "Requests in the pipeline", lambda entry: entry.pipeline.unfinished),
    ("penstock_connected_tokenizers", "Tokenizers it is linked to", lambda entry: entry.pipeline.tokenizers),
)
API_TIMINGS: tuple[tuple[str, str, Callable[[Entry], HistogramStatistics]], ...] = (
    ("penstock_time_to_first_token_seconds", "Request to first token, of streams", lambda entry: entry.first_token),
    ("penstock_inter_token_latency_seconds", "Gap between deltas, of streams", lambda entry: entry.inter_token),
    ("penstock_request_duration_seconds", "Responses of any kind", lambda entry: entry.request),
    ("penstock_e2e_seconds", "Responses that brought all their tokens, from request to end", lambda entry: entry.e2e),
)
Family = CounterMetricFamily | GaugeMetricFamily


class Scrape:
    """What one scrape finds, in the form that prometheus-client writes as text.

    entries: of the api processes. others: what the processes behind them tell of themselves.
    """

    def __init__(
        self, config: Config, entries: Sequence[Entry], others: Sequence[ProcessFigures], model: str
    ) -> None:
        self._config = config
        self._entries = entries
        self._processes = (*(entry.process for entry in entries), *others)
        self._model = model

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return bytes(generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        """Every family; called by `generate_latest`."""
        build = GaugeMetricFamily("penstock_build_info", "1; what runs", labels=["version", "model"])
        build.add_metric([VERSION, self._model], 1)
        yield build
        yield from self._of_apis()
        yield from presence(self._config, self._processes)
        yield from families(self._processes)
        if self._config.api.metrics_alias == "vllm":
            yield from vllm(self._entries, self._processes, self._model)

    def _of_apis(self) -> Iterable[Metric]:
        responses = CounterMetricFamily(
            "penstock_requests", "Responses by endpoint and HTTP status; 499: the client left",
            labels=["api", "endpoint", "status"],
        )  # fmt: skip
        rejections = CounterMetricFamily(
            "penstock_rejected_requests", "Responses that were an error, or ended with one, by its code",
            labels=["api", "reason"],
        )  # fmt: skip
        for entry in self._entries:
            for (endpoint, status), count in sorted(entry.traffic.responses.items()):
                responses.add_metric([str(entry.index), endpoint, str(status)], count)
            for reason, count in sorted(entry.traffic.rejections.items()):
                rejections.add_metric([str(entry.index), reason], count)
        yield responses
        yield rejections
        for name, help_text, counted in API_TOTALS:
            yield self._filled(CounterMetricFamily(name, help_text, labels=["api"]), counted)
        for name, help_text, counted in API_GAUGES:
            yield self._filled(GaugeMetricFamily(name, help_text, labels=["api"]), counted)
        for name, help_text, timed in API_TIMINGS:
            family = HistogramMetricFamily(name, help_text, labels=["api"])
            for entry in self._entries:
                statistics = timed(entry)
                family.add_metric([str(entry.index)], cumulated(statistics), statistics.total)
            yield family

    def _filled(self, family: Family, counted: Callable[[Entry], int]) -> Metric:
        for entry in self._entries:
            family.add_metric([str(entry.index)], counted(entry))
        return family


def presence(config: Config, processes: Iterable[ProcessFigures]) -> Iterator[Metric]:
    """How many processes of each role there are, and how many there should be."""
    wanted = {
        Role.API: config.api.api_processes,
        Role.TOKENIZER: config.tokenizer.tokenizer_processes,
        Role.SCHEDULER: config.model.data_parallel_size,
        Role.EXECUTOR: groups.executors(config.model),
    }
    found = Counter(figures.role for figures in processes)
    present = GaugeMetricFamily("penstock_processes", "Processes that tell of themselves", labels=["role"])
    configured = GaugeMetricFamily("penstock_configured_processes", "Processes that there should be", labels=["role"])
    for role, count in wanted.items():
        present.add_metric([role.value], found[role])
        configured.add_metric([role.value], count)
    yield present
    yield configured


def families(processes: Iterable[ProcessFigures]) -> Iterator[Metric]:
    """The figures of these processes, in the order of the catalogue; what nobody tells is not there."""
    samples: dict[str, list[tuple[ProcessFigures, tuple[str, ...], float]]] = {}
    spreads: dict[str, list[tuple[ProcessFigures, tuple[str, ...], HistogramStatistics]]] = {}
    for figures in processes:
        for sample in figures.samples:
            samples.setdefault(sample.name, []).append((figures, sample.labels, sample.value))
        for spread in figures.spreads:
            spreads.setdefault(spread.name, []).append((figures, spread.labels, spread.statistics))
    for metric in METRICS:
        name, labels = f"penstock_{metric.name}", [*subject_labels(metric), *metric.labels]
        if metric.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(name, metric.meaning, labels=labels)
            for figures, values, statistics in spreads.get(metric.name, ()):
                histogram.add_metric([*subject(metric, figures), *values], cumulated(statistics), statistics.total)
            yield from (histogram,) if metric.name in spreads else ()
        elif metric.name in samples:
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = kind(name, metric.meaning, labels=labels)
            for figures, values, value in samples[metric.name]:
                family.add_metric([*subject(metric, figures), *values], value)
            yield family


def subject_labels(metric: catalogue.Metric) -> tuple[str, ...]:
    """Names of the labels that say whom a figure is about."""
    return ("replica",) if metric.subject is Subject.ENGINE else ("role", "index")


def subject(metric: catalogue.Metric, figures: ProcessFigures) -> tuple[str, ...]:
    """Values of those labels."""
    return (str(figures.index),) if metric.subject is Subject.ENGINE else (figures.role, str(figures.index))
