"""The states of a model's recurrent layers: of each slot, and in numbered places that hold snapshots.

States of all layers of a slot or place lie one behind the other, so that a snapshot is a few copies. A slot's state is
held as of its base, and what came later lies in rings; see `kernels.states`. Snapshots have the convolutions' latest
inputs beside the states. Those within chunks are written by the layers as they pass, those of rows that decode are
copied behind the step.

Some places are in the host's memory. Snapshots are copied there on a stream of its own, beside the steps that are
enqueued already. A slot that begins from there is written by a copy before its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.execution.transfer import pinned_memory
from penstock.engine_core.models.recurrence_spec import StateShape
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.records import InputRows
from penstock.kernels.states import (
    LayerState,
    RecurrentCache,
    StepStates,
    begin_states,
    convolution_length,
    ring_length,
)
from penstock.protocol.step_columns import Column, keep_table
from penstock.protocol.steps import HOST_PLACES, NO_STATE, SlotStart, keep_window


@dataclass(frozen=True)
class StateSizes:
    """How many states there are."""

    slots: int  # the scratch slot among them
    places: int
    most_steps: int  # tokens of a decoding row
    host: int = 0  # places in the host's memory


class RecurrentStates:
    """What the recurrent layers of a model keep, all of which have states of one shape."""

    def __init__(self, shape: StateShape, layers: int, sizes: StateSizes, dtype: torch.dtype, device: torch.device):
        slots, most_steps = sizes.slots, sizes.most_steps
        places = slots + sizes.places
        length = convolution_length(shape.width, most_steps) + keep_window(most_steps - 1) - 1
        entries = ring_length(most_steps)
        self._sizes = sizes
        self._width = shape.width
        self.bases = torch.zeros(slots, dtype=torch.int32, device=device)
        self._rings = torch.zeros(slots, layers, length, shape.channels, dtype=dtype, device=device)
        tail, state = (layers, shape.width - 1, shape.channels), (layers, shape.heads, shape.key_dim, shape.value_dim)
        self._tails = torch.zeros(sizes.places, *tail, dtype=dtype, device=device)
        self._states = torch.zeros(places, *state, device=device)  # fp32
        self._host_tails = pinned_memory((sizes.host, *tail), dtype, device)
        self._host_states = pinned_memory((sizes.host, *state), torch.float32, device)
        self._device = device
        self._written: dict[int, torch.cuda.Event] = {}  # by place, behind the copy from a row that decoded
        self._stream: torch.cuda.Stream | None = None  # of copies to the host's memory
        if sizes.host and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def entry(*numbers: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(layers, slots, entries, *numbers, dtype=kind, device=device)

        values = shape.heads, shape.value_dim
        caches: Sequence[RecurrentCache | None] = (None,) * layers
        if shape.heads:
            updates = entry(*values) if shape.updates else None
            keys, held = entry(shape.key_heads, shape.key_dim), entry(*values)
            gates = entry(2, shape.heads, kind=torch.float32)
            caches = [
                RecurrentCache(
                    self._states[:slots, layer], keys[layer], held[layer], None if updates is None else updates[layer],
                    gates[layer], self._states[slots:, layer] if sizes.places else None,
                ) for layer in range(layers)
            ]  # fmt: skip
        self.layers = tuple(
            LayerState(self._rings[:, layer], cache, self._tails[:, layer] if sizes.places else None)
            for layer, cache in enumerate(caches)
        )

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Slots begin at position 0, or with the state of a snapshot as of the position computed."""
        for start in starts:
            self.bases[start.slot].fill_(start.computed)
            if start.state == NO_STATE:
                continue
            if start.state < HOST_PLACES:
                states, tails = self._states[self._sizes.slots + start.state], self._tails[start.state]
            else:
                states = self._host_states[start.state - HOST_PLACES]
                tails = self._host_tails[start.state - HOST_PLACES].to(self._device, non_blocking=True)
            self._states[start.slot].copy_(states, non_blocking=True)
            for tail, ring in self._entries(start.slot, start.computed, tails):
                ring.copy_(tail)

    def spill(self, kept: bytes) -> None:
        """Before a step that keeps states: copy what stands in their places to the host's memory, as far as it is to be
        found there. All that is enqueued from here on waits for it. It does not wait for steps in flight, none of which
        touches these places: what a forward pass wrote there is complete on every rank since its step was applied."""
        spilled = [(place, host) for _, _, place, host in keep_table(kept).tolist() if host != NO_STATE]
        if not spilled:
            return
        with torch.cuda.stream(self._stream):
            for place, host in spilled:
                if self._stream is not None and place in self._written:
                    self._stream.wait_event(self._written[place])
                self._host_states[host].copy_(self._states[self._sizes.slots + place], non_blocking=True)
                self._host_tails[host].copy_(self._tails[place], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def keep(self, kept: bytes, decoding: Column) -> None:
        """Copy states of slots that decode, each as of the position that its slot's is held for behind the step."""
        table = keep_table(kept)
        copied = table[np.isin(table[:, 0], decoding)].tolist()
        for slot, position, place, _ in copied:
            self._states[self._sizes.slots + place].copy_(self._states[slot])
            for tail, ring in self._entries(slot, position, self._tails[place]):
                tail.copy_(ring)
        if copied and self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._written.update((place, event) for _, _, place, _ in copied)

    def step(self, rows: InputRows, context: Tensor, tokens: int, max_query: int, chunk_rows: int) -> StepStates:
        """Of the rows of a step, before its first layer. context: int32 [rows], keys of each row, its new ones
        included; chunk_rows: of them at most."""
        batch = begin_states(
            rows.query_start, rows.slots, context - rows.query_start.diff(), (rows.starts < 0).int(), self.bases,
            tokens, min(max_query, self._sizes.most_steps), chunk_rows,
            kept=rows.kept if rows.kept is not None and len(rows.kept) else None,
        )  # fmt: skip
        return StepStates(batch, self.layers)

    def _entries(self, slot: int, position: int, tails: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The convolutions' inputs right before a position: in a snapshot, and in a slot's rings."""
        length, before = self._rings.shape[2], self._width - 1
        return [(tails[:, at], self._rings[slot, :, (position - before + at) % length]) for at in range(before)]


def recurrent_states(
    spec: ModelSpec, sizes: StateSizes, dtype: torch.dtype, device: torch.device
) -> RecurrentStates | None:
    """Of a rank's share of a model; None: no layer is recurrent."""
    shapes = {recurrence.state() for recurrence in spec.recurrences}
    if not shapes:
        return None
    (shape,) = shapes
    return RecurrentStates(shape, len(spec.recurrences), sizes, dtype, device)
