"""Drafts of the device's own: a draft model goes on from where a step left its slots.

Drafting is plain decoding by another model: the same forward pass and the same sampler, over the same token rows, block
tables and sampling parameters, with keys and values of its own. It has its own idea of how far each slot is, which
begins at the slot's known tokens and moves on with every draft, so what it samples comes to stand behind them. A draft
is drawn with the noise of its own position, the very noise that the model's token will be drawn with: where the two
distributions are alike, so are the draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.execution.draft_graphs import DraftGraphs, draft_sizes
from penstock.engine_core.execution.draft_rows import DraftRows
from penstock.engine_core.execution.forward import Forward, Network
from penstock.engine_core.execution.graph_sizes import GraphSizes
from penstock.engine_core.execution.group import ALONE, Group
from penstock.engine_core.execution.padding import fitted
from penstock.engine_core.execution.pages import kv_pages
from penstock.engine_core.execution.rows import Column, HostRows, entry_columns, input_columns, step_inputs
from penstock.engine_core.execution.sampler import Sampler
from penstock.engine_core.execution.slots import SlotTable
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.models.eagle import EagleHead
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.drafts import standing_drafts
from penstock.kernels.gather import InputRows
from penstock.kernels.sampling_tables import Entries


@dataclass(frozen=True)
class Draft:
    """A draft model, or an EAGLE head of the model itself, and the most drafts that it makes for a row.

    It is the last stage's of a pipeline; the others are told what it makes, and what it wants to hear of their layers.
    """

    model: Network | EagleHead | None  # None: a stage before the last
    spec: ModelSpec
    tokens: int
    weight_bytes: int = 0
    taps: tuple[int, ...] = ()  # layers at whose beginning a head hears the residual stream


class Drafting:
    """The draft model over the slots and its own pages. Nothing waits for the device.

    Each rank of the last stage has all of the draft model; one samples, so that all have the same drafts.
    """

    def __init__(
        self,
        draft: Draft,
        slots: SlotTable,
        blocks: int,
        dtype: torch.dtype,
        upload: Upload,
        sizes: GraphSizes | None,
        group: Group = ALONE,
    ) -> None:
        assert draft.model is not None, "the last stage drafts"
        assert not isinstance(draft.model, EagleHead), "a head is attached first"
        self._slots = slots
        self._upload = upload
        self._reach = torch.zeros_like(slots.history.known)  # int32 [slots], known tokens and drafts behind them
        history = replace(slots.history, known=self._reach)
        cache = kv_pages(draft.spec, blocks, slots.sizes.block_size, dtype, upload.device)
        model = fitted(draft.model, draft.spec.vocab_size, slots.sizes.vocabulary)
        self._forward = Forward(model, history, slots.block_tables, cache)
        sampling = slots.parameters.sampling
        uncounted = replace(sampling, uses=torch.zeros_like(sampling.uses))  # drafts are nobody's output yet
        self._sampler = Sampler(model, sampling, history, counting=uncounted, group=group)
        self.graphs: DraftGraphs | None = None
        if sizes is not None:
            own = draft_sizes(draft.spec.layers, max(1, draft.weight_bytes // dtype.itemsize), sizes)
            states = torch.zeros(max(own.entries), draft.spec.hidden, dtype=dtype, device=upload.device)
            self.graphs = DraftGraphs(self._forward, self._sampler, own, states, slots.sizes.scratch, upload)

    def run(self, rows: DraftRows) -> None:
        """Enqueue the drafting behind a step that has sampled: drafts come to stand behind the slots' tokens."""
        self._reach.copy_(self._slots.history.known)
        graphs = self.graphs
        shape = graphs.first.fitting(rows.first) if graphs is not None else None
        size = graphs.fitting(rows.turn) if graphs is not None else 0
        if graphs is not None and shape is not None:
            graphs.first.replay(rows.first, shape)
            states = graphs.states[: rows.first.entries]
        else:
            first = step_inputs(self._upload.send(input_columns(rows.first)))
            hidden = self._forward.run(first.rows, rows.first.longest, self._slots.longest(rows.first))
            states = hidden.index_select(0, first.last)
            if graphs is not None and size:
                graphs.states[: len(states)].copy_(states)
        if not rows.turns:
            return
        if graphs is not None and size:
            graphs.replay(rows.turn, rows.turns, size)
        else:
            self._take_turns(rows, states)

    def _take_turns(self, rows: DraftRows, states: Tensor) -> None:
        """Every draft by launches of its own. states: behind the first pass, [rows of a turn, hidden]."""
        turn, entries = self._send_turn(rows.turn)
        longest = self._slots.longest(rows.turn)
        for left in range(rows.turns, 0, -1):
            self._sampler.run(states, entries, scored=False)
            if left > 1:
                states = self._forward.run(turn, 1, longest)

    def made(self, slots: Column, turns: int) -> Tensor:
        """The drafts that stand behind these slots' tokens: int32 [slots named, turns]."""
        (places,) = self._upload.send((slots.astype(np.int64),))
        return standing_drafts(places, turns, self._slots.history)

    def _send_turn(self, rows: HostRows) -> tuple[InputRows, Entries]:
        inputs, entries = input_columns(rows), entry_columns(rows, None)
        tensors = self._upload.send((*inputs, *entries))
        return step_inputs(tensors[: len(inputs)]).rows, Entries(*tensors[len(inputs) :])
