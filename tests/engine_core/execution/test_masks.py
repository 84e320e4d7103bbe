"""Masks on their way into the store, and beside the entries that they restrict."""

from __future__ import annotations

import numpy as np
import torch

from penstock.engine_core.execution.input_batch import MAX_MASK_SLOTS, MOST_BYTES, entry_masks, mask_slots, store_masks
from penstock.engine_core.execution.transfer import Upload
from penstock.protocol.steps import StepMasks
from tests.engine_core.execution.harness import column

CPU = torch.device("cpu")


def test_a_store_holds_many_masks_and_fewer_of_a_huge_vocabulary() -> None:
    assert mask_slots(97) == mask_slots(128256) == mask_slots(262144) == MAX_MASK_SLOTS
    assert mask_slots(1 << 20) * (1 << 17) == MOST_BYTES
    assert mask_slots(262145) < MAX_MASK_SLOTS


def test_fresh_masks_go_to_their_places() -> None:
    store = torch.full((5, 2), 7, dtype=torch.int32)
    bits = np.array([[1, 2], [0x80000000, 4]], "<u4").tobytes()
    masks = StepMasks(step=1, epoch=1, entries=b"", slots=b"", new_slots=column(3, 1), bits=bits)
    store_masks(masks, store, Upload(CPU))
    assert store.tolist() == [[7, 7], [-(2**31), 4], [7, 7], [1, 2], [7, 7]]


def test_masks_that_stand_already_cost_nothing() -> None:
    store = torch.zeros(1, 1, dtype=torch.int32)
    store_masks(StepMasks(step=1, epoch=1, entries=column(0), slots=column(0)), store, Upload(CPU))
    assert store.tolist() == [[0]]


def test_entries_without_a_mask_have_none() -> None:
    masks = StepMasks(step=1, epoch=1, entries=column(3, 0), slots=column(17, 4))
    assert entry_masks(masks, 5).tolist() == [4, -1, -1, 17, -1]
