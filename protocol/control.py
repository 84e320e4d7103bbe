"""What the operator asks of the engine, its answer, and the state that the engine tells by itself.

api → tokenizer → every scheduler: the tokenizer passes a message on as it is and answers once all schedulers have. Each
may come twice, with the same id, where a process between was lost: asking again changes nothing.

An executor holds the weights of one folder under one version. `CheckWeights` has it look at the headers of another one;
once all executors of a group have found nothing wrong, and none of their steps is left, `WriteWeights` has them read it
into the memory that the model has. One that fails then ends: its weights are of neither folder.
"""

from __future__ import annotations

import enum

from penstock.protocol.message import Message, Part

FIRST_VERSION = "0"  # of the weights that a server starts with
IN_MEMORY = "memory:"  # path of weights that a trainer gave: of no folder
PARTIAL = "partial:"  # the same, while an update of several parts has not ended: of no version
HOST = "cpu"  # in place of a GPU's UUID: memory of the host


class PauseMode(enum.StrEnum):
    """What becomes of requests when no more steps are planned. New ones wait in each. As in vLLM."""

    ABORT = "abort"  # they end
    WAIT = "wait"  # they run to their ends first
    KEEP = "keep"  # they stay as they are, with their KV cache


class Pause(Message, frozen=True):
    """Answered once nothing runs."""

    id: int
    mode: PauseMode


class Resume(Message, frozen=True):
    """Go on; a pause that is awaited is given up."""

    id: int


class FlushCache(Message, frozen=True):
    """Forget what the KV cache holds, of running requests too, which are computed again."""

    id: int


class AbortAll(Message, frozen=True):
    """End every request, or those that are called `rid`."""

    id: int
    rid: str = ""


class AskState(Message, frozen=True):
    """Say how things stand, no more."""

    id: int


class WeightTensor(Part, frozen=True):
    """A whole tensor of a checkpoint, as a trainer has it."""

    name: str
    dtype: str  # as torch calls it
    shape: tuple[int, ...]
    # Its memory, by the UUID of a GPU and a CUDA IPC handle, or by `cpu` and a name below /dev/shm; empty: it is
    # broadcast, in the order of tensors.
    handles: tuple[tuple[str, bytes], ...] = ()
    offset: int = 0  # bytes, in that memory


class UpdateWeights(Message, frozen=True):
    """Have the executors hold the weights of another folder, or these tensors. Requests go on behind it with the new
    ones."""

    id: int
    path: str  # IN_MEMORY: of no folder
    version: str
    abort: bool = False  # requests end before
    check_only: bool = False  # say whether it could be done, and do nothing
    tensors: tuple[WeightTensor, ...] = ()
    group: str = ""  # that broadcasts them


class JoinGroup(Message, frozen=True):
    """Have every executor join a process group of a trainer's, in which number 0 broadcasts weights."""

    id: int
    name: str
    address: str = ""  # of its store; empty: leave it
    port: int = 0
    offset: int = 0  # number of executor 0 in it
    size: int = 0
    backend: str = "nccl"


class HoldWeights(Message, frozen=True):
    """Begin an update of several parts: nothing is computed until it ends. `version`: it ends, and this is what the
    weights are called."""

    id: int
    version: str = ""


class AskDigests(Message, frozen=True):
    """Say what the weights in memory are, by sums of them."""

    id: int


class Digest(Part, frozen=True):
    """Of a tensor of the checkpoint: see `engine_core.loading.digests`."""

    name: str
    dtype: str  # of what is held
    offset: float  # added to what the checkpoint has
    value: int  # below 2^64; of this executor's slice alone, where there are others
    place: str = ""  # of that slice: equal ones have equal values


class SleepEngine(Message, frozen=True):
    """Have the executors give their devices back. Answered once all have. With `grace` requests that run have so many
    seconds to end in, none begins, and those that are left go on when the executors wake. Without it, it is refused
    while requests run or wait, unless a pause holds them. With `discard` no weights are kept in the host's memory."""

    id: int
    grace: float | None = None
    discard: bool = False


class WakeEngine(Message, frozen=True):
    """Have them load the model again. Answered once it is loaded."""

    id: int


class Controlled(Message, frozen=True):
    """It has been done, or why not."""

    id: int
    error: str = ""
    requests: int = 0  # that have not ended: paused ones, or those that go on
    paused: str = ""  # mode of a pause that holds; empty: there is none
    version: str = FIRST_VERSION  # of the weights; of replicas that differ, each once with commas between
    asleep: bool = False  # the executors hold no device
    digests: tuple[Digest, ...] = ()  # of whole tensors


class CheckWeights(Message, frozen=True):
    """scheduler → executors: could this folder, or these tensors, be read into the model?"""

    number: int
    path: str
    tensors: tuple[WeightTensor, ...] = ()
    group: str = ""


class WriteWeights(Message, frozen=True):
    """scheduler → executors: read it, behind all plans so far and before those that follow."""

    number: int
    path: str
    version: str
    tensors: tuple[WeightTensor, ...] = ()
    group: str = ""


class MeetTrainer(Message, frozen=True):
    """scheduler → executors: join the group of a trainer, or leave it."""

    number: int
    asked: JoinGroup


class SumWeights(Message, frozen=True):
    """scheduler → executors: what are your weights?"""

    number: int


class WeightsAnswer(Message, frozen=True):
    """each executor → scheduler, to all four: it has been done, or why not."""

    number: int
    error: str = ""
    digests: tuple[Digest, ...] = ()


Control = (
    Pause | Resume | FlushCache | AbortAll | AskState | UpdateWeights | JoinGroup | HoldWeights | AskDigests
    | SleepEngine | WakeEngine
)  # fmt: skip
Asked = CheckWeights | WriteWeights | MeetTrainer | SumWeights


class EngineStatus(Message, frozen=True, kw_only=True):
    """scheduler → tokenizer → api, every status interval and when readiness changes: heartbeat and counters."""

    time: float  # unix seconds at the scheduler
    epoch: int
    ready: bool
    block_size: int
    max_model_len: int
    max_num_seqs: int
    device: str = ""
    dtype: str = ""
    kv_cache_dtype: str = ""  # of keys and values; empty: the same
    step: int = 0  # steps applied
    step_age: float = 0.0  # seconds since the last apply, 0 when idle
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_free: int = 0  # never used or given up
    blocks_idle: int = 0  # free, content still cached
    host_blocks: int = 0  # KV blocks that there is room for in the executors' host memory
    host_blocks_held: int = 0  # of those, the ones that prefix hits can be fetched from
    disk_blocks: int = 0  # KV blocks that there is room for on the executors' disks
    disk_blocks_held: int = 0  # of those, the ones that prefix hits can be read from
    state_places: int = 0  # for snapshots of recurrent states
    state_snapshots: int = 0  # held there
    state_host_places: int = 0  # the same in the executors' host memory
    state_host_snapshots: int = 0
    adapter_places: int = 0  # for LoRA adapters on the device
    adapters_placed: int = 0  # held there
    adapters_held: int = 0  # in the executors' host memory
    encoder_rows: int = 0  # image tokens whose embeddings there is room for
    encoder_rows_held: int = 0  # of those, the ones that running requests need
    windows: tuple[int, ...] = (0,)  # of each KV group, in tokens; 0: it holds every key
    group_blocks: tuple[int, ...] = ()  # in the tables of running requests, of each KV group; shared ones count in each
    prompt_tokens: int = 0  # the rest are totals since start, but for the rate
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
    drain_rate: float = 0.0  # requests finished per second, recent
    drafts: int = 0  # rows of steps that carried any
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of those, the ones that stand in an output
    images_encoded: int = 0
    image_hits: int = 0  # images that a request found encoded, or being encoded, for another
    accepted_at: tuple[int, ...] = ()  # the same by place in the draft, from 0; the first ones
    draining: bool = False
    replica: int = 0  # whose scheduler this is
    role: str = "mixed"  # of the replica, as `ReplicaRole` has it
    sleeping: bool = False  # its executors hold no device, or soon will not: the next request wakes them
    asleep: bool = False  # of those, each has said so
    kept_weight_bytes: int = 0  # of weights, in the host's memory while they sleep
    loaded: bool = False  # its executors are there, and run steps
    load_seconds: float = 0.0  # that the last load of them took after a sleep
    demand: int = 0  # requests that have not ended and that no pause of the operator's holds
    paused: str = ""  # mode of the operator's pause
    weight_version: str = FIRST_VERSION
