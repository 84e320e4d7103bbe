"""The text of /metrics: the snapshots of all processes, as prometheus-client writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from penstock.engine_core.histogram import cumulated, merged
from penstock.engine_core.placement.residency import State
from penstock.protocol import groups
from penstock.protocol.config import Config
from penstock.protocol.links import Role
from penstock.protocol.version import VERSION
from penstock.services.metrics import definitions
from penstock.services.metrics.definitions import METRICS, Kind, Subject
from penstock.services.metrics.snapshot import Snapshot

# Metrics under vLLM's names (`--metrics-alias vllm`), for dashboards and load balancers that know them; only those with
# the same meaning. Source: vLLM's documentation, "Production metrics".
LABELS = ("model_name", "engine")
FRONT = 0  # the engine of what api processes measure; it stands for all replicas
VLLM: Mapping[str, tuple[str, str]] = {  # name of ours, and help
    "vllm:time_to_first_token_seconds": ("time_to_first_token_seconds", "Request to first token, of streams"),
    "vllm:inter_token_latency_seconds": ("inter_token_latency_seconds", "Gap between deltas, of streams"),
    "vllm:e2e_request_latency_seconds": ("e2e_seconds", "Request to the end of its tokens"),
    "vllm:num_requests_running": ("engine_running", "Requests in the engine's slots"),
    "vllm:num_requests_waiting": ("engine_waiting", "Requests waiting for a slot"),
    "vllm:kv_cache_usage_perc": ("engine_kv_used_ratio", "KV blocks in use, 1 is all of them"),
    "vllm:prompt_tokens": ("engine_prompt_tokens", "Prompt tokens of admitted requests"),
    "vllm:generation_tokens": ("engine_output_tokens", "Tokens sampled"),
    "vllm:prefix_cache_queries": ("engine_prompt_tokens", "Prompt tokens looked up"),
    "vllm:prefix_cache_hits": ("engine_cached_tokens", "Prompt tokens found"),
    "vllm:num_preemptions": ("engine_preemptions", "Requests put back to wait for blocks"),
    "vllm:spec_decode_num_drafts": ("engine_drafts", "Rows of steps that carried drafts"),
    "vllm:spec_decode_num_draft_tokens": ("engine_draft_tokens", "Draft tokens verified"),
    "vllm:spec_decode_num_accepted_tokens": ("engine_accepted_tokens", "Draft tokens accepted"),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "engine_accepted_tokens_by_position", "Draft tokens accepted, by position in the draft",
    ),
    "vllm:request_success": ("engine_ended", "Choices that ended, by reason"),
    "vllm:request_queue_time_seconds": ("engine_queue_seconds", "Arrival at the scheduler to first step"),
    "vllm:request_prefill_time_seconds": ("engine_prefill_seconds", "First step to first token"),
    "vllm:request_decode_time_seconds": ("engine_decode_seconds", "First token to the end"),
    "vllm:request_time_per_output_token_seconds": (
        "engine_time_per_output_token_seconds", "First token to the end, by the tokens behind the first",
    ),
    "vllm:request_inference_time_seconds": ("engine_inference_seconds", "First step to the end"),
    "vllm:request_prompt_tokens": ("engine_request_prompt_tokens", "Prompt tokens of a request"),
    "vllm:request_generation_tokens": ("engine_request_output_tokens", "Tokens sampled for a request"),
    # Names of vLLM's earlier releases, which vLLM's production stack and older dashboards read.
    "vllm:time_per_output_token_seconds": ("inter_token_latency_seconds", "Gap between deltas, of streams"),
    "vllm:gpu_cache_usage_perc": ("engine_kv_used_ratio", "KV blocks in use, 1 is all of them"),
    "vllm:gpu_prefix_cache_queries": ("engine_prompt_tokens", "Prompt tokens looked up"),
    "vllm:gpu_prefix_cache_hits": ("engine_cached_tokens", "Prompt tokens found"),
}  # fmt: skip
# What vLLM tells in labels: the metrics of ours that they are made of, and help. The endpoint picker of Kubernetes'
# inference gateway reads both. Source: Gateway API Inference Extension, proposal 003, "Model Server Protocol".
CACHE_INFO, LORA_INFO = "vllm:cache_config_info", "vllm:lora_requests_info"
VLLM_INFO: Mapping[str, tuple[tuple[str, ...], str]] = {
    CACHE_INFO: (
        ("engine_block_size", "engine_blocks"),
        "1; tokens of a KV block (block_size), KV blocks (num_gpu_blocks)",
    ),
    LORA_INFO: (
        ("engine_lora_places", "engine_lora_requests"),
        "Unix time; places for adapters (max_lora), names of the adapters of running and waiting requests",
    ),
}
NO_SUCCESS = ("error", "grammar", "unavailable")  # finish reasons that vLLM does not count


class ModelProcesses(NamedTuple):
    """One of several models, and the processes that it has for itself."""

    name: str
    config: Config
    state: State
    snapshots: Sequence[Snapshot]


class ServerCollector:
    """A collector of prometheus-client over snapshots; a process without one has no series.

    With several models the series of their processes have the label `model_name`, which is empty for api processes.
    """

    def __init__(
        self, config: Config, snapshots: Sequence[Snapshot], model: str, models: Sequence[ModelProcesses] = ()
    ) -> None:
        self._config = config
        self._snapshots = snapshots
        self._model = model
        self._models = models

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return bytes(generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        """Every metric family; called by `generate_latest`."""
        build = GaugeMetricFamily("penstock_build_info", "1; the version and model", labels=["version", "model"])
        for model in [each.name for each in self._models] or [self._model]:
            build.add_metric([VERSION, model], 1)
        yield build
        if self._models:
            yield states(self._models)
        every = [("", self._snapshots), *((each.name, each.snapshots) for each in self._models)]
        yield from presence(self._config, self._models, [one for _, snapshots in every for one in snapshots])
        named = ("model_name",) if self._models else ()
        for metric in METRICS.values():
            subject = by_process if metric.subject is Subject.PROCESS else by_index
            labels = (*metric.subject.value, *named)
            found = family(metric, f"penstock_{metric.name}", metric.help, labels)
            for model, snapshots in every:
                add(found, metric, snapshots, partial(of_model, subject, model) if named else subject)
            if found.samples or metric.subject is Subject.API:
                yield found
        if self._config.api.metrics_alias == "vllm":
            yield from vllm([(model or self._model, snapshots) for model, snapshots in every])


def by_process(snapshot: Snapshot) -> Sequence[str]:
    return snapshot.role, str(snapshot.index)


def by_index(snapshot: Snapshot) -> Sequence[str]:
    return (str(snapshot.index),)


def of_model(subject: Callable[[Snapshot], Sequence[str]], model: str, snapshot: Snapshot) -> Sequence[str]:
    return *subject(snapshot), model


def as_vllm(model: str, snapshot: Snapshot) -> Sequence[str]:
    return model, str(snapshot.index)


def states(models: Sequence[ModelProcesses]) -> Metric:
    """1 for the state that each model is in."""
    found = GaugeMetricFamily("penstock_model_state", "1 for the state of each model", labels=["model_name", "state"])
    for each in models:
        for state in State:
            if state is not State.LEAVING:
                found.add_metric([each.name, state.value], float(each.state is state))
    return found


def presence(config: Config, models: Sequence[ModelProcesses], snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    """Processes of each role: those that run, and those that are configured."""
    engines = [each.config for each in models] or [config]
    wanted = {
        Role.API: config.api.api_processes,
        Role.TOKENIZER: sum(each.tokenizer.tokenizer_processes for each in engines),
        Role.SCHEDULER: sum(each.model.data_parallel_size for each in engines),
        Role.EXECUTOR: sum(groups.executors(each.model) for each in engines),
    }
    found = Counter(snapshot.role for snapshot in snapshots)
    present = GaugeMetricFamily("penstock_processes", "Processes with a recent snapshot", labels=["role"])
    configured = GaugeMetricFamily("penstock_configured_processes", "Processes that are configured", labels=["role"])
    for role, count in wanted.items():
        present.add_metric([role.value], found[role])
        configured.add_metric([role.value], count)
    yield present
    yield configured


def vllm(every: Sequence[tuple[str, Sequence[Snapshot]]]) -> Iterator[Metric]:
    """vLLM's metric families: latencies over all api processes, the engine's metrics by replica. `every`: snapshots of
    the api processes, with those of a server's only model, and then of each of several models, by the model's name."""
    apis = [snapshot.histograms for _, snapshots in every for snapshot in snapshots if snapshot.role == Role.API]
    for name, (ours, text) in VLLM.items():
        metric, found = METRICS[ours], family(METRICS[ours], name, text, LABELS)
        any_engine = False
        for place, (model, snapshots) in enumerate(every):
            several = [snapshot for snapshot in snapshots if snapshot.role == Role.SCHEDULER]
            if metric.subject is Subject.API:
                several = [Snapshot(Role.API, FRONT, 0, 0, 0.0)] if apis and not place else []
                for together in several:
                    together.histograms[ours] = {(): merged([each[ours][()] for each in apis])}
            any_engine |= bool(several)
            add(found, metric, several, partial(as_vllm, model))
        found.samples = [sample for sample in found.samples if sample.labels.get("finish") not in NO_SUCCESS]
        for sample in found.samples:
            if "finish" in sample.labels:
                sample.labels["finished_reason"] = sample.labels.pop("finish")
        if any_engine:
            yield found
    yield from vllm_info([(model, one) for model, found in every for one in found if one.role == Role.SCHEDULER])


def vllm_info(engines: Sequence[tuple[str, Snapshot]]) -> Iterator[Metric]:
    """How large the KV cache is, and which adapters are in use, as vLLM says it."""
    cache = GaugeMetricFamily(CACHE_INFO, VLLM_INFO[CACHE_INFO][1], labels=[*LABELS, "block_size", "num_gpu_blocks"])
    states = ("running", "waiting")
    lora = GaugeMetricFamily(
        LORA_INFO,
        VLLM_INFO[LORA_INFO][1],
        labels=[*LABELS, "max_lora", *(f"{state}_lora_adapters" for state in states)],
    )
    for model, engine in engines:
        size, blocks, places = (
            int(engine.values.get(name, {}).get((), 0))
            for name in ("engine_block_size", "engine_blocks", "engine_lora_places")
        )
        if blocks:
            cache.add_metric([model, str(engine.index), str(size), str(blocks)], 1)
        if places:
            used = sorted(engine.values.get("engine_lora_requests", {}))
            names = [",".join(name for its, name in used if its == state) for state in states]
            lora.add_metric([model, str(engine.index), str(places), *names], engine.time)
    yield from (found for found in (cache, lora) if found.samples)


def family(metric: definitions.Metric[object], name: str, text: str, labels: Sequence[str]) -> Metric:
    """A metric without samples, under any name; `labels` come before its own."""
    kind: type[Metric] = GaugeMetricFamily
    if metric.kind is Kind.HISTOGRAM:
        kind = HistogramMetricFamily
    elif metric.kind is Kind.COUNTER:
        kind = CounterMetricFamily
    return kind(name, text, labels=[*labels, *metric.labels])  # type: ignore[call-arg]


def add(
    family: Metric,
    metric: definitions.Metric[object],
    snapshots: Sequence[Snapshot],
    subject: Callable[[Snapshot], Sequence[str]],
) -> None:
    """Add the samples of these processes to a family of the metric; `subject` gives the values of its first labels."""
    for snapshot in snapshots:
        if isinstance(family, HistogramMetricFamily):
            for values, statistics in snapshot.histograms.get(metric.name, {}).items():
                family.add_metric([*subject(snapshot), *values], cumulated(statistics), statistics.total)
        elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
            for values, value in snapshot.values.get(metric.name, {}).items():
                family.add_metric([*subject(snapshot), *values], value)
