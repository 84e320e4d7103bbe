"""The first half of a step: inputs gathered from the slots, the model's layers, hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.engine_core.execution.pages import Pages
from penstock.kernels.attention import AttentionBatch
from penstock.kernels.gather import InputRows, gather_inputs
from penstock.kernels.sampling_tables import SlotHistory


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

    def __init__(self, model: Network, history: SlotHistory, block_tables: Tensor, cache: Sequence[Pages]) -> None:
        self._model = model
        self._history = history
        self._block_tables = block_tables  # int32 [slots, max_blocks]
        self._cache = cache
        self._block_size = cache[0][0].shape[1]
        self._arrivals: Tensor | None = None
        if block_tables.is_cuda:
            from penstock.kernels.attention_device import arrival_counters

            self._arrivals = arrival_counters(block_tables.device)

    def run(self, rows: InputRows, max_query: int, max_context: int) -> Tensor:
        """Hidden states of the tokens: [tokens, hidden]. The bounds hold for every row."""
        history, tables = self._history, self._block_tables
        inputs = gather_inputs(rows, history.tokens, history.known, tables, self._block_size)
        attention = AttentionBatch(
            query_start=rows.query_start,
            context=inputs.context,
            slots=rows.slots,
            block_tables=tables,
            slot_mapping=inputs.slot_mapping,
            max_query=max_query,
            max_context=max_context,
            arrivals=self._arrivals,
        )
        return self._model.forward(inputs.input_ids, inputs.positions, attention, self._cache)
