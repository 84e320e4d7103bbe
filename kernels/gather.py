"""The inputs of a step from its rows: token ids, positions, places in the pages, and how long each row is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.records import OWN_DRAFT, AttentionBatch, Entries, InputRows, Inputs, SlotHistory, StatePlaces


def gather_inputs(
    rows: InputRows, tokens: Tensor, known: Tensor, block_tables: Tensor, block_size: int, offsets: Tensor | None = None
) -> Inputs:
    """One launch on a GPU, which waits for nothing; on a CPU the same by `gather_rows`.

    tokens: int32 [slots, row_length]. known: int32 [slots]. block_tables: int32 [slots, max_blocks]. A token at or past
    the last row's end has id 0, position 0 and place 0, which is scratch; a row without tokens has context 0. A
    position past the end of its slot's tables writes to scratch and is not counted as a key. offsets: int32 [slots] of
    rotary positions; None: they are the positions.
    """
    if chip_of(tokens.device).runs_triton:
        from penstock.kernels.gather_triton import gather_tokens

        return gather_tokens(rows, tokens, known, block_tables, block_size, offsets)
    return gather_rows(rows, tokens, known, block_tables, block_size, offsets)


def gather_rows(
    rows: InputRows, tokens: Tensor, known: Tensor, block_tables: Tensor, block_size: int, offsets: Tensor | None = None
) -> Inputs:
    """The reference of `gather_inputs`, by numpy, whose small operations start fastest."""
    query_start, slots, starts, drafts = (
        column.numpy() for column in (rows.query_start, rows.slots, rows.starts, rows.draft_ids)
    )
    firsts = np.where(starts < 0, np.maximum(known.numpy()[slots] + starts, 0), starts)  # [rows]
    counts = np.diff(query_start)
    used = int(query_start[-1])
    ids, positions, places = (np.zeros(len(drafts), kind) for kind in (np.int32, np.int64, np.int64))
    at = np.arange(used) - np.repeat(query_start[:-1] - firsts, counts)  # [used tokens]
    token_slots = np.repeat(slots, counts)
    length, capacity = tokens.shape[1], block_tables.shape[1] * block_size
    known_ids = tokens.numpy()[token_slots, np.minimum(at, length - 1)] * (at < length)
    ids[:used] = np.where(drafts[:used] >= 0, drafts[:used], known_ids)
    positions[:used] = at
    blocks = block_tables.numpy()[token_slots, np.minimum(at, capacity - 1) // block_size].astype(np.int64)
    places[:used] = np.where(at < capacity, blocks * block_size + at % block_size, 0)
    context = np.where(counts > 0, np.minimum(firsts + counts, capacity), 0).astype(np.int32)
    found = Inputs(*(torch.from_numpy(column) for column in (ids, positions, places, context)))
    if offsets is None:
        return found
    turned = positions.copy()
    turned[:used] = np.maximum(at + offsets.numpy()[token_slots], 0)
    return replace(found, rope_positions=torch.from_numpy(turned))


def read_drafts(entries: Entries, history: SlotHistory) -> Entries:
    """The entries with the ids of drafts that were OWN_DRAFT; the tensors given stay as they are.

    The draft behind an entry is the token at known + depth of its slot's row. One launch on a GPU, which waits for
    nothing.
    """
    if chip_of(entries.drafts.device).runs_triton:
        from penstock.kernels.gather_triton import drafts_of

        return replace(entries, drafts=drafts_of(entries, history))
    return replace(entries, drafts=own_drafts(entries, history))


def standing_drafts(slots: Tensor, count: int, history: SlotHistory) -> Tensor:
    """The `count` tokens behind the known ones of each slot: int32 [slots named, count]. slots: int64."""
    return history.tokens[slots[:, None], draft_places(slots, count, history)]


def place_drafts(drafts: Tensor, slots: Tensor, history: SlotHistory) -> None:
    """Have drafts stand behind the known tokens of their slots, as if they had been made here.

    drafts: int32 [slots named, count]. slots: int64, each named once. What is past a row's end is lost.
    """
    places = draft_places(slots, drafts.shape[1], history)
    history.tokens.index_put_((slots[:, None], places), drafts)


def draft_places(slots: Tensor, count: int, history: SlotHistory) -> Tensor:
    """Where drafts stand in their slots' rows; those past the end at the last place. # int64 [slots named, count]"""
    behind = torch.arange(count, device=slots.device)
    return (history.known[slots, None] + behind).clamp_(max=history.tokens.shape[1] - 1)


def own_drafts(entries: Entries, history: SlotHistory) -> Tensor:
    """The reference of `read_drafts`: int32 [entries]."""
    drafts = entries.drafts.numpy()
    own = (drafts == OWN_DRAFT).nonzero()[0]
    if not len(own):
        return entries.drafts
    slots = entries.slots.numpy()[own]
    places = np.minimum(history.known.numpy()[slots] + entries.depth.numpy()[own], history.tokens.shape[1] - 1)
    found = drafts.copy()
    found[own] = history.tokens.numpy()[slots, places]
    return torch.from_numpy(found)


def state_places(positions: Tensor, batch: AttentionBatch, known: Tensor, block_size: int, zeros: int) -> StatePlaces:
    """One launch on a GPU, which waits for nothing; on a CPU the same by `find_places`.

    positions: int64 [tokens]. known: int32 [slots]; a token's own state may be put where its position is at least
    known - 1, as the state of an earlier one is the model's and stands there already. zeros: the line of zeros, which a
    token at or past the last row's end gets, too.
    """
    if chip_of(positions.device).runs_triton:
        from penstock.kernels.gather_triton import places_of

        return places_of(positions, batch, known, block_size, zeros)
    return find_places(positions, batch, known, block_size, zeros)


def find_places(positions: Tensor, batch: AttentionBatch, known: Tensor, block_size: int, zeros: int) -> StatePlaces:
    """The reference of `state_places`."""
    tokens = torch.arange(len(positions), device=positions.device)
    rows = torch.searchsorted(batch.query_start[1:], tokens, right=True)  # the first row that ends behind the token
    used = rows < len(batch.slots)
    slots = batch.slots.index_select(0, rows.clamp(max=len(batch.slots) - 1)).long()
    earlier = (positions - 1).clamp(min=0)
    blocks = (earlier // block_size).clamp(max=batch.block_tables.shape[1] - 1)
    before = batch.block_tables[slots, blocks] * block_size + earlier % block_size
    ahead = used & (positions >= known.index_select(0, slots) - 1)
    return StatePlaces(
        before=torch.where(used & (positions > 0), before, zeros), own=torch.where(ahead, batch.slot_mapping, 0)
    )
