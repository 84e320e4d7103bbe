"""The two halves of a step. `Forward`: inputs gathered from the slots, the model's layers, hidden states. `Sampler`:
logits of the entries, their tokens, and the update of the slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.adapter_slots import AdapterSlots
from penstock.engine_core.execution.recurrent_state import RecurrentStates
from penstock.engine_core.models.attention import Pages
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.kv_groups import page_places
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.attention import E4M3
from penstock.kernels.chip import chip_of
from penstock.kernels.gather import gather_inputs, read_drafts
from penstock.kernels.logprobs import token_logprobs
from penstock.kernels.records import (
    AttentionBatch,
    Entries,
    ImageRows,
    InputRows,
    LongRows,
    Processing,
    SlotHistory,
    SlotSampling,
    TokenLogprobs,
)
from penstock.kernels.sampling import accept, sample_entries

CACHE_LINE = 64  # bytes


class Network(Protocol):
    """A model as the runner uses it."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """Hidden states of the step's tokens: [tokens, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary], the caller's to change."""
        ...


@dataclass(frozen=True)
class StepImages:
    """What images change in a step."""

    rows: ImageRows | None = None  # of the first stage
    # int32 [tokens] each, added to positions where queries and keys are turned, by time, line and column (M-RoPE).
    shifts: tuple[Tensor, ...] = ()
    limits: Tensor | None = None  # as of AttentionBatch


class Forward:
    """One model over the slots and their pages. Nothing waits for the device, so a CUDA graph may hold it."""

    def __init__(
        self, model: Network, history: SlotHistory, block_tables: Sequence[Tensor], cache: Sequence[Pages],
        states: RecurrentStates | None = None, adapters: AdapterSlots | None = None,
        rope_offsets: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._history = history
        self._block_tables = tuple(block_tables)  # int32 [slots, max_blocks], of each KV group
        self._cache = cache
        self.states = states
        self._adapters = adapters
        self._rope_offsets = rope_offsets  # int32 [slots], of a model whose rotary positions are not the tokens'
        # A stage without attention has no pages: any size will do by which its tables cover a slot's tokens.
        covering = -(-history.tokens.shape[1] // self._block_tables[0].shape[-1])
        self.latents = any(len(pages) == 1 for pages in cache)  # layers have some, and expand those of long rows
        self._block_size = next((pages[0].shape[1] for pages in cache if pages), covering)
        self._arrivals: Tensor | None = None
        if chip_of(history.tokens.device).runs_triton:
            from penstock.kernels.attention_device import arrival_counters

            self._arrivals = arrival_counters(history.tokens.device)

    def block_memory(self, blocks: int) -> list[Tensor]:
        """What blocks 0 .. blocks have in memory: uint8 [blocks + 1, bytes] each. Layers share some of it."""
        found = {side.untyped_storage().data_ptr(): side for pages in self._cache for side in pages}
        flat = [torch.empty(0, dtype=torch.uint8, device=side.device).set_(side.untyped_storage())
                for side in found.values()]  # fmt: skip
        return [memory.view(blocks + 1, -1) for memory in flat]

    def run(
        self, rows: InputRows, max_query: int, max_context: int, chunk_rows: int = 0,
        token_types: Tensor | None = None, long_rows: LongRows | None = None, *, adapted: bool = False,
        images: StepImages | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states of the tokens: [tokens, hidden]. The bounds hold for every row; chunk_rows: how many may be
        chunks. token_types, long_rows: as of AttentionBatch. adapted: a row may have an adapter. images: of a step with
        some."""
        history, tables = self._history, self._block_tables[0]
        images = images or StepImages()
        offsets = None if images.shifts else self._rope_offsets
        inputs = gather_inputs(rows, history.tokens, history.known, tables, self._block_size, offsets)
        others = tuple(
            (table, gather_inputs(rows, history.tokens, history.known, table, self._block_size).slot_mapping)
            for table in self._block_tables[1:]
        )
        attention = AttentionBatch(
            query_start=rows.query_start,
            context=inputs.context,
            slots=rows.slots,
            block_tables=tables,
            slot_mapping=inputs.slot_mapping,
            max_query=max_query,
            max_context=max_context,
            token_types=token_types,
            arrivals=self._arrivals,
            states=None
            if self.states is None
            else self.states.step(rows, inputs.context, len(inputs.input_ids), max_query, chunk_rows),
            limits=images.limits,
            images=images.rows,
            rope_positions=torch.stack(images.shifts) + inputs.positions if images.shifts else inputs.rope_positions,
            long_rows=long_rows,
            others=others,
        )
        own = self._adapters if adapted else None
        with nullcontext() if own is None else own.places.over(own.of_tokens(rows)):
            return self._model.forward(inputs.input_ids, inputs.positions, attention, self._cache)


@dataclass(frozen=True)
class Sampled:
    """Samples of a step's entries. Only the answering executor has scores."""

    tokens: Tensor  # int32 [entries], -1 of a row with non-finite logits, REJECTED after a wrong draft
    scores: TokenLogprobs | None


class Sampler:
    """The model's head over the slots' parameters. Nothing waits for the device, so a graph may hold it.

    own_drafts: whether drafts may be made on the device. counting: whose penalty counts the tokens update, by default
    all slots with penalties. rate: synthetic acceptance rate of drafts, for benchmarks. group: one of its members
    samples for all.
    """

    def __init__(
        self,
        model: Network,
        sampling: SlotSampling,
        history: SlotHistory,
        *,
        own_drafts: bool = False,
        counting: SlotSampling | None = None,
        rate: float | None = None,
        group: Group = ALONE,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._counting = sampling if counting is None else counting
        self._history = history
        self._own_drafts = own_drafts
        self._rate = rate
        self._group = group
        self._adapters = adapters
        self._answers = group.answers

    def run(self, states: Tensor, entries: Entries, *, scored: bool, adapted: bool = False) -> Sampled:
        """Sample a token for each row of `states  # [entries, hidden]`, and update the slots with those accepted.

        scored: whether any of the slots asks for log-probabilities, or may. adapted: the same of adapters.
        """
        sampling, history = self._sampling, self._history
        if self._own_drafts:
            entries = read_drafts(entries, history)
        own = self._adapters if adapted else None
        with nullcontext() if own is None else own.over_slots(entries.slots):
            logits = self._model.logits(states)  # [entries, vocabulary]
        scores = None
        if self._answers:
            chosen = sample_entries(logits, entries, sampling, history)
            tokens = chosen.tokens
            if scored:
                processing = Processing(sampling.uses, sampling.temperature, entries.masks, chosen.adjusted)
                scores = token_logprobs(logits, tokens, entries.slots, sampling.logprobs, processing)
        else:
            tokens = torch.empty_like(entries.slots)
        if self._group.ranks is not None:
            self._group.broadcast(tokens)
        accept(tokens, entries, self._counting, history, self._rate)
        return Sampled(tokens, scores)


class StageModel:
    """One pipeline stage's layers as the runner wants a model: it reads the previous stage's hidden states from `inbox`
    and leaves its own for the next stage in `outbox`. Both stay where they are, so that CUDA graphs find them.

    aux_layers: layers of the whole model whose inputs are auxiliary hidden states of an EAGLE head on the last stage.
    """

    def __init__(self, model: Decoder, tokens: int, aux_layers: Sequence[int] = ()) -> None:
        group, hidden = model.placement.group, model.spec.hidden
        memory = partial(torch.zeros, dtype=model.dtype, device=model.placement.device)
        before, after = (
            sum(aux < layer for aux in aux_layers) for layer in (model.first, model.first + len(model.blocks))
        )
        self._model = model
        self._aux_layers = tuple(aux_layers)
        self.inbox = None if group.begins else memory(1 + before, tokens, hidden)
        self.outbox = None if group.ends else memory(1 + after, tokens, hidden)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """Hidden states of the step's tokens: [tokens, hidden]; meaningless before the last stage."""
        return self.forward_aux(input_ids, positions, attention, cache, self._aux_layers)[0]

    def forward_aux(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages],
        aux_layers: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The same, and the auxiliary hidden states of all stages up to this one: [tokens, hidden] each."""
        assert tuple(aux_layers) == self._aux_layers, "every stage serves the same head"
        count = len(input_ids)
        stream = None if self.inbox is None else self.inbox[:, :count]
        found, aux_states = self._model.forward_aux(input_ids, positions, attention, cache, aux_layers, stream)
        if self.outbox is None:
            return found, aux_states
        self.outbox[:, :count] = found
        return found[0], aux_states

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def stage_model(model: Network, group: Group, tokens: int, aux_layers: Sequence[int] = ()) -> StageModel | None:
    """The model as a stage of a pipeline, for steps of at most `tokens`; None where one stage holds all of it."""
    if group.stages == 1:
        return None
    assert isinstance(model, Decoder), "the layers of one stage"
    return StageModel(model, tokens, aux_layers)


def kv_pages(spec: ModelSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> list[Pages]:
    """Of each layer, zero: of this type, or in e4m3; none without attention. Block 0 is scratch. Layers of different KV
    groups share memory. Where a place of it has several layers' pages, each layer sees one of a block's parts as a
    block of its own: see `AttentionBatch.of_group`."""
    memory: dict[tuple[int, int], Pages] = {}
    found: list[Pages] = []
    places = iter(page_places(spec))
    for layer in spec.blocks:
        if (attention := layer.attention) is None:
            found.append(())
            continue
        numbers, place, part, _ = next(places)
        if (numbers, place) not in memory:
            kinds = 1 if attention.latent else 2
            sizes = ((blocks + 1) * block_size * numbers // kinds,)
            own = E4M3 if attention.kv_fp8 else dtype
            memory[numbers, place] = tuple(zeros(sizes, own, device) for _ in range(kinds))
        shape = (block_size, attention.head_dim) if attention.latent else (
            block_size, attention.kv_heads, attention.head_dim)  # fmt: skip
        found.append(tuple(side.view(-1, *shape)[part:] for side in memory[numbers, place]))
    return found


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU the memory is committed lazily, on first write."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    promised = np.zeros(size + CACHE_LINE, np.uint8)
    start = -promised.ctypes.data % CACHE_LINE
    return torch.from_numpy(promised[start : start + size]).view(dtype).view(shape)
