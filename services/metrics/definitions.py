"""Every figure that processes tell of themselves: its name at /metrics, less `penstock_`, and what it means.

Figures of a process have the labels `role` and `index`, those of an engine the label `replica`: the scheduler tells
them, of whom each replica has one. Names follow Prometheus' conventions (base units, `_total` for counters, which is
added where they are written).
"""

from __future__ import annotations

import enum

import msgspec


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Subject(enum.StrEnum):
    """Whom a figure is about."""

    PROCESS = "process"
    ENGINE = "engine"


class Metric(msgspec.Struct, frozen=True):
    """One row."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()  # beside those of its subject
    subject: Subject = Subject.PROCESS


def counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, meaning, labels)


def gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, meaning, labels)


def histogram(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, meaning, labels)


def engine(row: Metric) -> Metric:
    """The row, of an engine."""
    return msgspec.structs.replace(row, name=f"engine_{row.name}", subject=Subject.ENGINE)


EVERY_PROCESS: tuple[Metric, ...] = (
    gauge("process_info", "1; which life of the process this is", "pid", "incarnation"),
    counter("process_starts", "Starts of the process since it last ended in order: what is above 1 is restarts"),
    counter("process_cpu_seconds", "Processor time of the process, user and system"),
    gauge("process_resident_memory_bytes", "Memory of the process that is in RAM"),
    gauge("process_start_time_seconds", "When the process was started, in unix time"),
    histogram("loop_lag_seconds", "How much later than it was due the process's loop got to its clock"),
    gauge("link_peers", "Processes at the other end", "link"),
    counter("link_messages", "Messages of a link, its handshakes and credits included", "link", "direction"),
    counter("link_bytes", "Bytes of those messages", "link", "direction"),
    counter("link_refused_messages", "Attempts to send that found no credit, or nobody", "link"),
    counter("link_refused_handshakes", "Connections from other hosts that ended without having shown our keys", "link"),
    gauge("link_unacknowledged_messages", "Messages sent whose credit has not come back", "link"),
    gauge("link_queued_messages", "Messages and rows that wait to be sent", "link"),
    gauge("waiting_requests", "Requests that wait, by what for", "reason"),
    counter("trace_spans", "Spans that a collector took"),
    counter("trace_spans_dropped", "Spans that were lost: the queue was full, or the collector did not take them"),
    gauge("trace_spans_waiting", "Spans that wait to be exported"),
)
STEPS: tuple[Metric, ...] = (
    histogram("step_part_seconds", "Time of a step's parts, where they happen", "part"),
)
ENGINE: tuple[Metric, ...] = tuple(
    map(
        engine,
        (
            gauge("ready", "1 when the engine takes requests"),
            gauge("running", "Requests in the engine's slots"),
            gauge("waiting", "Requests waiting for a slot"),
            gauge("slots", "Requests that can run at once"),
            gauge("blocks", "KV blocks in all"),
            gauge("blocks_free", "KV blocks that hold nothing"),
            gauge("blocks_idle", "KV blocks whose content is cached and not in use"),
            gauge("blocks_quarantined", "KV blocks whose accounts contradicted each other"),
            gauge("kv_used_ratio", "Share of the KV blocks that hold what is in use"),
            gauge("step_age_seconds", "Seconds since the last step was applied, 0 when idle"),
            gauge("waiting_clients", "Clients with a choice that waits for a slot, of those that take turns"),
            gauge("drain_rate", "Requests finished per second, recently"),
            gauge("epoch", "Epoch of the executors"),
            gauge("device_idle_ratio", "Share of the last second or so in which the device ran no step"),
            counter("step", "Steps applied"),
            counter("prompt_tokens", "Prompt tokens of admitted requests"),
            counter("cached_tokens", "Prompt tokens found in the prefix cache"),
            counter("prefix_lookups", "Requests that were looked up in the prefix cache"),
            counter("prefix_hits", "Requests of which the prefix cache had something"),
            counter("evicted_blocks", "Cached KV blocks that were given to somebody else"),
            counter("scheduled_tokens", "Positions planned, drafts included"),
            counter("output_tokens", "Tokens sampled"),
            counter("surplus_tokens", "Tokens sampled and thrown away"),
            counter("finished", "Requests that finished"),
            counter("aborted", "Requests that were aborted"),
            counter("failed", "Requests that failed"),
            counter("ended", "Choices that ended, by how", "finish"),
            counter("rejected", "Requests that the scheduler refused"),
            counter("condemned", "Requests that ended because executors died of them"),
            counter("preemptions", "Requests put back to wait for blocks"),
            counter("yielded", "Choices put back to wait because their slot went to a client that had nothing running"),
            counter("drafts", "Rows of steps that carried drafts"),
            counter("draft_tokens", "Draft tokens that were verified"),
            counter("accepted_tokens", "Draft tokens that stand in an output"),
            counter(
                "accepted_tokens_by_position",
                "Draft tokens that stand in an output, by place in the draft from 0; a long draft's first places alone",
                "position",
            ),
            counter("stale_results", "Results of executors whose epoch was over"),
            counter("block_faults", "Checks that found the accounts of KV blocks wrong"),
            counter("device_busy_seconds", "Time in which the device ran steps and drafted"),
            counter("device_stalled_seconds", "Time in which the device had nothing to run although requests ran"),
            gauge("grammar_cache_entries", "Grammars whose automata are kept"),
            gauge("grammar_cache_bytes", "Memory charged for automata, those of running requests included"),
            counter("guides_built", "Automata of structured output that were made ready to run"),
            counter("guide_hits", "Requests whose automaton was ready already"),
            counter("guide_failures", "Automata that could not be made"),
            counter("masked_rows", "Rows of steps whose tokens a mask restricted"),
            counter("mask_seconds", "Time of filling those masks"),
            histogram("queue_seconds", "From a request's arrival at the scheduler until its first step"),
            histogram("prefill_seconds", "From a request's first step until its first token"),
            histogram("decode_seconds", "From a request's first token until its end"),
            histogram("inference_seconds", "From a request's first step until its end"),
            histogram("request_prompt_tokens", "Prompt tokens of choices that finished"),
            histogram("request_output_tokens", "Output tokens of choices that finished"),
        ),
    )
)
TOKENIZER: tuple[Metric, ...] = (
    gauge("tokenizer_requests", "Requests that have not ended"),
    counter("tokenizer_submitted_requests", "Requests handed to a scheduler"),
    counter("tokenizer_rejected_requests", "Requests refused, here or by a scheduler"),
    counter("tokenizer_aborted_requests", "Requests that were aborted"),
    counter("tokenizer_failed_requests", "Requests whose text could not be made"),
    counter("tokenizer_moved_requests", "Requests that went on with another scheduler"),
    counter("tokenizer_stop_strings", "Choices that a stop string ended"),
    counter("tokenizer_prompt_tokens", "Tokens of the prompts that it made"),
    counter("tokenizer_output_tokens", "Tokens that it turned into text"),
    counter("placement_requests", "Requests sent to each replica", "to"),
    counter("placement_tokens", "Tokens of the requests that were placed"),
    counter("placement_expected_tokens", "Of those, tokens that the chosen replica was expected to have cached"),
    counter("placement_prefixes", "Placements that a cached prefix decided"),
    counter("placement_sessions", "Placements that a session decided"),
    counter("placement_spills", "Placements that passed by the longest cached prefix, for the load of who has it"),
    counter("tokenizer_stalls", "Times that a link had no credit for what waited"),
    counter("grammar_compiles", "Grammars compiled, by what came of it", "outcome"),
    counter("grammar_cache_hits", "Requests whose grammar was compiled already, or just then"),
    gauge("grammar_cache_entries", "Compiled grammars that are kept, refused ones included"),
    gauge("grammar_cache_bytes", "Memory of the sources of compiled grammars that are kept"),
    counter("grammar_workers_replaced", "Compile workers that passed a limit or died"),
    gauge("grammar_workers", "Compile workers"),
    histogram("grammar_compile_seconds", "Processor time of compiling a grammar"),
    counter("template_renderings", "Chats rendered by templates of their own, by what came of it", "outcome"),
    gauge("template_workers", "Processes that render templates of requests"),
    gauge("template_cache_bytes", "Sources of requests' templates that are kept compiled"),
)
API: tuple[Metric, ...] = (
    gauge("api_ready", "1 when the process takes requests"),
    gauge("stored_responses", "Responses that the process keeps"),
    gauge("stored_response_bytes", "Bytes of these"),
    counter("stored_response_evictions", "Responses that were let go of for later ones"),
    counter("stored_response_losses", "Responses that were answered and could not be kept: the disk did not take them"),
    gauge("connections", "Open connections of clients"),
    gauge("connections_limit", "Most connections that are open at once; the next ones wait to be accepted"),
    counter("accept_waits", "Times that accepting has waited for a connection to close"),
    counter("accept_failures", "Times that accepting failed for want of a descriptor, and was tried again"),
)
EXECUTOR: tuple[Metric, ...] = (
    gauge("executor_weight_bytes", "Memory of the weights"),
    gauge("executor_cache_bytes", "Memory of the KV cache"),
    gauge("executor_load_seconds", "Time from the executor's start until it was ready"),
    counter("executor_plans", "Plans begun"),
    counter("executor_results", "Results sent"),
    counter("executor_dropped_results", "Results whose scheduler was gone"),
    counter("executor_stray_masks", "Masks of no plan that waited for any"),
)
METRICS: tuple[Metric, ...] = (*EVERY_PROCESS, *STEPS, *ENGINE, *TOKENIZER, *EXECUTOR, *API)
