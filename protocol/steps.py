"""The step: what the scheduler tells an executor and what comes back. Columnar; a steady decode step is tens of bytes.

The executor keeps one slot per running request. A plan changes slots by small diffs and names the work of one step:

- every slot in the decode set runs one position, in ascending slot order; `decode_on` and `decode_off` change that set
  before this step runs and it persists between plans; there is a set for each micro-batch, as many as stages of a
  pipeline, and a plan names the one that runs (NO_MICROBATCH: no slot decodes); a slot that starts is in none;
- a slot of the decode set that `drafts` names runs its position and one more for each draft token, all at once;
- then each row of `chunks`, in the order given, runs `count` positions of its slot from position `start`; with `sample`
  set the chunk ends at the slot's last known token and the next token is sampled.

Input ids are gathered on the device from the slot's own token row: a sampled token is written there by the step that
sampled it, so the next step needs nothing from the host. The device counts the tokens of a slot as well, because drafts
of the step before may have been rejected without the host knowing it yet; the host plans with the largest count.

Every row that samples has one entry and one more for each draft: the token that follows its last known one, then those
that follow each draft. Entries are numbered in the order of rows, and so are the columns of `StepResult`. Each entry's
token is drawn as if the drafts before it stood in the sequence, with the noise of its own position; entries count up to
the first whose token is not the draft that follows, and the others are discarded (`REJECTED`). So a request's output
is, token by token, the same as without drafts. A wrong draft only costs time.

A slot that pools (`SlotStart.pooling`) never decodes and its chunks never sample: with the one that ends its prompt
comes its vector, pooled over the positions that its chunks have run.

Rows in `masked` are sampled when their masks have come (`StepMasks` of the same step).

An executor with a draft model drafts for the rows that `drafting` names, once the step has sampled: the drafts stand in
the slot's own row behind its tokens, and the next step that runs the slot may verify as many of them as the row had
requested, by naming OWN_DRAFT as their ids. The draft model's keys and values are in the same blocks as the model's.
A row runs `count` positions of the slot through it from `start` on, or, when that is below 0, the last -`start` of the
tokens that the slot then has, which is as many as it may lack. A row of a chunk that does not sample has no drafts and
ends where the chunk does: the draft model keeps up.

A model with recurrent layers has a state for each slot, and room for snapshots of states in numbered places.
`SlotStart.state` names the one to begin from, read before the step runs. Each row of `keep` copies a slot's state, as
of a position, to a place while the step runs. States are kept as of multiples of STATE_PIECE alone. The state as of P
can be kept in a step whose chunk of the slot has position P - 1, and in one that decodes the slot and begins at any of
P .. P + W - 1, W being the `keep_window`, whether it has drafts or not. Executors run plans in order, so a place may be
written behind a step that reads it. A row of `keep` may name a place in the host's memory, to which the snapshot that
stands in its place is copied before, once slots have started. `SlotStart.state` is such a place with HOST_PLACES added.

An executor has places for the weights of LoRA adapters, numbered from 1 on; place 0 is the model itself. It reads an
adapter into the host's memory when `LoadAdapter` asks for it, beside the steps, and says `AdapterLoaded`. A plan whose
`adapters` name it has it copied to a place before its step runs, and a slot's `adapter` is a place that holds one by
then. Plans run in order: what is written to a place disturbs no step before. Numbers are the scheduler's and are not
used twice; an executor that reports ready again has forgotten all of them.

Beside the steps executors copy KV blocks between the device and blocks of the host's memory, when `CopyBlocks` asks for
it, and say `BlocksCopied`. The scheduler has a block copied to the host's memory once every step that writes it has
been applied, and drops the copy if the block is given to a sequence before the copy is done. It gives a block that is
written from there to nobody before it is done. So copies need no place among the plans.

The host's memory of a prefill replica's executors can be read by those of the other replicas, each member of a group by
the one of its number. A block that is copied there has a stamp, which its executor sets before it writes, negated, and
once it has written. A copy from there waits for the stamps that were asked for, and is worth nothing
(`BlocksCopied.stale`) unless all its blocks still have them once it is done.

A model that sees images has an encoder cache on the device: rows of embeddings, which `EncodeImage` fills beside the
steps on one executor of the first stage. `SlotStart.images` says which tokens of a prompt have which rows. A chunk that
holds such tokens is planned once `ImageEncoded` has come, and the first plan that has such a chunk names the rows in
`images`: the others receive them from their rank before its step runs. Where the model's image tokens see one another
both ways (`VisionSpec.mutual`), no chunk ends within an image. Rows are given to another image once every step that
reads them has been applied.
"""

from __future__ import annotations

from penstock.protocol.control import FIRST_VERSION
from penstock.protocol.message import Message, Part
from penstock.protocol.messages import BlocksAddress, BlocksAddresses, Pooling, Sampling, TraceContext
from penstock.protocol.outputs import Logprobs

REJECTED = -2  # token of an entry after a rejected draft
NO_MICROBATCH = -1  # micro-batch of a step that runs chunks alone
OWN_DRAFT = -3  # id of a draft that the executor made itself
NO_STATE = -1  # place of a slot that begins without a snapshot: its state is zero
OWN_MEMORY = -1  # replica of a copy between an executor's own device and host
HOST_PLACES = 1 << 20  # added to the numbers of places in the host's memory
STATE_PIECE = 64  # positions: states are kept as of its multiples


class SlotStart(Part, frozen=True, kw_only=True):
    """A request enters a slot, new or after preemption; all that the slot held before is gone."""

    slot: int
    token_ids: bytes  # int32 [prompt and output so far]
    prompt_tokens: int  # how many of them are prompt; penalties, min_tokens and bad words look at the rest
    computed: int  # positions whose KV is in `blocks` already
    blocks: bytes  # int32 [columns, KV groups], enough for the step's chunk; 0 where nothing reads a block
    sampling: Sampling
    seed: int  # of this choice, see `choice_seed`
    pooling: Pooling | None = None  # what its prompt becomes; None: it generates
    trace: TraceContext = TraceContext()  # of the request, where it is traced
    choice: int = 0  # of the request, for its trace
    state: int = NO_STATE  # place whose snapshot is as of position `computed`, then a multiple of STATE_PIECE
    adapter: int = 0  # place of its adapter; 0: none
    # int32 [images, 5]: position, length, first row in the encoder cache (-1: no step reads it), width, height (pixels)
    images: bytes = b""


class StepPlan(Message, frozen=True, kw_only=True):
    """scheduler → executors: one step."""

    step: int
    epoch: int
    starts: tuple[SlotStart, ...] = ()
    blocks: bytes = b""  # int32 [columns, 1 + KV groups]: slot, the blocks appended to its tables, one for each group
    decode_on: bytes = b""  # int32 [slots]
    decode_off: bytes = b""  # int32 [slots]
    chunks: bytes = b""  # int32 [chunks, 4]: slot, start, count, sample (0 or 1)
    drafts: bytes = b""  # int32 [drafted rows, 2]: decoding slot, ascending, and how many drafts it has (at least 1)
    draft_ids: bytes = b""  # int32 [sum of those counts], OWN_DRAFT or a token
    masked: bytes = b""  # int32 [rows]: slots whose rows sample under a mask
    drafting: bytes = b""  # int32 [rows, 5]: slot, start, count, drafts, told (1: the result has these drafts)
    microbatch: int = 0  # its decode set is run and changed
    trace: TraceContext | None = None  # of the scheduler's span of this step, where it has one
    keep: bytes = b""  # int32 [kept, 4]: slot, position, place, place of the host's or NO_STATE; none of them twice
    adapters: bytes = b""  # int32 [changed, 2]: an adapter's number, and the place that it is copied to first
    images: bytes = b""  # int32 [images, 3]: rank that has encoded it, first row, rows, which the other ranks get first


class StepMasks(Message, frozen=True, kw_only=True):
    """scheduler → executors, for each plan with masked rows: which tokens each of their entries may take.

    A mask has a slot in the executors' store; one that has been there since an earlier step costs its number alone. The
    scheduler assigns the slots; executors store `new_slots` before the step samples.
    """

    step: int
    epoch: int
    entries: bytes  # int32 [masked entries], index among the step's entries
    slots: bytes  # int32 [masked entries], the slot of each mask
    new_slots: bytes = b""  # int32 [new masks]
    bits: bytes = b""  # uint32 [new masks, ceil(vocabulary / 32)], bit i of word w allows token 32 * w + i


class RowLogprobs(Part, frozen=True):
    """Log-probabilities of one sampled row, or of a chunk's prompt positions."""

    row: int  # index among the step's entries; for prompt logprobs the index among the plan's chunks
    logprobs: Logprobs


class RowVector(Part, frozen=True):
    """The vector of a prompt that pools, with the chunk that ends it."""

    row: int  # index among the plan's chunks
    values: bytes  # float32 [hidden], or [tokens] where logits are wanted


class StepResult(Message, frozen=True, kw_only=True):
    """executor rank 0 → scheduler: one step's sampled tokens. An entry with non-finite logits has token -1."""

    step: int
    epoch: int
    token_ids: bytes  # int32 [entries]
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()  # of positions start+1 .. start+count of the chunk that are prompt
    vectors: tuple[RowVector, ...] = ()
    drafts: bytes = b""  # int32 [drafts of the told rows, row after row]
    busy: float = 0.0  # seconds of device work
    drafting: float = 0.0  # seconds of drafting behind the step before
    waited: float = 0.0  # seconds that the executor was idle before this step, or in it until its masks came


class CopyBlocks(Message, frozen=True, kw_only=True):
    """scheduler → executors: copy KV blocks to the host's memory, or from there."""

    number: int  # the scheduler's, not used twice
    epoch: int
    to_host: bool
    blocks: bytes  # int32 [blocks, 2]: block on the device, block in the host's memory; none of them twice
    replica: int = OWN_MEMORY  # whose memory it is
    stamps: bytes = b""  # int64 [blocks], where it is another one's
    addresses: BlocksAddresses = ()  # the same


class BlocksCopied(Message, frozen=True):
    """each executor → scheduler: this is done."""

    number: int
    seconds: float = 0.0  # that the copies took
    stale: bool = False  # what was read is not what was asked for, or there is no such memory


class LoadAdapter(Message, frozen=True):
    """scheduler → executors: read an adapter into the host's memory, in time that steps do not need."""

    number: int
    path: str  # of its folder
    version: str = ""  # as `Adapter` has it: a folder that has changed since is another adapter, and an error


class DropAdapter(Message, frozen=True):
    """scheduler → executors: forget an adapter in the host's memory, once the plans before this have copied it."""

    number: int


class AdapterLoaded(Message, frozen=True):
    """each executor → scheduler: an adapter has been read, or why it cannot be."""

    number: int
    error: str = ""


class Sleep(Message, frozen=True):
    """scheduler → executors, while no step is in flight: give the device back and wait for `Wake`. One that sleeps is
    told to keep its weights no longer."""

    discard: bool = False  # keep no weights in the host's memory


class Wake(Message, frozen=True):
    """scheduler → executors that sleep: load the model."""


class ExecutorAsleep(Message, frozen=True):
    """executor → scheduler, on joining, and when it keeps its weights no longer: it holds no device and waits for
    `Wake`."""

    kept_bytes: int = 0  # of its weights, in the host's memory


class ExecutorReady(Message, frozen=True, kw_only=True):
    """executor → scheduler, once per epoch after the weights are loaded: what it can hold and how many plans it ran."""

    epoch: int
    blocks: int  # usable KV blocks, numbered 1..blocks; block 0 is scratch
    block_size: int
    step_tokens: int  # token budget of one step
    mask_slots: int = 0  # masks that the store holds
    draft_tokens: int = 0  # most drafts that it makes for a row by itself; 0: it has no draft model
    windows: tuple[int, ...] = (0,)  # of each KV group, in tokens; 0: it holds every key
    device: str
    dtype: str
    kv_cache_dtype: str = ""  # of keys and values; empty: the same
    weight_bytes: int
    cache_bytes: int
    load_seconds: float
    state_bytes: int = 0  # of one sequence's state, which is a snapshot's size; 0: the model has no recurrent layers
    state_places: int = 0  # snapshots that it has room for, in places 0 .. state_places-1
    state_host_places: int = 0  # the same in the host's memory
    host_blocks: int = 0  # KV blocks in the host's memory, numbered 0 .. host_blocks-1
    host_bytes: int = 0  # that they take
    disk_blocks: int = 0  # KV blocks on disk, in places 0 .. disk_blocks-1
    disk_bytes: int = 0  # that they take at most
    kv_store: bool = False  # in their place is a store that other servers use as well, of which so many are remembered
    adapter_places: int = 0  # for LoRA adapters: 1 .. adapter_places; 0: it serves none
    encoder_rows: int = 0  # of the encoder cache; 0: the model sees no images
    weights_path: str = ""  # folder of the weights that it has; empty: the one that it began with
    weight_version: str = FIRST_VERSION
    address: BlocksAddress | None = None  # where other hosts read its host's blocks
    plans: int = 0  # run since its group's generation began: equal for all members of a group that is in step


def copy_stamp(epoch: int, number: int) -> int:
    """Of the blocks that a message has copied to the host's memory: no other one has it."""
    return epoch << 32 | number & 0xFFFFFFFF


def keep_window(drafts: int) -> int:
    """Positions from a state's own on in which a step that decodes its slot has to begin to keep it. drafts: of a row
    at most. A convolution's older inputs are gone; what two steps in flight and a few that wait for others pass stays.
    """
    return min(STATE_PIECE, 16 + 2 * drafts)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice of a request: choice 0 keeps the request's own. SplitMix64 (Steele, Lea, Flood, 2014)."""
    mask = (1 << 64) - 1
    if choice == 0:
        return seed & mask
    z = (seed + choice * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
