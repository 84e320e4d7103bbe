"""Every metric of every process: its name without `penstock_`, kind, help, labels, and how its value is read.

Each table belongs to one source, a record that a part of the process returns when a snapshot is taken. Names follow
Prometheus' conventions: base units, and for counters `_total`, which the exposition adds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from penstock.engine_core.histogram import HistogramStatistics
from penstock.protocol.control import EngineStatus
from penstock.protocol.links import Role
from penstock.protocol.messages import Finish

if TYPE_CHECKING:
    from penstock.engine_core.placement.placement import PlacementStatistics
    from penstock.engine_core.scheduling.statistics import SchedulerStatistics
    from penstock.protocol.steps import ExecutorReady
    from penstock.services.client.engine_client import EngineClientStatistics
    from penstock.services.executor.steps import StepsStatistics
    from penstock.services.http.server import ConnectionStatistics
    from penstock.services.links.link import SocketStatistics
    from penstock.services.metrics.requests import Traffic
    from penstock.services.openai.responses.store import StoreStatistics
    from penstock.services.scheduler.server_loop import LoopStatistics
    from penstock.services.tokenizer.grammar_compiler import GrammarCompilerStatistics
    from penstock.services.tokenizer.image_decoder import ImageDecoderStatistics
    from penstock.services.tokenizer.server_loop import TokenizerLoopStatistics
    from penstock.services.tokenizer.templates import TemplateStatistics
    from penstock.services.tracing.tracer import TraceStatistics

# Upper bounds of buckets, in seconds.
LAG = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
PART = (10e-6, 25e-6, 50e-6, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
ENDS = (Finish.STOP, Finish.LENGTH, Finish.ABORT, Finish.ERROR, Finish.GRAMMAR, Finish.UNAVAILABLE)  # in the engine
# Of engine_core's scheduler, which imports numpy.
REASONS = ("trial", "slot", "blocks", "step", "prefix", "host", "disk", "adapter", "image", "pause")

S = TypeVar("S")


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Subject(enum.Enum):
    """What a metric describes; the value is the labels that identify it."""

    PROCESS = ("role", "index")
    ENGINE = ("replica",)  # reported by its scheduler
    API = ("api",)  # as seen by clients


@dataclass(frozen=True)
class Metric(Generic[S]):
    """One metric. With labels it reads a mapping, of which every entry is exported."""

    name: str
    kind: Kind
    help: str
    read: Callable[[S], Any]  # a value, or with labels values by label value or tuple of them
    labels: tuple[str, ...] = ()  # in addition to the subject's
    subject: Subject = Subject.PROCESS


def counter(name: str, text: str, read: Callable[[S], float | Mapping[Any, float]], *labels: str) -> Metric[S]:
    return Metric(name, Kind.COUNTER, text, read, labels)


def gauge(name: str, text: str, read: Callable[[S], float | Mapping[Any, float]], *labels: str) -> Metric[S]:
    return Metric(name, Kind.GAUGE, text, read, labels)


def histogram(
    name: str, text: str, read: Callable[[S], HistogramStatistics | Mapping[str, HistogramStatistics]], *labels: str
) -> Metric[S]:
    return Metric(name, Kind.HISTOGRAM, text, read, labels)


def waiting(read: Callable[[S], Mapping[str, int]]) -> Metric[S]:
    return gauge("waiting_requests", "Waiting requests, by what they wait for", read, "reason")


def step_parts(read: Callable[[S], Mapping[str, HistogramStatistics]]) -> Metric[S]:
    return histogram("step_part_seconds", "Time of the parts of a step", read, "part")


def by_state(**states: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Counts by the keyword and a name."""
    return {(state, name): count for state, counts in states.items() for name, count in counts.items()}


def about(subject: Subject, *rows: Metric[S]) -> tuple[Metric[S], ...]:
    return tuple(replace(row, subject=subject) for row in rows)


class ProcessStatistics(msgspec.Struct, frozen=True):
    """A process as the operating system and its tracer see it."""

    pid: int
    incarnation: int
    starts: int
    cpu_seconds: float
    resident_bytes: int
    start_time: float
    lag: HistogramStatistics
    traces: TraceStatistics


class LinkStatistics(msgspec.Struct, frozen=True):
    """The traffic of one kind of link at this end, over all its connections."""

    name: str
    ports: tuple[SocketStatistics, ...]
    queued: int  # messages and rows that wait for credit

    def sum(self, field: str) -> dict[str, int]:
        return {self.name: sum(getattr(port, field) for port in self.ports)}

    def both(self, field: str) -> dict[tuple[str, str], int]:
        """The same, by direction."""
        return {(self.name, way): self.sum(f"{field}_{way}")[self.name] for way in ("in", "out")}


PROCESS: tuple[Metric[ProcessStatistics], ...] = (
    gauge("process_info", "1; identifies the process and its incarnation",
          lambda s: {(str(s.pid), f"{s.incarnation:08x}"): 1}, "pid", "incarnation"),
    counter("process_starts", "Starts of the process since its last orderly end; more than 1 are restarts",
            lambda s: s.starts),
    counter("process_cpu_seconds", "Processor time of the process, user and system", lambda s: s.cpu_seconds),
    gauge("process_resident_memory_bytes", "Resident memory of the process", lambda s: s.resident_bytes),
    gauge("process_start_time_seconds", "Start of the process in unix time", lambda s: s.start_time),
    histogram("loop_lag_seconds", "Delay of the event loop's timer", lambda s: s.lag),
    counter("trace_spans", "Spans delivered to a collector", lambda s: s.traces.delivered),
    counter("trace_spans_dropped", "Spans lost because the queue was full or the collector did not accept them",
            lambda s: s.traces.dropped),
    gauge("trace_spans_waiting", "Spans that wait to be exported", lambda s: s.traces.waiting),
)  # fmt: skip
LINK: tuple[Metric[LinkStatistics], ...] = (
    gauge("link_peers", "Connected peers", lambda s: s.sum("peers"), "link"),
    counter("link_messages", "Messages of a link, including handshakes and credits",
            lambda s: s.both("messages"), "link", "direction"),
    counter("link_bytes", "Bytes of those messages", lambda s: s.both("bytes"), "link", "direction"),
    counter("link_refused_messages", "Attempts to send without credit or peer",
            lambda s: s.sum("refused_sends"), "link"),
    gauge("link_unacknowledged_messages", "Messages sent whose credit has not been returned",
          lambda s: s.sum("unacknowledged"), "link"),
    gauge("link_queued_messages", "Messages and rows waiting to be sent", lambda s: {s.name: s.queued}, "link"),
)  # fmt: skip
STATUS: tuple[Metric[EngineStatus], ...] = about(
    Subject.ENGINE,
    gauge("engine_ready", "1 if the engine accepts requests", lambda s: s.ready),
    gauge("engine_sleeping", "1 while the engine's executors hold no device (--idle-timeout)", lambda s: s.sleeping),
    gauge("engine_kept_weight_bytes", "Host memory of weights while executors sleep (--keep-weights)",
          lambda s: s.kept_weight_bytes),
    gauge("engine_running", "Requests in the engine's slots", lambda s: s.running),
    gauge("engine_waiting", "Requests waiting for a slot", lambda s: s.waiting),
    gauge("engine_slots", "Most requests that run at once", lambda s: s.max_num_seqs),
    gauge("engine_block_size", "Tokens of a KV block", lambda s: s.block_size),
    gauge("engine_blocks", "KV blocks in total", lambda s: s.blocks),
    gauge("engine_blocks_free", "Empty KV blocks", lambda s: s.blocks_free),
    gauge("engine_blocks_idle", "KV blocks that are cached and not in use", lambda s: s.blocks_idle),
    gauge("engine_group_blocks", "KV blocks in the tables of running requests, by KV group; shared ones count in each",
          lambda s: {str(group): count for group, count in enumerate(s.group_blocks)}, "group"),
    gauge("engine_kv_used_ratio", "Share of the KV blocks that are in use",
          lambda s: (s.blocks - s.blocks_free - s.blocks_idle) / s.blocks if s.blocks else 0.0),
    gauge("engine_step_age_seconds", "Seconds since the last step was applied, 0 when idle", lambda s: s.step_age),
    gauge("engine_drain_rate", "Requests finished per second, recently", lambda s: s.drain_rate),
    gauge("engine_epoch", "Epoch of the executors", lambda s: s.epoch),
    counter("engine_step", "Steps applied", lambda s: s.step),
    counter("engine_prompt_tokens", "Prompt tokens of admitted requests", lambda s: s.prompt_tokens),
    counter("engine_cached_tokens", "Prompt tokens found in the prefix cache", lambda s: s.cached_tokens),
    counter("engine_output_tokens", "Tokens sampled", lambda s: s.output_tokens),
    counter("engine_finished", "Requests that finished", lambda s: s.finished),
    counter("engine_aborted", "Requests that were aborted", lambda s: s.aborted),
    counter("engine_failed", "Requests that failed", lambda s: s.failed),
    counter("engine_preemptions", "Requests put back to wait for blocks", lambda s: s.preemptions),
    counter("engine_drafts", "Rows of steps that carried drafts", lambda s: s.drafts),
    counter("engine_draft_tokens", "Draft tokens verified", lambda s: s.draft_tokens),
    counter("engine_accepted_tokens", "Draft tokens accepted", lambda s: s.accepted_tokens),
    counter(
        "engine_accepted_tokens_by_position",
        "Draft tokens accepted, by position in the draft from 0; only first positions of a long draft",
        lambda s: {str(index): count for index, count in enumerate(s.accepted_at)}, "position",
    ),
)  # fmt: skip
DEVICE: tuple[Metric[float], ...] = about(
    Subject.ENGINE,
    gauge("engine_device_idle_ratio", "Share of the last second in which the device ran no step", lambda idle: idle),
)
LOOP: tuple[Metric[LoopStatistics], ...] = (
    waiting(lambda s: {"grammar": s.grammars.waiting}),
    step_parts(lambda s: {**s.times.parts, "mask": s.masks.steps}),
    *about(
        Subject.ENGINE,
        counter("engine_device_busy_seconds", "Time in which the device ran steps or drafted", lambda s: s.times.busy),
        counter("engine_device_stalled_seconds", "Time in which the device had no step although requests were running",
                lambda s: s.times.stalled),
        counter("engine_block_faults", "Failed consistency checks of KV blocks", lambda s: s.faults),
        gauge("engine_grammar_cache_entries", "Grammars with a cached automaton", lambda s: s.grammars.cache.entries),
        gauge("engine_grammar_cache_bytes", "Memory of automata, including those of running requests",
              lambda s: s.grammars.cache.bytes),
        counter("engine_guides_built", "Automata of structured output built", lambda s: s.grammars.cache.built),
        counter("engine_guide_hits", "Requests whose automaton was cached", lambda s: s.grammars.cache.hits),
        counter("engine_guide_failures", "Automata that could not be built", lambda s: s.grammars.cache.failed),
        counter("engine_masked_rows", "Rows of steps with a bitmask", lambda s: s.masks.rows),
        counter("engine_mask_seconds", "Time of filling bitmasks", lambda s: s.masks.seconds),
    ),
)  # fmt: skip
SCHEDULING: tuple[Metric[SchedulerStatistics], ...] = (
    waiting(lambda s: {reason: s.reasons.get(reason, 0) for reason in REASONS}),
    *about(
        Subject.ENGINE,
        gauge("engine_blocks_quarantined", "KV blocks withdrawn after a failed consistency check",
              lambda s: s.pool.quarantined),
        gauge("engine_waiting_clients", "Clients with a choice that waits for a slot", lambda s: s.waiting_clients),
        counter("engine_prefix_lookups", "Requests looked up in the prefix cache", lambda s: s.prefix_lookups),
        counter("engine_prefix_hits", "Requests with a cached prefix", lambda s: s.prefix_hits),
        counter("engine_evicted_blocks", "Cached KV blocks evicted", lambda s: s.evicted_blocks),
        gauge("engine_host_blocks", "KV blocks that there is room for in the executors' host memory",
              lambda s: s.host_tier.total),
        gauge("engine_host_blocks_held", "Of those, the ones that prefix hits can be fetched from",
              lambda s: s.host_tier.findable),
        counter("engine_host_copied_blocks", "KV blocks copied to the host's memory ahead of their eviction",
                lambda s: s.host_tier.copied),
        counter("engine_host_lost_blocks", "KV blocks evicted before their copy was done, or that found no room there",
                lambda s: s.host_tier.lost),
        counter("engine_host_fetches", "Times that blocks were fetched from the host's memory for a sequence",
                lambda s: s.host_tier.fetches),
        counter("engine_host_fetched_blocks", "KV blocks fetched from the host's memory",
                lambda s: s.host_tier.fetched),
        counter("engine_host_evicted_blocks", "KV blocks of the host's memory that went for others",
                lambda s: s.host_tier.evicted),
        gauge("engine_disk_blocks", "KV blocks that there is room for on the executors' disks",
              lambda s: s.storage_tier.total),
        gauge("engine_disk_blocks_held", "Of those, the ones that prefix hits can be read from",
              lambda s: s.storage_tier.findable),
        counter("engine_disk_stored_blocks", "KV blocks of the host's memory written to disk",
                lambda s: s.storage_tier.stored),
        counter("engine_disk_lost_blocks", "KV blocks that left the host's memory before they were written",
                lambda s: s.storage_tier.lost),
        counter("engine_disk_loads", "Times that blocks were read from disk for a sequence",
                lambda s: s.storage_tier.loads),
        counter("engine_disk_loaded_blocks", "KV blocks read from disk", lambda s: s.storage_tier.loaded),
        counter("engine_kv_store_lookups", "Times that a shared store was asked for blocks of a sequence",
                lambda s: s.storage_tier.lookups),
        counter("engine_kv_store_failed_lookups", "Of those, the ones that it did not answer",
                lambda s: s.storage_tier.failed_lookups),
        counter("engine_disk_evicted_blocks", "KV blocks on disk that went for others",
                lambda s: s.storage_tier.evicted),
        counter("engine_disk_failed_blocks", "KV blocks that could not be written or read, or were not as written",
                lambda s: s.storage_tier.failed),
        gauge("engine_handover_blocks_held", "KV blocks of the host's memory that are held for replicas that decode",
              lambda s: s.transfers.held),
        counter("engine_handovers", "Requests whose prompts were computed for other replicas",
                lambda s: s.transfers.handed_over),
        counter("engine_transfers", "Requests whose blocks were copied from a prefill replica",
                lambda s: s.transfers.fetches),
        counter("engine_transferred_blocks", "Those KV blocks", lambda s: s.transfers.fetched),
        counter("engine_stale_transfers", "Copies from a prefill replica that came too late, or could not be made",
                lambda s: s.transfers.stale),
        histogram("engine_transfer_seconds", "Copying a request's blocks from a prefill replica, their wait included",
                  lambda s: s.transfers.transfer),
        gauge("engine_state_places", "Snapshots of recurrent states that there is room for",
              lambda s: s.snapshots.total if s.snapshots else 0),
        gauge("engine_state_snapshots", "Snapshots of recurrent states that prompts can begin from",
              lambda s: s.snapshots.held if s.snapshots else 0),
        counter("engine_state_kept", "Snapshots that were kept", lambda s: s.snapshots.kept if s.snapshots else 0),
        counter("engine_state_hits", "Times that a sequence began from a snapshot",
                lambda s: s.snapshots.hits if s.snapshots else 0),
        counter("engine_state_evictions", "Snapshots that were forgotten for another",
                lambda s: s.snapshots.evicted if s.snapshots else 0),
        gauge("engine_state_host_places", "Snapshots that there is room for in the executors' host memory",
              lambda s: s.snapshots.host_total if s.snapshots else 0),
        gauge("engine_state_host_snapshots", "Snapshots there that prompts can begin from",
              lambda s: s.snapshots.host_held if s.snapshots else 0),
        counter("engine_state_host_hits", "Times that a sequence began from a snapshot there",
                lambda s: s.snapshots.host_hits if s.snapshots else 0),
        counter("engine_state_spilled", "Snapshots that were copied there for another",
                lambda s: s.snapshots.spilled if s.snapshots else 0),
        gauge("engine_lora_places", "Places for LoRA adapters on the device", lambda s: s.adapters.places),
        gauge("engine_lora_placed", "Adapters in places", lambda s: s.adapters.placed),
        gauge("engine_lora_running", "Adapters that running requests have", lambda s: len(s.adapters.running)),
        gauge("engine_lora_requests", "Requests with an adapter, of those that run and the first 256 that wait",
              lambda s: by_state(running=s.adapters.running, waiting=s.adapters.waiting), "state", "adapter"),
        gauge("engine_lora_held", "Adapters in the executors' host memory", lambda s: s.adapters.held),
        counter("engine_lora_loads", "Adapters read into the executors' host memory", lambda s: s.adapters.loads),
        counter("engine_lora_load_failures", "Adapters that an executor could not read", lambda s: s.adapters.failures),
        counter("engine_lora_copies", "Adapters copied to a place", lambda s: s.adapters.copies),
        gauge("engine_encoder_rows", "Image tokens that the encoder cache has room for", lambda s: s.encoder.rows),
        gauge("engine_encoder_rows_held", "Of those, the ones that running requests need", lambda s: s.encoder.held),
        gauge("engine_encoder_rows_filled", "Of those, the ones that hold embeddings", lambda s: s.encoder.filled),
        gauge("engine_encoder_encoding", "Images that are being encoded", lambda s: s.encoder.encoding),
        counter("engine_encoder_images", "Images encoded", lambda s: s.encoder.encoded),
        counter("engine_encoder_failures", "Images that could not be encoded", lambda s: s.encoder.failures),
        counter("engine_encoder_hits", "Images that a request found encoded for another", lambda s: s.encoder.hits),
        counter("engine_encoder_evictions", "Encoded images that went for others", lambda s: s.encoder.evicted),
        counter("engine_scheduled_tokens", "Tokens scheduled, including drafts", lambda s: s.scheduled_tokens),
        counter("engine_surplus_tokens", "Tokens sampled and discarded", lambda s: s.surplus_tokens),
        counter("engine_ended", "Choices that ended, by reason",
                lambda s: {finish.name.lower(): s.finishes.get(finish, 0) for finish in ENDS}, "finish"),
        counter("engine_rejected", "Requests that the scheduler refused", lambda s: s.rejected),
        counter("engine_condemned", "Requests ended because executors died of them", lambda s: s.poisoned),
        counter("engine_yielded", "Choices preempted for a client that had nothing running", lambda s: s.yielded),
        counter("engine_stale_results", "Results of executors from an earlier epoch", lambda s: s.stale_results),
        histogram("engine_queue_seconds", "From a request's arrival at the scheduler until its first step",
                  lambda s: s.sequences.queue),
        histogram("engine_prefill_seconds", "From a request's first step until its first token",
                  lambda s: s.sequences.prefill),
        histogram("engine_decode_seconds", "From a request's first token until its end", lambda s: s.sequences.decode),
        histogram("engine_inference_seconds", "From a request's first step until its end",
                  lambda s: s.sequences.inference),
        histogram("engine_time_per_output_token_seconds",
                  "From a request's first token until its end, by the number of tokens behind the first",
                  lambda s: s.sequences.per_token),
        histogram("engine_request_prompt_tokens", "Prompt tokens of choices that finished",
                  lambda s: s.sequences.prompt_tokens),
        histogram("engine_request_output_tokens", "Output tokens of choices that finished",
                  lambda s: s.sequences.output_tokens),
    ),
)  # fmt: skip
TOKENIZER_LOOP: tuple[Metric[TokenizerLoopStatistics], ...] = (
    waiting(
        lambda s: {
            "text": s.frontend.encoding - s.compiling, "grammar": s.compiling, "engine": s.frontend.dispatch.held,
        }
    ),
    gauge("tokenizer_requests", "Requests that have not ended", lambda s: s.frontend.requests),
    counter("tokenizer_submitted_requests", "Requests handed to a scheduler", lambda s: s.frontend.submitted),
    counter("tokenizer_rejected_requests", "Requests rejected, here or by a scheduler", lambda s: s.frontend.rejected),
    counter("tokenizer_aborted_requests", "Requests that were aborted", lambda s: s.frontend.aborted),
    counter("tokenizer_failed_requests", "Requests that failed in the tokenizer", lambda s: s.frontend.failed),
    counter("tokenizer_moved_requests", "Requests continued at another scheduler", lambda s: s.frontend.dispatch.moved),
    counter("tokenizer_handed_over_requests", "Requests that went on behind a prompt that a prefill replica computed",
            lambda s: s.frontend.dispatch.handed_over),
    counter("tokenizer_local_prefills", "Requests that no prefill replica began, although there are some",
            lambda s: s.frontend.dispatch.local),
    counter("tokenizer_stop_strings", "Choices ended by a stop string", lambda s: s.frontend.stop_hits),
    counter("tokenizer_prompt_tokens", "Tokens of encoded prompts", lambda s: s.frontend.prompt_tokens),
    counter("tokenizer_output_tokens", "Tokens detokenized", lambda s: s.frontend.output_tokens),
    counter("tokenizer_stalls", "Times that a link had no credit for the next message", lambda s: s.stalls),
)  # fmt: skip
PLACEMENT: tuple[Metric[PlacementStatistics], ...] = (
    counter("placement_requests", "Requests sent to each replica",
            lambda s: {str(number): placed for number, placed in enumerate(s.replicas)}, "to"),
    counter("placement_tokens", "Prompt tokens of placed requests", lambda s: s.tokens),
    counter("placement_expected_tokens", "Of these, tokens expected in the replica's prefix cache",
            lambda s: s.expected),
    counter("placement_prefixes", "Placements decided by a cached prefix", lambda s: s.prefixes),
    counter("placement_sessions", "Placements decided by a session", lambda s: s.sessions),
    counter("placement_spills", "Placements away from the longest cached prefix, because of its replica's load",
            lambda s: s.spills),
)  # fmt: skip
GRAMMAR_COMPILER: tuple[Metric[GrammarCompilerStatistics], ...] = (
    counter("grammar_compiles", "Grammars compiled, by outcome",
            lambda s: {"done": s.compiled, "refused": s.refused}, "outcome"),
    counter("grammar_cache_hits", "Requests whose grammar was cached or being compiled", lambda s: s.hits),
    gauge("grammar_cache_entries", "Cached grammars, including refused ones", lambda s: s.remembered),
    gauge("grammar_cache_bytes", "Memory of the sources of cached grammars", lambda s: s.bytes),
    counter("grammar_workers_replaced", "Compile workers that exceeded a limit or died", lambda s: s.replaced),
    gauge("grammar_workers", "Compile workers", lambda s: s.workers),
    histogram("grammar_compile_seconds", "Processor time of compiling a grammar", lambda s: s.seconds),
)  # fmt: skip
TEMPLATES: tuple[Metric[TemplateStatistics], ...] = (
    counter("template_renderings", "Chats rendered by requests' own templates, by outcome",
            lambda s: {"done": s.rendered, "refused": s.refused - s.ended, "limit": s.ended}, "outcome"),
    gauge("template_workers", "Processes that render requests' own templates", lambda s: s.workers),
)  # fmt: skip
IMAGE_DECODER: tuple[Metric[ImageDecoderStatistics], ...] = (
    counter("image_decodings", "Images of requests, by outcome; hit: decoded for another one",
            lambda s: {"done": s.decoded, "refused": s.refused, "hit": s.hits}, "outcome"),
    gauge("image_workers", "Processes that decode images", lambda s: s.workers),
    gauge("image_waiting", "Images that wait for a process", lambda s: s.waiting),
    gauge("image_cache_bytes", "Decoded images that are cached", lambda s: s.bytes),
    gauge("image_pixel_bytes", "Pixels of unfinished requests' images, as of the last image", lambda s: s.held),
)  # fmt: skip
READY: tuple[Metric[ExecutorReady], ...] = (
    gauge("executor_weight_bytes", "Memory of the weights", lambda s: s.weight_bytes),
    gauge("executor_cache_bytes", "Memory of the KV cache", lambda s: s.cache_bytes),
    gauge("executor_host_bytes", "Host memory for KV blocks", lambda s: s.host_bytes),
    gauge("executor_disk_bytes", "Bytes that KV blocks may take on disk", lambda s: s.disk_bytes),
    gauge("executor_load_seconds", "Time from the executor's start until it was ready", lambda s: s.load_seconds),
)
STEPS: tuple[Metric[StepsStatistics], ...] = (
    step_parts(lambda s: {"launch": s.launch}),
    counter("executor_plans", "Plans begun", lambda s: s.plans),
    counter("executor_results", "Results sent", lambda s: s.results),
    counter("executor_dropped_results", "Results dropped because the scheduler was gone", lambda s: s.dropped),
    counter("executor_stray_masks", "Bitmasks for no waiting plan", lambda s: s.stray_masks),
    counter(
        "executor_copied_bytes",
        "Bytes of KV blocks copied between the device and the host's memory",
        lambda s: {"out": s.copies.bytes_out, "in": s.copies.bytes_in} if s.copies else {},
        "direction",
    ),
    counter(
        "executor_copy_seconds",
        "Time that these copies took, beside the steps",
        lambda s: {"out": s.copies.seconds_out, "in": s.copies.seconds_in} if s.copies else {},
        "direction",
    ),
    counter(
        "executor_disk_copied_bytes",
        "Bytes of KV blocks written to disk and read from there",
        lambda s: (
            {"out": s.copies.storage.bytes_out, "in": s.copies.storage.bytes_in}
            if s.copies and s.copies.storage
            else {}
        ),
        "direction",
    ),
    counter(
        "executor_disk_seconds",
        "Time that this took, beside the steps",
        lambda s: (
            {"out": s.copies.storage.seconds_out, "in": s.copies.storage.seconds_in}
            if s.copies and s.copies.storage
            else {}
        ),
        "direction",
    ),
)
TRAFFIC: tuple[Metric[Traffic], ...] = about(
    Subject.API,
    counter(
        "requests", "Responses by endpoint and HTTP status; 499: the client disconnected",
        lambda s: {(endpoint, str(status)): count for (endpoint, status), count in sorted(s.responses.items())},
        "endpoint", "status",
    ),
    counter("rejected_requests", "Responses that were or ended with an error, by its code",
            lambda s: dict(sorted(s.rejections.items())), "reason"),
    counter("images", "Images of requests, by how they came: as data or as the url of another host",
            lambda s: dict(sorted(s.images.received.items())), "source"),
    counter("refused_images", "Images that could not be read or fetched, by reason",
            lambda s: dict(sorted(s.images.refused.items())), "reason"),
    histogram("image_fetch_seconds", "Fetching one image, whatever came of it", lambda s: s.images.fetch.statistics()),
    counter("prompt_tokens", "Prompt tokens of answered requests", lambda s: s.prompt_tokens),
    counter("completion_tokens", "Output tokens of answered requests", lambda s: s.completion_tokens),
    histogram("time_to_first_token_seconds", "Request to first token, of streams",
              lambda s: s.timings.first_token.statistics()),
    histogram("inter_token_latency_seconds", "Gap between deltas, of streams",
              lambda s: s.timings.inter_token.statistics()),
    histogram("request_duration_seconds", "All responses", lambda s: s.timings.request.statistics()),
    histogram("e2e_seconds", "Complete responses, from request to end", lambda s: s.timings.e2e.statistics()),
)  # fmt: skip
CLIENT: tuple[Metric[EngineClientStatistics], ...] = (
    waiting(lambda s: {"tokenizer": s.held}),
    *about(
        Subject.API,
        counter("submitted_requests", "Requests sent to tokenizers", lambda s: s.submitted),
        counter("refused_requests", "Requests refused because too many were waiting", lambda s: s.refused),
        counter("moved_requests", "Requests continued at another tokenizer", lambda s: s.moved),
        gauge("unfinished_requests", "Requests that have not ended", lambda s: s.unfinished),
        gauge("connected_tokenizers", "Connected tokenizers", lambda s: s.tokenizers),
    ),
)
API_READY: tuple[Metric[bool], ...] = (gauge("api_ready", "1 if the process accepts requests", lambda ready: ready),)
RESPONSES: tuple[Metric[StoreStatistics], ...] = (
    gauge("stored_responses", "Responses in the store", lambda s: s.responses),
    gauge("stored_response_bytes", "Bytes of stored responses", lambda s: s.bytes),
    counter("stored_response_evictions", "Stored responses evicted for later ones", lambda s: s.evicted),
    counter("stored_response_losses", "Responses that could not be stored because the disk failed", lambda s: s.lost),
)  # fmt: skip
ROOM: tuple[Metric[ConnectionStatistics], ...] = (
    gauge("connections", "Open client connections", lambda s: s.open),
    gauge("connections_limit", "Most client connections that are open at once; more wait to be accepted",
          lambda s: s.limit),
    counter("accept_waits", "Times that accepting waited for a connection to close", lambda s: s.waits),
    counter("accept_failures", "Times that accepting failed for lack of file descriptors", lambda s: s.failures),
)  # fmt: skip

BY_ROLE: Mapping[Role, tuple[Metric[Any], ...]] = {
    Role.API: (*PROCESS, *LINK, *TRAFFIC, *CLIENT, *API_READY, *RESPONSES, *ROOM),
    Role.TOKENIZER: (*PROCESS, *LINK, *TOKENIZER_LOOP, *PLACEMENT, *GRAMMAR_COMPILER, *TEMPLATES, *IMAGE_DECODER),
    Role.SCHEDULER: (*PROCESS, *LINK, *STATUS, *DEVICE, *LOOP, *SCHEDULING),
    Role.EXECUTOR: (*PROCESS, *LINK, *READY, *STEPS),
}
METRICS: Mapping[str, Metric[Any]] = {metric.name: metric for table in BY_ROLE.values() for metric in table}
