"""Drafts that the device made itself: they stand in their slots' rows, right behind the known tokens.

Inputs find them there without further ado (`kernels/gather.py`); entries are compared with them, and what samples an
entry looks at the drafts before it, so their ids are read out once a step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.sampling_tables import OWN_DRAFT, Entries, SlotHistory


def read_drafts(entries: Entries, history: SlotHistory) -> Entries:
    """The entries with the ids of drafts that were OWN_DRAFT; the tensors given stay as they are.

    The draft behind an entry is the token at known + depth of its slot's row. One launch on a GPU, which waits for
    nothing.
    """
    if entries.drafts.is_cuda:
        from kernels.drafts_triton import drafts_of

        return replace(entries, drafts=drafts_of(entries, history))
    return replace(entries, drafts=own_drafts(entries, history))


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
