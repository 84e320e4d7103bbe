"""Masks of a step on their way into the sampler's store, whose places the scheduler gives out."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from penstock.engine_core.execution.rows import Column, integers
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.sampling_tables import NO_MASK
from penstock.protocol.steps import StepMasks

MOST_PLACES = 4096
MOST_BYTES = 128 << 20  # of all places: room for 4096 masks of a vocabulary of 262,144
BITS = 32  # of a word


def mask_places(vocabulary: int) -> int:
    """How many masks a store holds."""
    return min(MOST_PLACES, MOST_BYTES * 8 // (BITS * -(-vocabulary // BITS)))


def store_masks(masks: StepMasks, store: Tensor, upload: Upload) -> None:
    """Put the fresh masks of a step into their places of `store  # [places, words]`."""
    if not masks.fresh:
        return
    places = integers(masks.fresh).astype(np.int64)
    bits = integers(masks.bits).reshape(len(places), store.shape[1]).copy()
    new_places, new_bits = upload.send((places, bits))
    store.index_copy_(0, new_places, new_bits)


def entry_masks(masks: StepMasks, entries: int) -> Column:
    """The place of each entry's mask: [entries]."""
    places = np.full(entries, NO_MASK, np.int32)
    places[integers(masks.entries)] = integers(masks.places)
    return places
