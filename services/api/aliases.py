"""Metrics under the names that another server gives them, for dashboards that know it: `--metrics-alias`.

Only what means the same stands in these tables. Names and meanings: vLLM's page "Production metrics". Left out, because
ours counts something else: `vllm:request_success_total` (the engine does not tell ends by their reasons),
`vllm:e2e_request_latency_seconds` (ours has refused requests in it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine_core.histogram import cumulated, merged
from protocol.figures import HistogramStatistics
from protocol.messages import EngineStatus
from services.api.ledger import Entry

ENGINE = "0"  # of vLLM's engines; a replica has one
LABELS = ("model_name", "engine")


def used(status: EngineStatus) -> float:
    """Share of the blocks that hold what is in use; cached and idle ones can be had, so they are not."""
    return 1 - (status.blocks_free + status.blocks_idle) / status.blocks if status.blocks else 0.0


VLLM_GAUGES: tuple[tuple[str, str, Callable[[EngineStatus], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the engine's slots", lambda status: status.running),
    ("vllm:num_requests_waiting", "Requests waiting for a slot", lambda status: status.waiting),
    ("vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all of them", used),
)
VLLM_TOTALS: tuple[tuple[str, str, Callable[[EngineStatus], float]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens of admitted requests", lambda status: status.prompt_tokens),
    ("vllm:generation_tokens", "Tokens sampled", lambda status: status.output_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens that were looked for", lambda status: status.prompt_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens that were found", lambda status: status.cached_tokens),
    ("vllm:num_preemptions", "Requests put back to wait for blocks", lambda status: status.preemptions),
    ("vllm:spec_decode_num_drafts", "Rows of steps that carried drafts", lambda status: status.drafts),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified", lambda status: status.draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted", lambda status: status.accepted_tokens),
)
VLLM_POSITIONS = ("vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by place in the draft")
VLLM_TIMINGS: tuple[tuple[str, str, Callable[[Entry], HistogramStatistics]], ...] = (
    ("vllm:time_to_first_token_seconds", "Request to first token, of streams", lambda entry: entry.first_token),
    ("vllm:inter_token_latency_seconds", "Gap between deltas, of streams", lambda entry: entry.inter_token),
)


def vllm(entries: Sequence[Entry], status: EngineStatus | None, model: str) -> Iterator[Metric]:
    """vLLM's families: timings of all api processes together, the engine's as of its last heartbeat."""
    labels = [model, ENGINE]
    for name, help_text, timed in VLLM_TIMINGS:
        if entries:
            timing = HistogramMetricFamily(name, help_text, labels=LABELS)
            statistics = merged([timed(entry) for entry in entries])
            timing.add_metric(labels, cumulated(statistics), statistics.total)
            yield timing
    if status is None:
        return
    for name, help_text, of in VLLM_GAUGES:
        gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
        gauge.add_metric(labels, of(status))
        yield gauge
    for name, help_text, of in VLLM_TOTALS:
        total = CounterMetricFamily(name, help_text, labels=LABELS)
        total.add_metric(labels, of(status))
        yield total
    places = CounterMetricFamily(*VLLM_POSITIONS, labels=[*LABELS, "position"])
    for place, count in enumerate(status.accepted_at):
        places.add_metric([*labels, str(place)], count)
    yield places
