"""Inputs and outputs of kernels, shared by each plain-torch reference and its Triton twin.

The sampler's tables, with a row per slot, keep their place on the device while the executor lives, so that a step, and
a CUDA graph of it, needs nothing but slot numbers. The last slot is scratch: entries that pad a step belong to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.states import StepStates

DECODING = -1  # in `InputRows.starts`: the slot's last known token
COUNTS = struct.Struct("<4i")  # heads, pairs, tokens of the head that has most, nothing
COUNT_WORDS = COUNTS.size // 4
# slot; first word and number of its tokens, then of its blocks; its `NUMBERS`: a seed of 64 bits, integers, floats
HEAD = struct.Struct("<5iq7i6f")
HEAD_WORDS = HEAD.size // 4
PLACES = 5  # words of a head before the numbers
SEED_WORDS = 2  # of the numbers; they come first
NUMBERS = HEAD_WORDS - PLACES
PAIR = 3  # slot, column of its table, block
MOST = 20  # of the best that one may ask for
OUTPUT_TILE = 128  # outputs of a low-rank product in one program

# What a slot's request uses, as bits of `SlotSampling.uses`.
DRAWS = 1  # it is not greedy
TOP_K = 2
TOP_P = 4
PENALTIES = 8
EDITS = 16
WORDS = 32
ALLOWED = 64
PROCESSED = 128  # its log-probabilities are those of the distribution that is left when all of this was done
ADJUSTED = PENALTIES | EDITS | WORDS | ALLOWED  # its logits are changed before the choice

WORD_END = -1  # in `SlotSampling.words`, behind a word's first token
NO_MASK = -1
NO_DRAFT = -1
REJECTED = -2  # the token of an entry behind a draft that was not drawn; as in protocol/steps.py
OWN_DRAFT = -3  # a draft that stands behind its slot's known tokens; as in protocol/steps.py


class Rotation(NamedTuple):
    """Cosines and sines of one step's tokens, made once and used by every layer."""

    cos: Tensor  # [tokens, 1, dim], fp32
    sin: Tensor  # [tokens, 1, dim], fp32; the first half is negated
    query_scale: Tensor | None = None  # fp32 [tokens], of queries alone


class HeadNorms(NamedTuple):
    """Norms of each head's query and key, for the families that have them."""

    query: Tensor  # [dim]
    key: Tensor  # [dim]
    eps: float
    turned: bool = False  # behind the rotation
    values: bool = False  # values have one, too, without a weight


class Activation(NamedTuple):
    """Of an MLP: of its gate, by which `up` is multiplied, or without a gate of its one product."""

    kind: str = "silu"  # of kernels.activation.KINDS
    slope: float = 1.0  # of silu: x * sigmoid(slope * x)
    limit: float = 0.0  # a gate is at most so large before that, and `up` is within it on both sides; 0: any
    shift: float = 0.0  # added to `up`


class ExpertBiases(NamedTuple):
    """Of the experts' products, in their type."""

    gate_up: Tensor | None = None  # [held, 2 * width], gate first
    down: Tensor | None = None  # [held, hidden]


NO_BIASES = ExpertBiases()


class Routing(NamedTuple):
    """How experts are chosen, and their shares."""

    chosen: int
    normalised: bool  # shares of the chosen add up to one, before `scale`
    sigmoid: bool = False  # scores are sigmoids of the logits, else their softmax
    scale: float = 1.0  # of the shares
    bias: Tensor | None = None  # fp32 [experts], added to the scores for the choice alone
    groups: int = 1  # equal runs of experts
    top_groups: int = 1  # of which those of a token are
    group_best: int = 1  # a group counts as much as the sum of its best so many, 1 or 2
    shared: bool = False  # every token goes to one more, which is behind the others


class Routes(NamedTuple):
    """The experts of each token, the likeliest first and a shared one last, and the shares in which their results are
    added."""

    experts: Tensor  # int32 [tokens, chosen]
    shares: Tensor  # fp32 [tokens, chosen]
    total: int  # experts that there are to choose from


class LowRankWeight(NamedTuple):
    """All adapters' additions to one product. Lines of `a` and outputs of `b` belong to the parts in order."""

    a: Tensor  # [places, parts * rank, inputs]
    b: Tensor  # [places, outputs, rank]
    parts: tuple[slice, ...]  # of the outputs
    tiles: Tensor  # int32 [tiles, 3]: first output, the one behind the last, first line of `a`

    @property
    def rank(self) -> int:
        return self.b.shape[2]


class LowRankExperts(NamedTuple):
    """All adapters' additions to one product of each expert that is held. Its parts have as many outputs each."""

    a: Tensor  # [places, held, parts * rank, inputs]
    b: Tensor  # [places, held, outputs, rank]

    @property
    def parts(self) -> int:
        return self.a.shape[2] // self.b.shape[3]


class ExpertAdapters(NamedTuple):
    """Of a mixture, in a step in which a row has an adapter."""

    places: Tensor  # int32 [tokens], place p is index p - 1, 0 without an adapter
    gate_up: LowRankExperts
    down: LowRankExperts


class AdapterRows(NamedTuple):
    """Which rows of a step have which adapter."""

    places: Tensor  # int32 [rows]: 0 has none, place p is index p - 1
    groups: tuple[tuple[int, Tensor], ...]  # of the reference: a place's index, and its rows, int64 [rows]
    schedule: tuple[Tensor, Tensor, Tensor] | None  # of the kernels, see `kernels.routing_triton.Schedule`
    tile: int  # rows of one of their tiles
    early: bool = False  # kernels may read the schedule before they wait for the one before them
    counts: Tensor | None = None  # int32, of products whose own tiles add, see `kernels.low_rank_tiles_triton`
    turns: Iterator[int] | None = None  # which of its counters the next of these products takes: 0 and 1 in turns
    arrivals: Tensor | None = None  # int32 zeros, of many rows, where the last program of a tile adds up what it shrank


class LowRankInputs(NamedTuple):
    """What adapters are to add to one product."""

    x: Tensor  # [rows, inputs]
    rows: AdapterRows
    weight: LowRankWeight


class LowRankSum(NamedTuple):
    """What adapters add to one product, whose inputs `kernels.low_rank.shrink` has shrunk."""

    shrunk: Tensor
    rows: AdapterRows
    weight: LowRankWeight


@dataclass(frozen=True)
class Span:
    """Rows that the reference attends together: several rows of one query each, or one row of several queries."""

    tokens: slice
    slots: Tensor  # [rows, keys], where each key stands in the flattened pages
    seen: Tensor | None  # bool [rows, 1, 1, keys] of single queries; None when all keys are seen or it is a chunk
    first: int  # position of the first query, counted from the first gathered key
    queries: int
    limits: Tensor | None = None  # [queries] of a chunk, as `AttentionBatch` has them, counted from that key, too


@dataclass(frozen=True, eq=False)
class Spans:
    """A whole batch in order. All layers of a step gather into the same memory: in fresh memory the kernel of the
    operating system would have to make every page first."""

    spans: tuple[Span, ...]
    memory: Tensor  # fp32 [2, keys of the largest span, kv_heads, dim]: keys, then values


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """How a layer attends. A score is scaled, then capped, then masked."""

    scale: float  # of scores, above 0
    window: int = 0  # a query's latest keys that it sees, its own among them; 0: all before it
    softcap: float = 0.0  # a score x becomes softcap * tanh(x / softcap); 0: none
    sinks: Tensor | None = None  # fp32 [heads], a logit that takes part in each softmax and has no value
    kv_scales: Tensor | None = None  # fp32 [2, kv_heads], what keys and values in e4m3 pages are multiplied with

    @cached_property
    def plain(self) -> bool:
        """Whether scores go through nothing but scale, mask and softmax."""
        return not self.softcap and self.sinks is None


class SharedPrefixes(NamedTuple):
    """What a layer's rows have found about the keys that they share, see `kernels.attention_prefix`."""

    schedule: Tensor  # int32, see `kernels.attention_schedule`
    partials: Tensor  # fp32 [results, heads, dim]
    lses: Tensor  # fp32 [results, heads], base-2 logarithms of their weights


class ImageRows(NamedTuple):
    """Which tokens of a step are an image's: their embeddings are rows of the encoder cache. A row has the embedding,
    then what each DeepStack level adds."""

    rows: Tensor  # int32 [tokens], of the cache; below 0: the token is no image's
    cache: Tensor  # [rows, (1 + levels) * hidden]

    def instead(self, x: Tensor) -> Tensor:
        """`x  # [tokens, hidden]`, but for tokens of images their embeddings."""
        return torch.where(self.rows[:, None] >= 0, self._part(0, x.shape[1]), x)

    def added(self, x: Tensor, level: int) -> Tensor:
        """`x  # [tokens, hidden]`, for tokens of images with what a DeepStack level (1, 2, ..) adds."""
        return torch.where(self.rows[:, None] >= 0, x + self._part(level, x.shape[1]), x)

    def _part(self, number: int, hidden: int) -> Tensor:
        part = self.cache[:, number * hidden : (number + 1) * hidden]
        return part.index_select(0, self.rows.clamp(min=0))


class RowSet(NamedTuple):
    """Some rows of a step, which attend as a batch of their own."""

    rows: Tensor  # int64 [rows], their numbers in the step
    tokens: slice | Tensor  # theirs in the step, one row's behind the other's; int64 [tokens] where others lie between
    query_start: Tensor  # int32 [rows + 1], first of those tokens of each row
    max_query: int
    max_context: int


class ExpandedGroup(NamedTuple):
    """Rows whose latents are expanded together, into blocks of `latent_expansion.BLOCK` keys, a row's behind the one's
    before it."""

    own: RowSet
    first_blocks: Tensor  # int32 [rows], the first block of each row
    block_rows: Tensor  # int64 [blocks], the row of each block, counted within the group
    block_places: Tensor  # int64 [blocks], the position of its first key in the row


class LongRows(NamedTuple):
    """Rows of a step with so many queries that it pays to expand the latents that they see, and all others."""

    groups: tuple[ExpandedGroup, ...]
    others: RowSet | None


@dataclass(frozen=True)
class AttentionBatch:
    """Rows of one step, made anew for each. A row's queries are its latest tokens; each sees the keys up to its own."""

    query_start: Tensor  # int32 [rows + 1], first token of each row
    context: Tensor  # int32 [rows], keys of each row, its new ones included
    slots: Tensor  # int32 [rows], each row's line of the block tables
    block_tables: Tensor  # int32 [slots, max_blocks]
    slot_mapping: Tensor  # int64 [tokens], block * block_size + offset of each new token
    max_query: int
    max_context: int
    invariant: bool = False  # a query's result has the same bits whatever the batch and the chunk (on a GPU)
    token_types: Tensor | None = None  # int32 [tokens], 1 in the second text of a pair (encoders); None: all 0
    arrivals: Tensor | None = None  # int32 zeros, see kernels.attention_device.arrival_counters; None: made per layer
    states: StepStates | None = None  # None: no layer is recurrent
    # int32 or int64 [tokens], the position of the last key that a query sees where that is behind its own: the last
    # token of its image, of which the row has the key already. None: no query sees any behind its own.
    limits: Tensor | None = None
    images: ImageRows | None = None  # None: no token is an image's
    # int64 [tokens], where queries and keys are turned if not at their positions; [3, tokens] by time, line and column.
    rope_positions: Tensor | None = None
    long_rows: LongRows | None = None  # None: layers with latents absorb the queries of all rows
    # Of further KV groups, whose layers are given `of_group`: block tables and slot mapping.
    others: tuple[tuple[Tensor, Tensor], ...] = ()
    # What the reference derives from the tensors, by (block size, window): made by the first layer, reused by the rest.
    spans: dict[tuple[int, ...], Spans] = field(default_factory=dict, repr=False, compare=False)
    # What attention finds out on the device likewise, see kernels.attention_schedule: of rows that share a prefix, by
    # all that the schedule follows from, and the tiles of chunks, by the tokens, a tile's queries and a row's fewest.
    schedules: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False, compare=False)
    tiles: dict[tuple[int, int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)
    # Batches of some of the rows, and where keys stand in the pages, see kernels.latent_expansion.
    expansions: dict[tuple[int, ...], tuple[AttentionBatch, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def of_group(self, group: int, parts: int = 1, block_size: int = 1) -> AttentionBatch:
        """The same step as layers of one KV group see it, to whom a block's `parts` are blocks of which they have the
        first. The tiles of chunks do not depend on tables."""
        if group == 0 and parts == 1:
            return self
        tables, mapping = self.others[group - 1] if group else (self.block_tables, self.slot_mapping)
        if parts > 1:
            tables = tables * parts
            mapping = mapping + mapping // block_size * ((parts - 1) * block_size)
        return replace(self, block_tables=tables, slot_mapping=mapping, spans={}, schedules={}, expansions={})


@dataclass(frozen=True)
class InputRows:
    """Which positions of which slots a step computes. Rows and tokens may be padded: see `gather_inputs`."""

    query_start: Tensor  # int32 [rows + 1], first token of each row
    slots: Tensor  # int32 [rows]
    starts: Tensor  # int32 [rows], first position of a chunk; below 0: counted back from the slot's known tokens
    draft_ids: Tensor  # int32 [tokens], the id of a token that is a draft; below 0: what stands in the slot's row
    kept: Tensor | None = None  # as of `StateBatch`; empty: no token has a place


@dataclass(frozen=True)
class Inputs:
    """What the model is given."""

    input_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int64 [tokens]
    slot_mapping: Tensor  # int64 [tokens], block * block_size + offset of each token's keys and values
    context: Tensor  # int32 [rows], keys of each row, its new ones included
    rope_positions: Tensor | None = None  # int64 [tokens], positions and the offsets of their slots, at least 0


@dataclass(frozen=True)
class SlotMemory:
    """Where the changes go."""

    tokens: Tensor  # int32 [slots, row length]
    block_tables: Tensor  # int32 [slots, blocks]
    numbers: Tensor  # int32 [NUMBERS, slots or more]: the seeds as the first lines' int64, then a line for each number


@dataclass(frozen=True)
class StatePlaces:
    """Lines of `[places, width]`: block * block_size + offset, and behind all blocks one line that stays zero."""

    before: Tensor  # int64 [tokens], the state of the position before; the line of zeros at position 0
    own: Tensor  # int64 [tokens], where the token's own state may be put; 0, which is scratch, where it may not


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of some tokens. A line of a token that nobody asked about holds nothing of meaning."""

    ids: Tensor  # int32 [tokens, 1 + MOST], the token, then the best in order, the lower id first among equals
    values: Tensor  # float32 [tokens, 1 + MOST]; -inf among the best: there are no more, the id means nothing
    ranks: Tensor  # int32 [tokens], 1 for the best; tokens as likely as this one do not count


@dataclass(frozen=True)
class Processing:
    """What sampling made of the logits, and whose tokens are scored by that."""

    uses: Tensor  # int32 [slots], as in `SlotSampling`
    temperature: Tensor  # float32 [slots]
    masks: Tensor  # int32 [tokens], NO_MASK without one
    adjusted: Tensor | None  # as in `Chosen`


@dataclass(frozen=True)
class SlotSampling:
    """How each slot's request is sampled."""

    uses: Tensor  # int32 [slots], bits
    temperature: Tensor  # float32 [slots]
    min_p: Tensor  # float32 [slots], 0 keeps all
    top_p: Tensor  # float32 [slots]
    repetition: Tensor  # float32 [slots]
    presence: Tensor  # float32 [slots]
    frequency: Tensor  # float32 [slots]
    seed: Tensor  # int64 [slots], 64 bits
    top_k: Tensor  # int32 [slots], 0 keeps all
    prompt_tokens: Tensor  # int32 [slots]
    logprobs: Tensor  # int32 [slots], how many of the best are wanted, -1 none and not the chosen one's either
    edit_counts: Tensor  # int32 [slots]
    edit_tokens: Tensor  # int32 [slots, most edits], each token at most once
    edit_until: Tensor  # int32 [slots, most edits]
    edit_early: Tensor  # float32 [slots, most edits], added to the logit at positions below `edit_until`
    edit_late: Tensor  # float32 [slots, most edits], added from there on
    word_counts: Tensor  # int32 [slots]
    words: Tensor  # int32 [slots, most words, longest], each word backwards, its last token first, then WORD_END
    masks: Tensor  # int32 [places + slots, ceil(vocabulary / 32)], bit i of word w allows token 32 * w + i
    own_masks: int  # the line of `masks` that holds the allowed tokens of slot 0; those before it are grammars'


@dataclass(frozen=True)
class SlotHistory:
    """What the slots have seen; `accept` keeps it current."""

    tokens: Tensor  # int32 [slots, row length]
    known: Tensor  # int32 [slots], how many tokens each has
    counts: Tensor  # int32 [slots, vocabulary]: twice the times in the output, plus one if in the prompt


@dataclass(frozen=True)
class Entries:
    """What one step samples: for each of its rows the token behind the last known one, then one behind each draft.

    An entry's token is drawn as if the drafts before it stood in the sequence; its position is known + depth. Rows that
    pad a step have no entries, or entries of the scratch slot.
    """

    start: Tensor  # int32 [sampling rows + 1], first entry of each row
    slots: Tensor  # int32 [entries]
    depth: Tensor  # int32 [entries], drafts of the row before it
    drafts: Tensor  # int32 [entries], the draft that follows it, NO_DRAFT where none does, OWN_DRAFT see kernels/drafts
    masks: Tensor  # int32 [entries], line of `SlotSampling.masks`, NO_MASK without one


@dataclass(frozen=True)
class Chosen:
    """What sampling gives."""

    tokens: Tensor  # int32 [entries], -1 where there is none
    adjusted: Tensor | None  # float32 [entries, vocabulary], logits of the entries that change theirs; None: nobody


def threshold(rate: float) -> int:
    """How many of the 2**32 words stand for a chance."""
    return round(rate * 2**32)


@dataclass(frozen=True, eq=False)
class BlockLines:
    """The memory of KV blocks, as copies of blocks need it."""

    lines: Sequence[Tensor]  # uint8 [blocks, bytes] each, contiguous
    widths: tuple[int, ...]  # words of a line of each
    addresses: Tensor  # int64 [tensors], where each begins
    starts: Tensor  # int32 [tensors], word of a run at which its line stands
    counts: Tensor  # int32 [tensors], the widths
    word: torch.dtype

    @property
    def run_bytes(self) -> int:
        return sum(self.widths) * self.word.itemsize
