"""The text of /metrics: the snapshots of all processes, as prometheus-client writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from penstock.engine_core.histogram import cumulated, merged
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


class ServerCollector:
    """A collector of prometheus-client over snapshots; a process without one has no series."""

    def __init__(self, config: Config, snapshots: Sequence[Snapshot], model: str) -> None:
        self._config = config
        self._snapshots = snapshots
        self._model = model

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return bytes(generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        """Every metric family; called by `generate_latest`."""
        build = GaugeMetricFamily("penstock_build_info", "1; the version and model", labels=["version", "model"])
        build.add_metric([VERSION, self._model], 1)
        yield build
        yield from presence(self._config, self._snapshots)
        for metric in METRICS.values():
            subject = by_process if metric.subject is Subject.PROCESS else by_index
            name = f"penstock_{metric.name}"
            found = family(metric, self._snapshots, name, metric.help, metric.subject.value, subject)
            if found.samples or metric.subject is Subject.API:
                yield found
        if self._config.api.metrics_alias == "vllm":
            yield from vllm(self._snapshots, self._model)


def by_process(snapshot: Snapshot) -> Sequence[str]:
    return snapshot.role, str(snapshot.index)


def by_index(snapshot: Snapshot) -> Sequence[str]:
    return (str(snapshot.index),)


def presence(config: Config, snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    """Processes of each role: those that run, and those that are configured."""
    wanted = {
        Role.API: config.api.api_processes,
        Role.TOKENIZER: config.tokenizer.tokenizer_processes,
        Role.SCHEDULER: config.model.data_parallel_size,
        Role.EXECUTOR: groups.executors(config.model),
    }
    found = Counter(snapshot.role for snapshot in snapshots)
    present = GaugeMetricFamily("penstock_processes", "Processes with a recent snapshot", labels=["role"])
    configured = GaugeMetricFamily("penstock_configured_processes", "Processes that are configured", labels=["role"])
    for role, count in wanted.items():
        present.add_metric([role.value], found[role])
        configured.add_metric([role.value], count)
    yield present
    yield configured


def vllm(snapshots: Sequence[Snapshot], model: str) -> Iterator[Metric]:
    """vLLM's metric families: latencies over all api processes, the engine's metrics by replica."""
    apis = [snapshot.histograms for snapshot in snapshots if snapshot.role == Role.API]
    engines = [snapshot for snapshot in snapshots if snapshot.role == Role.SCHEDULER]
    for name, (ours, text) in VLLM.items():
        metric, several = METRICS[ours], engines
        if metric.subject is Subject.API:
            several = [Snapshot(Role.API, FRONT, 0, 0, 0.0)] if apis else []
            for together in several:
                together.histograms[ours] = {(): merged([each[ours][()] for each in apis])}
        found = family(metric, several, name, text, LABELS, lambda snapshot: (model, str(snapshot.index)))
        found.samples = [sample for sample in found.samples if sample.labels.get("finish") not in NO_SUCCESS]
        for sample in found.samples:
            if "finish" in sample.labels:
                sample.labels["finished_reason"] = sample.labels.pop("finish")
        if several:
            yield found
    yield from vllm_info(engines, model)


def vllm_info(engines: Sequence[Snapshot], model: str) -> Iterator[Metric]:
    """How large the KV cache is, and which adapters are in use, as vLLM says it."""
    cache = GaugeMetricFamily(CACHE_INFO, VLLM_INFO[CACHE_INFO][1], labels=[*LABELS, "block_size", "num_gpu_blocks"])
    states = ("running", "waiting")
    lora = GaugeMetricFamily(
        LORA_INFO,
        VLLM_INFO[LORA_INFO][1],
        labels=[*LABELS, "max_lora", *(f"{state}_lora_adapters" for state in states)],
    )
    for engine in engines:
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


def family(
    metric: definitions.Metric[object],
    snapshots: Sequence[Snapshot],
    name: str,
    text: str,
    labels: Sequence[str],
    subject: Callable[[Snapshot], Sequence[str]],
) -> Metric:
    """One metric of these processes, under any name; `subject` gives the values of `labels`."""
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, text, labels=[*labels, *metric.labels])
        for snapshot in snapshots:
            for values, statistics in snapshot.histograms.get(metric.name, {}).items():
                histogram.add_metric([*subject(snapshot), *values], cumulated(statistics), statistics.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    found = kind(name, text, labels=[*labels, *metric.labels])
    for snapshot in snapshots:
        for values, value in snapshot.values.get(metric.name, {}).items():
            found.add_metric([*subject(snapshot), *values], value)
    return found
