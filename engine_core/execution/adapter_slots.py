"""Adapters of the running requests: which place each slot reads, and what is copied to the places between steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.execution.input_batch import HostRows
from penstock.engine_core.execution.transfer import PinnedPool, Upload
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.kernels.records import InputRows
from penstock.protocol.step_columns import adapter_table
from penstock.protocol.steps import SlotStart


class AdapterSlots:
    """The slots' places, on device and host, and the adapters in host memory by their numbers.

    A plan is trusted: it copies what is `loaded` alone, to places that no running slot reads.
    """

    def __init__(self, places: AdapterPlaces, slots: int, upload: Upload) -> None:
        self.places = places
        self.loaded: dict[int, Tensor] = {}
        self.memory = PinnedPool(places.memory.shape[1], places.memory.dtype, upload.device)  # of what is loaded
        self._own = np.zeros(slots, np.int32)
        self._device = torch.zeros(slots, dtype=torch.int32, device=upload.device)
        self._upload = upload

    def reset(self) -> None:
        """No slot has an adapter. What is loaded stays."""
        self._own[:] = 0
        self._device.zero_()

    def change(self, columns: bytes) -> None:
        """Enqueue copies to places: `StepPlan.adapters`."""
        for number, place in adapter_table(columns).tolist():
            self.places.memory[place - 1].copy_(self.loaded[number], non_blocking=True)

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Requests enter slots; nothing is sent where all keep the place that their slots had."""
        changed = {start.slot: start.adapter for start in starts if start.adapter != self._own[start.slot]}
        if not changed:
            return
        slots, places = np.array(list(changed), np.int64), np.array(list(changed.values()), np.int32)
        self._own[slots] = places
        at, values = self._upload.send((slots, places))
        self._device.index_copy_(0, at, values)

    def serve(self, rows: HostRows) -> bool:
        """Whether a row of the step has an adapter."""
        return bool(self._own[rows.slots].any())

    def over_slots(self, slots: Tensor) -> AbstractContextManager[None]:
        """Products are adapted whose rows are of these slots, int32 [rows]."""
        return self.places.over(self._device.index_select(0, slots))

    def of_tokens(self, rows: InputRows) -> Tensor:
        """The place of each token: int32 [tokens], 0 without an adapter and for what pads the step."""
        tokens = torch.arange(len(rows.draft_ids), dtype=torch.int32, device=self._device.device)
        at = torch.searchsorted(rows.query_start[1:], tokens, right=True, out_int32=True)
        count = len(rows.slots)
        places = self._device.index_select(0, rows.slots.index_select(0, at.clamp(max=count - 1)))
        return places.masked_fill(at >= count, 0)
