"""Drafts that the device made itself: they stand in their slots' rows, right behind the known tokens.

Inputs find them there without further ado (`kernels/gather.py`); entries are compared with them, and what samples an
entry looks at the drafts before it, so their ids are read out once a step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling_tables import OWN_DRAFT, Entries, SlotHistory


def read_drafts(entries: Entries, history: SlotHistory) -> Entries:
    """The entries with the ids of drafts that were OWN_DRAFT; the tensors given stay as they are.

    The draft behind an entry is the token at known + depth of its slot's row. One launch on a GPU, which waits for
    nothing.
    """
    if entries.drafts.is_cuda:
        from penstock.kernels.drafts_triton import drafts_of

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
