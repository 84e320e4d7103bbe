"""Metrics under vLLM's names, for dashboards that know them: `--metrics-alias`.

Only what means the same stands in the table. Names and meanings: vLLM's page "Production metrics".
"""

from __future__ import annotations

from collections.abc import Mapping

LABELS = ("model_name", "engine")
FRONT = 0  # the engine of what api processes see: with several replicas it stands for all of them
VLLM: Mapping[str, tuple[str, str]] = {  # name of ours, and help
    "vllm:time_to_first_token_seconds": ("time_to_first_token_seconds", "Request to first token, of streams"),
    "vllm:inter_token_latency_seconds": ("inter_token_latency_seconds", "Gap between deltas, of streams"),
    "vllm:e2e_request_latency_seconds": ("e2e_seconds", "Request to the end of its tokens"),
    "vllm:num_requests_running": ("engine_running", "Requests in the engine's slots"),
    "vllm:num_requests_waiting": ("engine_waiting", "Requests waiting for a slot"),
    "vllm:kv_cache_usage_perc": ("engine_kv_used_ratio", "KV blocks in use, 1 is all of them"),
    "vllm:prompt_tokens": ("engine_prompt_tokens", "Prompt tokens of admitted requests"),
    "vllm:generation_tokens": ("engine_output_tokens", "Tokens sampled"),
    "vllm:prefix_cache_queries": ("engine_prompt_tokens", "Prompt tokens that were looked for"),
    "vllm:prefix_cache_hits": ("engine_cached_tokens", "Prompt tokens that were found"),
    "vllm:num_preemptions": ("engine_preemptions", "Requests put back to wait for blocks"),
    "vllm:spec_decode_num_drafts": ("engine_drafts", "Rows of steps that carried drafts"),
    "vllm:spec_decode_num_draft_tokens": ("engine_draft_tokens", "Draft tokens verified"),
    "vllm:spec_decode_num_accepted_tokens": ("engine_accepted_tokens", "Draft tokens accepted"),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "engine_accepted_tokens_by_position", "Draft tokens accepted, by place in the draft",
    ),
    "vllm:request_success": ("engine_ended", "Choices that ended, by how"),
    "vllm:request_queue_time_seconds": ("engine_queue_seconds", "Arrival at the scheduler to first step"),
    "vllm:request_prefill_time_seconds": ("engine_prefill_seconds", "First step to first token"),
    "vllm:request_decode_time_seconds": ("engine_decode_seconds", "First token to the end"),
    "vllm:request_inference_time_seconds": ("engine_inference_seconds", "First step to the end"),
    "vllm:request_prompt_tokens": ("engine_request_prompt_tokens", "Prompt tokens of a request"),
    "vllm:request_generation_tokens": ("engine_request_output_tokens", "Tokens sampled for a request"),
}  # fmt: skip
VLLM_LABELS: Mapping[str, str] = {"finish": "finished_reason"}
NO_SUCCESS = ("error", "grammar", "unavailable")  # of ours
