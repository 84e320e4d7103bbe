"""What kernels are given and what they give, shared by each plain-torch reference and its Triton twin."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

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


class Rotation(NamedTuple):
    """Cosines and sines of one step's tokens, made once and used by every layer."""

    cos: Tensor  # [tokens, 1, dim], fp32
    sin: Tensor  # [tokens, 1, dim], fp32; the first half is negated


class HeadNorms(NamedTuple):
    """Norms of each head's query and key, for the families that have them."""

    query: Tensor  # [dim]
    key: Tensor  # [dim]
    eps: float


class Routes(NamedTuple):
    """The experts of each token, the likeliest first, and the shares in which their results are added."""

    experts: Tensor  # int32 [tokens, chosen]
    shares: Tensor  # fp32 [tokens, chosen]
    total: int  # experts that there are


@dataclass(frozen=True)
class Span:
    """Rows that the reference attends together: several rows of one query each, or one row of several queries."""

    tokens: slice
    slots: Tensor  # [rows, keys], where each key stands in the flattened pages
    seen: Tensor | None  # bool [rows, 1, 1, keys] of single queries; None when all keys are seen or it is a chunk
    first: int  # position of the first query, counted from the first gathered key
    queries: int


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
    arrivals: Tensor | None = None  # int32 zeros, see kernels.attention_device.arrival_counters; None: made per layer
    # What the reference derives from the tensors, by (block size, window): made by the first layer, reused by the rest.
    spans: dict[tuple[int, int], tuple[Span, ...]] = field(default_factory=dict, repr=False, compare=False)
    # What attention finds out on the device likewise, see kernels.attention_schedule: of rows that share a prefix, by
    # block size and rows of a tile, and the tiles of chunks, by their queries and the fewest of a row.
    schedules: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)
    tiles: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class InputRows:
    """Which positions of which slots a step computes. Rows and tokens may be padded: see `gather_inputs`."""

    query_start: Tensor  # int32 [rows + 1], first token of each row
    slots: Tensor  # int32 [rows]
    starts: Tensor  # int32 [rows], first position of a chunk; below 0: counted back from the slot's known tokens
    draft_ids: Tensor  # int32 [tokens], the id of a token that is a draft; below 0: what stands in the slot's row


@dataclass(frozen=True)
class Inputs:
    """What the model is given."""

    input_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int64 [tokens]
    slot_mapping: Tensor  # int64 [tokens], block * block_size + offset of each token's keys and values
    context: Tensor  # int32 [rows], keys of each row, its new ones included


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
