"""Metrics under the names that another server gives them, for dashboards that know it: `--metrics-alias`.

Only what means the same stands in these tables. Names and meanings: vLLM's page "Production metrics".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.engine_core.histogram import cumulated, merged
from penstock.protocol.links import Role
from penstock.services.metrics.snapshot import Snapshot

LABELS = ("model_name", "engine")
FRONT = "0"  # the engine of what api processes see: with several replicas it stands for all of them
VLLM_GAUGES: Mapping[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("engine_running", "Requests in the engine's slots"),
    "vllm:num_requests_waiting": ("engine_waiting", "Requests waiting for a slot"),
    "vllm:kv_cache_usage_perc": ("engine_kv_used_ratio", "KV blocks in use, 1 is all of them"),
}
VLLM_TOTALS: Mapping[str, tuple[str, str]] = {
    "vllm:prompt_tokens": ("engine_prompt_tokens", "Prompt tokens of admitted requests"),
    "vllm:generation_tokens": ("engine_output_tokens", "Tokens sampled"),
    "vllm:prefix_cache_queries": ("engine_prompt_tokens", "Prompt tokens that were looked for"),
    "vllm:prefix_cache_hits": ("engine_cached_tokens", "Prompt tokens that were found"),
    "vllm:num_preemptions": ("engine_preemptions", "Requests put back to wait for blocks"),
    "vllm:spec_decode_num_drafts": ("engine_drafts", "Rows of steps that carried drafts"),
    "vllm:spec_decode_num_draft_tokens": ("engine_draft_tokens", "Draft tokens verified"),
    "vllm:spec_decode_num_accepted_tokens": ("engine_accepted_tokens", "Draft tokens accepted"),
}
VLLM_LABELLED: Mapping[str, tuple[str, str, str]] = {  # with the other server's name of the label
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "engine_accepted_tokens_by_position", "Draft tokens accepted, by place in the draft", "position",
    ),
    "vllm:request_success": ("engine_ended", "Choices that ended, by how", "finished_reason"),
}  # fmt: skip
# Of theirs; ours has more, for what is no success.
REASONS: Mapping[str, str] = {"stop": "stop", "length": "length", "abort": "abort"}
VLLM_HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "vllm:request_queue_time_seconds": ("engine_queue_seconds", "Arrival at the scheduler to first step"),
    "vllm:request_prefill_time_seconds": ("engine_prefill_seconds", "First step to first token"),
    "vllm:request_decode_time_seconds": ("engine_decode_seconds", "First token to the end"),
    "vllm:request_inference_time_seconds": ("engine_inference_seconds", "First step to the end"),
    "vllm:request_prompt_tokens": ("engine_request_prompt_tokens", "Prompt tokens of a request"),
    "vllm:request_generation_tokens": ("engine_request_output_tokens", "Tokens sampled for a request"),
}
VLLM_TIMINGS: Mapping[str, tuple[str, str]] = {  # of all api processes together
    "vllm:time_to_first_token_seconds": ("time_to_first_token_seconds", "Request to first token, of streams"),
    "vllm:inter_token_latency_seconds": ("inter_token_latency_seconds", "Gap between deltas, of streams"),
    "vllm:e2e_request_latency_seconds": ("e2e_seconds", "Request to the end of its tokens"),
}


def vllm(snapshots: Sequence[Snapshot], model: str) -> Iterator[Metric]:
    """vLLM's families: the timings of all api processes together, engines by replica."""
    apis = [snapshot for snapshot in snapshots if snapshot.role == Role.API]
    engines = [snapshot for snapshot in snapshots if snapshot.role == Role.SCHEDULER]
    for name, (ours, help_text) in VLLM_TIMINGS.items():
        if apis:
            statistics = merged([api.histograms[ours][()] for api in apis])
            timing = HistogramMetricFamily(name, help_text, labels=LABELS)
            timing.add_metric([model, FRONT], cumulated(statistics), statistics.total)
            yield timing
    if not engines:
        return
    for name, (ours, help_text) in VLLM_GAUGES.items():
        yield filled(GaugeMetricFamily(name, help_text, labels=LABELS), engines, ours, model)
    for name, (ours, help_text) in VLLM_TOTALS.items():
        yield filled(CounterMetricFamily(name, help_text, labels=LABELS), engines, ours, model)
    for name, (ours, help_text, label) in VLLM_LABELLED.items():
        known = REASONS if label == "finished_reason" else None
        yield filled(CounterMetricFamily(name, help_text, labels=[*LABELS, label]), engines, ours, model, known)
    for name, (ours, help_text) in VLLM_HISTOGRAMS.items():
        histogram = HistogramMetricFamily(name, help_text, labels=LABELS)
        for engine in engines:
            for statistics in engine.histograms.get(ours, {}).values():
                histogram.add_metric([model, str(engine.index)], cumulated(statistics), statistics.total)
        yield histogram


def filled(
    family: CounterMetricFamily | GaugeMetricFamily,
    engines: Sequence[Snapshot],
    ours: str,
    model: str,
    known: Mapping[str, str] | None = None,
) -> Metric:
    """The family with each engine's samples of ours; with `known` those whose first label is in it, under its name."""
    for engine in engines:
        for labels, value in engine.values.get(ours, {}).items():
            if known is None:
                family.add_metric([model, str(engine.index), *labels], value)
            elif labels[0] in known:
                family.add_metric([model, str(engine.index), known[labels[0]]], value)
    return family
