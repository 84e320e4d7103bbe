"""The first half of a step: inputs gathered from the slots, the model's layers, hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine_core.execution.pages import Pages
from engine_core.execution.slots import SlotTable
from kernels.attention import AttentionBatch
from kernels.gather import InputRows, gather_inputs


class Network(Protocol):
    """What the runner asks of a model."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """Hidden states of the step's tokens: [tokens, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary], the caller's to change."""
        ...


class Forward:
    """One model over the slots and their pages. Every operation is enqueued and none waits, so a graph may hold it."""

    def __init__(self, model: Network, slots: SlotTable, cache: Sequence[Pages]) -> None:
        self._model = model
        self._slots = slots
        self._cache = cache
        self._arrivals: Tensor | None = None
        if slots.block_tables.is_cuda:
            from kernels.attention_device import arrival_counters

            self._arrivals = arrival_counters(slots.block_tables.device)

    def run(self, rows: InputRows, max_query: int, max_context: int) -> Tensor:
        """Hidden states of the tokens: [tokens, hidden]. The bounds hold for every row."""
        slots, history = self._slots, self._slots.history
        inputs = gather_inputs(rows, history.tokens, history.known, slots.block_tables, slots.sizes.block_size)
        attention = AttentionBatch(
            query_start=rows.query_start,
            context=inputs.context,
            slots=rows.slots,
            block_tables=slots.block_tables,
            slot_mapping=inputs.slot_mapping,
            max_query=max_query,
            max_context=max_context,
            arrivals=self._arrivals,
        )
        return self._model.forward(inputs.input_ids, inputs.positions, attention, self._cache)
