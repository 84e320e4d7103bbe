"""The text of /metrics: the snapshots of all processes, as prometheus-client writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from penstock.engine_core.histogram import cumulated
from penstock.protocol import groups
from penstock.protocol.config import Config
from penstock.protocol.links import Role
from penstock.protocol.version import VERSION
from penstock.services.metrics import definitions
from penstock.services.metrics.aliases import vllm
from penstock.services.metrics.definitions import METRICS, Kind, Subject
from penstock.services.metrics.snapshot import Snapshot


class ServerCollector:
    """A collector of prometheus-client over `snapshots`; a process without one has no series."""

    def __init__(self, config: Config, snapshots: Sequence[Snapshot], model: str) -> None:
        self._config = config
        self._snapshots = snapshots
        self._model = model

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return bytes(generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        """Every family; called by `generate_latest`."""
        build = GaugeMetricFamily("penstock_build_info", "1; what runs", labels=["version", "model"])
        build.add_metric([VERSION, self._model], 1)
        yield build
        yield from presence(self._config, self._snapshots)
        for metric in METRICS.values():
            found = family(metric, self._snapshots)
            if found.samples or metric.subject is Subject.API:
                yield found
        if self._config.api.metrics_alias == "vllm":
            yield from vllm(self._snapshots, self._model)


def presence(config: Config, snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    """How many processes of each role there are, and how many there should be."""
    wanted = {
        Role.API: config.api.api_processes,
        Role.TOKENIZER: config.tokenizer.tokenizer_processes,
        Role.SCHEDULER: config.model.data_parallel_size,
        Role.EXECUTOR: groups.executors(config.model),
    }
    found = Counter(snapshot.role for snapshot in snapshots)
    present = GaugeMetricFamily("penstock_processes", "Processes that tell of themselves", labels=["role"])
    configured = GaugeMetricFamily("penstock_configured_processes", "Processes that there should be", labels=["role"])
    for role, count in wanted.items():
        present.add_metric([role.value], found[role])
        configured.add_metric([role.value], count)
    yield present
    yield configured


def family(metric: definitions.Metric[object], snapshots: Sequence[Snapshot]) -> Metric:
    """One metric of all processes."""
    name, labels = f"penstock_{metric.name}", [*metric.subject.value, *metric.labels]
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.help, labels=labels)
        for snapshot in snapshots:
            for values, statistics in snapshot.histograms.get(metric.name, {}).items():
                key = [*subject(metric, snapshot), *values]
                histogram.add_metric(key, cumulated(statistics), statistics.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    found = kind(name, metric.help, labels=labels)
    for snapshot in snapshots:
        for values, value in snapshot.values.get(metric.name, {}).items():
            found.add_metric([*subject(metric, snapshot), *values], value)
    return found


def subject(metric: definitions.Metric[object], snapshot: Snapshot) -> tuple[str, ...]:
    """Values of the labels that name the metric's subject."""
    return (snapshot.role, str(snapshot.index)) if metric.subject is Subject.PROCESS else (str(snapshot.index),)
