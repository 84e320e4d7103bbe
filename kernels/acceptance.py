"""Sampled tokens against the drafts they follow: what stays goes into the slots, where the next step reads it.

Each entry's token was drawn with the noise of its own position and as if the drafts before it stood in the sequence. So
the tokens up to the first that is not the draft behind it are those that plain decoding would have given, one by one,
and no test of probabilities is needed to keep the distribution: the draws are the same draws.

Benchmarks need drafts that come true at a known rate. With `rate` a draft is kept with that chance, by the counter RNG
of (seed, position), whatever was drawn: a kept draft becomes the entry's token; where one is not kept the drawn token
is the row's last. The output is then wrong.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.random import acceptance_words
from penstock.kernels.sampling_tables import NO_DRAFT, OWN_DRAFT, PENALTIES, Entries, SlotHistory, SlotSampling

REJECTED = -2  # the token of an entry behind a draft that was not drawn; as in protocol/steps.py


def accept(
    tokens: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory, rate: float | None = None
) -> None:
    """Mark the entries behind the first wrong draft of each row REJECTED, and carry the others into the history.

    tokens: int32 [entries], of `sample_entries`, changed in place. A row's accepted tokens are written behind its
    slot's known ones (0 for a failed entry, harmless to a step that was planned already; nothing past the table's end),
    added to its penalty counts where its request has penalties, and counted as known. The scratch slot stays as it is.
    One launch on a GPU, which waits for nothing. `rate`, 0 to 1, is for benchmarks: see above.
    """
    if tokens.is_cuda:
        from penstock.kernels.acceptance_triton import accept_rows

        accept_rows(tokens, entries, sampling, history, rate)
    else:
        accept_entries(tokens, entries, sampling, history, rate)


def accept_entries(
    tokens: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory, rate: float | None = None
) -> None:
    """The reference of `accept`: all rows at once, by numpy."""
    found, slots, depth = tokens.numpy(), entries.slots.numpy(), entries.depth.numpy()
    kept = slots < len(history.known) - 1
    if depth.any():
        drafts = entries.drafts.numpy()
        if rate is None:
            right = found == drafts
        else:
            right = (found >= 0) & (drafts != NO_DRAFT) & kept_at_rate(entries, sampling, history, rate)
            found[right] = drafts[right]
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


def marked_entries(tokens: Tensor, entries: Entries) -> Entries:
    """The entries for a further `accept` of tokens that it has marked already, elsewhere: it keeps the same ones.

    Drafts need not be known here: each is what the token before it says, unless the token behind is REJECTED.
    """
    drafts = torch.where(tokens.roll(-1) == REJECTED, OWN_DRAFT, tokens)
    return replace(entries, drafts=drafts)


def kept_at_rate(entries: Entries, sampling: SlotSampling, history: SlotHistory, rate: float) -> NDArray[np.bool_]:
    """Whether the draft behind each entry would be kept, by its position's word. # [entries]"""
    slots = entries.slots.numpy()
    positions = (history.known.numpy()[slots] + entries.depth.numpy()).astype(np.int64)
    found: NDArray[np.bool_] = acceptance_words(sampling.seed.numpy()[slots], positions) < threshold(rate)
    return found


def threshold(rate: float) -> int:
    """How many of the 2**32 words stand for a chance."""
    return round(rate * 2**32)
