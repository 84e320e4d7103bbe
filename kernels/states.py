"""Where hidden states stand that are paged beside keys and values: a token's own, and the one before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention import AttentionBatch


@dataclass(frozen=True)
class StatePlaces:
    """Lines of `[places, width]`: block * block_size + offset, and behind all blocks one line that stays zero."""

    before: Tensor  # int64 [tokens], the state of the position before; the line of zeros at position 0
    own: Tensor  # int64 [tokens], where the token's own state may be put; 0, which is scratch, where it may not


def state_places(positions: Tensor, batch: AttentionBatch, known: Tensor, block_size: int, zeros: int) -> StatePlaces:
    """One launch on a GPU, which waits for nothing; on a CPU the same by `find_places`.

    positions: int64 [tokens]. known: int32 [slots]; a token's own state may be put where its position is at least
    known - 1, as the state of an earlier one is the model's and stands there already. zeros: the line of zeros, which a
    token at or past the last row's end gets, too.
    """
    if positions.is_cuda:
        from penstock.kernels.states_triton import places_of

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
