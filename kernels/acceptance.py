"""Sampled tokens against the drafts they follow: what stays goes into the slots, where the next step reads it.

Each entry's token was drawn with the noise of its own position and as if the drafts before it stood in the sequence. So
the tokens up to the first that is not the draft behind it are those that plain decoding would have given, one by one,
and no test of probabilities is needed to keep the distribution: the draws are the same draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sampling_tables import PENALTIES, Entries, SlotHistory, SlotSampling

REJECTED = -2  # the token of an entry behind a draft that was not drawn; as in protocol/steps.py


def accept(tokens: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory) -> None:
    """Mark the entries behind the first wrong draft of each row REJECTED, and carry the others into the history.

    tokens: int32 [entries], of `sample_entries`, changed in place. A row's accepted tokens are written behind its
    slot's known ones (0 for a failed entry, harmless to a step that was planned already; nothing past the table's end),
    added to its penalty counts where its request has penalties, and counted as known. The scratch slot stays as it is.
    One launch on a GPU, which waits for nothing.
    """
    if tokens.is_cuda:
        from kernels.acceptance_triton import accept_rows

        accept_rows(tokens, entries, sampling, history)
    else:
        accept_entries(tokens, entries, sampling, history)


def accept_entries(tokens: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory) -> None:
    """The reference of `accept`: all rows at once, by numpy."""
    found, slots, depth = tokens.numpy(), entries.slots.numpy(), entries.depth.numpy()
    kept = slots < len(history.known) - 1
    if depth.any():
        right = found == entries.drafts.numpy()
        for at in depth.nonzero()[0].tolist():  # few; a row's entries stand in order
            right[at] &= right[at - 1]
            if not right[at - 1]:
                kept[at], found[at] = False, REJECTED
    stays = kept.nonzero()[0]
    slots = slots[stays]
    known = history.known.numpy()
    positions = known[slots] + depth[stays]
    new = found[stays].clip(min=0)
    inside = positions < history.tokens.shape[1]
    history.tokens.numpy()[slots[inside], positions[inside]] = new[inside]
    penalised = (sampling.uses.numpy()[slots] & PENALTIES).nonzero()[0]
    if len(penalised):
        places = torch.from_numpy(slots[penalised]).long(), torch.from_numpy(new[penalised]).long()
        history.counts.index_put_(places, history.counts.new_tensor(2), accumulate=True)
    known[slots] = positions + 1  # the deepest of a slot's comes last
