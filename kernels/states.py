"""Recurrent states of running slots: what a step knows of them, and where a layer keeps them.

A slot's state is held as of its base, an absolute multiple of PIECE. Inputs of later positions stand in a ring, that of
position p at p % length. A step reads the state and writes ring entries. The state advances by whole pieces, always by
the same arithmetic from the same entries, so its bits do not depend on how a text was cut into steps. A rejected draft
is an entry that is written again: nothing is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.chip import chip_of

PIECE = 64  # positions by which a state advances


class Gates(NamedTuple):
    """How a token changes its state: by exp(decay) what is held fades, by `weight` the token's own part is scaled."""

    decay: Tensor  # fp32 [tokens, heads], at most 0
    weight: Tensor  # fp32 [tokens, heads]


class Part(NamedTuple):
    """Tokens of one layer, or a piece of one row's, padded with zeros to PIECE."""

    q: Tensor  # [tokens, key_heads, key_dim]
    k: Tensor  # [tokens, key_heads, key_dim]
    v: Tensor  # [tokens, heads, value_dim]
    gates: Gates


class UnitHeads(NamedTuple):
    """The first heads * dim channels are heads whose results are divided by their length."""

    heads: int
    dim: int
    eps: float = 1e-6  # added to the squares' sum

    @property
    def channels(self) -> int:
        return self.heads * self.dim


@dataclass(frozen=True, eq=False)
class RecurrentCache:
    """One layer's states.

    The state as of base 0 is zero, whatever stands in memory. Keys and values are those that the layer was given, of
    its type. Lines may be strided, what is within one is contiguous.
    """

    states: Tensor  # fp32 [slots, heads, key_dim, value_dim]
    keys: Tensor  # [slots, ring, key_heads, key_dim]
    values: Tensor  # [slots, ring, heads, value_dim]
    updates: Tensor | None  # [slots, ring, heads, value_dim], pseudo-values of the delta rule; None: it has none
    gates: Tensor  # fp32 [slots, ring, 2, heads], decays, then weights
    snapshots: Tensor | None = None  # [places, heads, key_dim, value_dim], in lines as those of states; None: no places


@dataclass(frozen=True, eq=False)
class LayerState:
    """What a recurrent layer keeps of the slots."""

    ring: Tensor  # [slots, length, channels], inputs of its convolution
    cache: RecurrentCache | None  # None: the convolution is all that it has
    tails: Tensor | None = None  # [places, width - 1, channels], its latest inputs before snapshots; None: no places


@dataclass(frozen=True, eq=False)
class StateBatch:
    """Rows of one step, made by `begin_states`."""

    query_start: Tensor  # int32 [rows + 1], first token of each row
    slots: Tensor  # int32 [rows]
    starts: Tensor  # int32 [rows], absolute position of each row's first token
    stepping: Tensor  # int32 [rows], 1: tokens behind the first may be drafts; 0: a chunk, all of whose tokens stay
    bases: Tensor  # int32 [rows], as of which a row's state is held when the step begins
    pieces: Tensor  # int32 [rows + 1], first piece of each row among those that are computed whole or begun
    busy: Tensor  # int32 [rows + 1], how many rows have any, then which these are
    most_steps: int  # tokens of a stepping row at most
    most_pieces: int  # at least as many as there are; 0: there are none
    has_chunks: bool  # whether any row may be a chunk
    # int32 [tokens], the place that gets a snapshot of the state behind a token of a chunk, whose next position is a
    # multiple of PIECE; below 0: none does. None: no token has a place.
    kept: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StepStates:
    """The rows of one step, and what the model's recurrent layers keep, one after the other."""

    batch: StateBatch
    layers: Sequence[LayerState]


def ring_length(most_steps: int) -> int:
    """Entries of a ring of keys and values, where a stepping row has so many tokens at most: one, and its drafts."""
    return -(-(PIECE + most_steps) // 16) * 16


def convolution_length(width: int, most_steps: int) -> int:
    """Entries of a ring of a convolution's inputs."""
    return width - 1 + most_steps


def begin_states(
    query_start: Tensor, slots: Tensor, starts: Tensor, stepping: Tensor, bases: Tensor, tokens: int,
    most_steps: int, chunk_rows: int, *, kept: Tensor | None = None,
) -> StateBatch:  # fmt: skip
    """Before the first layer of a step: takes the slots' bases, and advances them in place to where the step's layers
    will leave the states. One launch on a GPU, which waits for nothing.

    query_start is int32 [rows + 1], slots, starts and stepping int32 [rows], bases int32 [slots], all on one device.
    A row without tokens is left alone; any number of these may share a slot. A stepping row's state advances to the
    piece of its first token, a chunk's to the piece of the token behind its last. A row that does not continue what its
    slot holds, as in a dummy run, begins at its own piece.

    tokens, chunk_rows: how many the step has at most; a row is taken for a chunk by `stepping` alone. kept: as of
    StateBatch.
    """
    rows = len(slots)
    assert stepping.dtype == starts.dtype == slots.dtype == bases.dtype == query_start.dtype == torch.int32
    # A chunk has three beyond its own whole ones at most: its state may be two behind, and its last may be begun.
    most_pieces = tokens // PIECE + 3 * chunk_rows if chunk_rows else 0
    most_pieces += rows - min(chunk_rows, rows)  # any stepping row may have left its piece
    if chip_of(slots.device).runs_triton:
        from penstock.kernels.states_triton import launch_begin

        found = launch_begin(query_start, slots, starts, stepping, bases, PIECE)
    else:
        found = advance_bases(query_start, slots, starts, stepping, bases)
    return StateBatch(
        query_start, slots, starts, stepping, *found, most_steps, most_pieces, has_chunks=chunk_rows > 0, kept=kept
    )


def advance_bases(
    query_start: Tensor, slots: Tensor, starts: Tensor, stepping: Tensor, bases: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `begin_states`: the rows' bases, their first pieces, and which rows have any."""
    counts, held = query_start.diff(), bases[slots]
    behind = starts - held
    row_bases = torch.where((behind < 0) | (behind >= 2 * PIECE), starts // PIECE * PIECE, held)
    stays = starts + torch.where(stepping > 0, 0, counts)  # positions below it are sure
    reached = torch.maximum(stays // PIECE * PIECE, row_bases)
    last = torch.where(stepping > 0, reached, -(-stays // PIECE) * PIECE)
    some = counts > 0
    bases[slots[some]] = reached[some]
    pieces = torch.where(some, last - row_bases, 0) // PIECE
    first = torch.zeros_like(query_start)
    torch.cumsum(pieces, 0, out=first[1:])
    works = pieces.nonzero()[:, 0].to(torch.int32)
    busy = torch.zeros_like(query_start)
    busy[0], busy[1 : 1 + len(works)] = len(works), works
    return row_bases, first, busy
