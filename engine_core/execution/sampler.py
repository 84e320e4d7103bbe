"""The second half of a step: logits of the entries, their tokens, and the update of the slots."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.adapter_slots import AdapterSlots
from penstock.engine_core.execution.forward import Network
from penstock.kernels.gather import read_drafts
from penstock.kernels.logprobs import token_logprobs
from penstock.kernels.records import Entries, Processing, SlotHistory, SlotSampling, TokenLogprobs
from penstock.kernels.sampling import accept, sample_entries


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
