"""Drafts made on the device: a draft model continues from where a step left its slots.

Drafting is plain decoding by another model: the same forward pass and sampler, over the same token rows, block tables
and sampling parameters, with keys and values of its own. Its count of tokens per slot starts at the slot's known tokens
and advances with every draft, so drafts are stored after the known tokens. A draft is sampled with the noise of its
position, which is also the noise of the model's token: where the two distributions are alike, so are the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.cuda_graphs import GraphSizes, absorbed_pairs
from penstock.engine_core.execution.draft_graphs import DraftGraphs, draft_sizes
from penstock.engine_core.execution.forward import Forward, Network, Sampler, StageModel, kv_pages, zeros
from penstock.engine_core.execution.input_batch import (
    Column,
    HostRows,
    SlotTable,
    cumulated,
    decode_rows,
    entry_columns,
    input_columns,
    step_inputs,
)
from penstock.engine_core.execution.long_rows import find_long_rows
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.models.attention import Pages
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.eagle import EagleHead
from penstock.engine_core.models.memory_estimate import drafting_bytes
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.gather import standing_drafts, state_places
from penstock.kernels.records import NO_DRAFT, AttentionBatch, Entries, InputRows
from penstock.protocol.step_columns import drafting_table

LEAST = -30000.0  # logit of an id that the draft model lacks; within the range of every dtype


@dataclass(frozen=True)
class Draft:
    """A draft model, or an EAGLE head of the model itself, and its most drafts per row.

    In a pipeline the last stage has it; the others receive its drafts, and send it their auxiliary hidden states.
    """

    model: Network | EagleHead | None  # None: a stage before the last
    spec: ModelSpec
    tokens: int
    weight_bytes: int = 0
    aux_layers: tuple[int, ...] = ()  # layers of the model whose inputs an EAGLE-3 head reads


class Drafting:
    """The draft model over the slots and its own pages. Nothing waits for the device.

    Each rank of the last stage holds the whole draft model; one of them samples, so all have the same drafts.
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
        self._head = draft.model if isinstance(draft.model, PagedHead) else None
        model = fitted(draft.model, draft.spec.vocab_size, slots.sizes.vocabulary)
        self._forward = Forward(model, history, slots.group_tables[:1], cache)
        sampling = slots.parameters.sampling
        uncounted = replace(sampling, uses=torch.zeros_like(sampling.uses))  # drafts are not output yet
        self._sampler = Sampler(model, sampling, history, counting=uncounted, group=group)
        self.graphs: DraftGraphs | None = None
        if sizes is not None:
            weights = max(1, draft.weight_bytes // dtype.itemsize)
            own = draft_sizes(draft.spec.layers, weights, sizes, absorbed_pairs(draft.spec, 1))
            states = torch.zeros(max(own.entries), draft.spec.hidden, dtype=dtype, device=upload.device)
            self.graphs = DraftGraphs(self._forward, self._sampler, own, states, slots.sizes.scratch, upload)

    def block_memory(self, blocks: int) -> list[Tensor]:
        """As of `Forward`: what drafting keeps of blocks."""
        found = self._forward.block_memory(blocks)
        return found if self._head is None else [*found, self._head.lines[:-1].view(blocks + 1, -1)]

    def run(self, rows: DraftRows) -> None:
        """Enqueue the drafting after a step has sampled. Drafts are stored after the slots' known tokens."""
        self._reach.copy_(self._slots.history.known)
        graphs = self.graphs
        shape = graphs.first.fitting(rows.first) if graphs is not None else None
        size = graphs.fitting(rows.turn) if graphs is not None else 0
        if graphs is not None and shape is not None:
            graphs.first.replay(rows.first, shape)
            states = graphs.states[: rows.first.entries]
        else:
            first = step_inputs(self._upload.send(input_columns(rows.first)))
            own, latents = rows.first, self._forward.latents
            long_rows = find_long_rows(own.query_start, own.starts, self._upload) if latents else None
            hidden = self._forward.run(first.rows, own.longest, self._slots.longest(own), long_rows=long_rows)
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
        """Every draft by eager launches. states: after the first pass, [rows of an iteration, hidden]."""
        turn, entries = self._send_turn(rows.turn)
        longest = self._slots.longest(rows.turn)
        for left in range(rows.turns, 0, -1):
            self._sampler.run(states, entries, scored=False)
            if left > 1:
                states = self._forward.run(turn, 1, longest)

    def made(self, slots: Column, turns: int) -> Tensor:
        """The drafts stored after these slots' tokens: int32 [slots, iterations]."""
        (places,) = self._upload.send((slots.astype(np.int64),))
        return standing_drafts(places, turns, self._slots.history)

    def _send_turn(self, rows: HostRows) -> tuple[InputRows, Entries]:
        inputs, entries = input_columns(rows), entry_columns(rows, None)
        tensors = self._upload.send((*inputs, *entries))
        return step_inputs(tensors[: len(inputs)]).rows, Entries(*tensors[len(inputs) :])


@dataclass(frozen=True)
class DraftRows:
    """The drafting after one step. Its entries are the rows that have drafts, in the plan's order."""

    first: HostRows  # positions that the draft model lacks, up to the last token of each slot
    turn: HostRows  # one iteration: one token of each row that has drafts
    turns: int  # iterations: drafts of the row that has the most
    told: Column  # [told rows], slots whose drafts the result has
    told_counts: Column  # [told rows], how many


def draft_rows(drafting: bytes) -> DraftRows:
    """From `StepPlan.drafting`."""
    slots, starts, counts, drafts, told = drafting_table(drafting).T.copy()
    query_start = cumulated(counts)
    sampling = drafts.nonzero()[0]
    turn = decode_rows(slots[sampling])
    first = HostRows(
        query_start=query_start,
        slots=slots,
        starts=starts,
        last=query_start[1:][sampling] - 1,
        draft_ids=np.full(query_start[-1], NO_DRAFT, np.int32),
        entry_start=turn.entry_start,
        entry_slots=turn.entry_slots,
        depth=turn.depth,
        drafts=turn.drafts,
        kept=turn.kept,
        decoding=0,
        longest=int(counts.max()),
    )
    heard = told.nonzero()[0]
    return DraftRows(first, turn, int(drafts.max()), slots[heard], drafts[heard])


def fitted(model: Network, own: int, wanted: int) -> Network:
    """The model with logits of `wanted` ids, for ids below that, where its tables have `own`."""
    return model if own == wanted else PaddedModel(model, own, wanted)


class PaddedModel:
    """A network whose vocabulary is padded or cut to another size."""

    def __init__(self, model: Network, own: int, wanted: int) -> None:
        self._model = model
        self._own, self._wanted = own, wanted

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """Hidden states of the step's tokens: [tokens, hidden]. An id that the model lacks is its last one."""
        if self._own < self._wanted:
            input_ids = input_ids.clamp(max=self._own - 1)
        return self._model.forward(input_ids, positions, attention, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        if self._own > self._wanted:
            return logits[:, : self._wanted]
        return pad(logits, (0, self._wanted - self._own), value=LEAST)


@dataclass(frozen=True)
class StatePages:
    """EAGLE states of all positions of all blocks."""

    lines: Tensor  # [(blocks + 1) * block_size + 1, hidden], the last one zero
    known: Tensor  # int32 [slots], tokens that each slot has
    block_size: int

    @property
    def zeros(self) -> int:
        return len(self.lines) - 1


def attach(
    head: EagleHead, model: Decoder | StageModel, blocks: int, block_size: int, known: Tensor
) -> tuple[TargetModel, PagedHead]:
    """The head's target, as the runner has it, and the head, over the same states. known: int32 [slots], known tokens
    of each slot."""
    shape = (blocks + 1) * block_size + 1, head.spec.layers.hidden
    pages = StatePages(zeros(shape, head.target.dtype, known.device), known, block_size)
    return TargetModel(model, head, pages), PagedHead(head, pages)


def draft_block_bytes(draft: Draft, block_size: int, item_bytes: int) -> int:
    """Bytes that drafting adds to a KV block of an executor that drafts."""
    if draft.model is None:
        return 0
    return drafting_bytes(draft.spec, block_size, item_bytes, states=isinstance(draft.model, EagleHead))


class TargetModel:
    """The model that a head drafts for: it stores its states where the head reads them."""

    def __init__(self, model: Decoder | StageModel, head: EagleHead, pages: StatePages) -> None:
        self._model = model
        self._head = head
        self._pages = pages

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        aux_layers = self._head.spec.aux_layers
        hidden, aux_states = self._model.forward_aux(input_ids, positions, attention, cache, aux_layers)
        self._pages.lines.index_copy_(0, attention.slot_mapping, self._head.combine(hidden, aux_states))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


class PagedHead:
    """The head as a draft model, whose states are in the pages."""

    def __init__(self, head: EagleHead, pages: StatePages) -> None:
        self._head = head
        self._pages = pages

    @property
    def lines(self) -> Tensor:
        return self._pages.lines

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """The head's states of the step's tokens: [tokens, hidden]."""
        pages = self._pages
        places = state_places(positions, attention, pages.known, pages.block_size, pages.zeros)
        before = pages.lines.index_select(0, places.before)  # [tokens, hidden]
        states = self._head.forward(input_ids, positions, before, attention, cache)
        pages.lines.index_copy_(0, places.own, states)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden)
