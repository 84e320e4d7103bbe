"""The ids of the device's own drafts in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling_tables import OWN_DRAFT, Entries, SlotHistory

TILE = 128  # entries of one program
OWN = tl.constexpr(OWN_DRAFT)


def drafts_of(entries: Entries, history: SlotHistory) -> Tensor:
    """`kernels.drafts.own_drafts` by the kernel, without waiting for the device: int32 [entries]."""
    assert history.tokens.is_contiguous()
    count = len(entries.drafts)
    found = torch.empty_like(entries.drafts)
    drafts_kernel[(triton.cdiv(count, TILE),)](
        entries.drafts, entries.slots, entries.depth, history.known, history.tokens, found,
        count, history.tokens.shape[1], TILE=TILE, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=("count",))
def drafts_kernel(drafts, slots, depths, known, tokens, found, count, row_length, TILE: tl.constexpr):
    """Drafts that the host named stay; the others are read behind the known tokens."""
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = entry < count
    draft = tl.load(drafts + entry, mask=there, other=0)
    own = there & (draft == OWN)
    slot = tl.load(slots + entry, mask=own, other=0).to(tl.int64)
    place = tl.load(known + slot, mask=own, other=0) + tl.load(depths + entry, mask=own, other=0)
    token = tl.load(tokens + slot * row_length + tl.minimum(place, row_length - 1), mask=own, other=0)
    tl.store(found + entry, tl.where(own, token, draft), mask=there)
