"""Sampling parameters of the slots: the sampler's tables, filled as requests enter slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.execution.transfer import Upload
from kernels.sampling import GREEDY_BELOW
from kernels.sampling_tables import ALLOWED, DRAWS, EDITS, PENALTIES, TOP_K, TOP_P, WORD_END, WORDS, SlotSampling
from protocol.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from protocol.messages import Sampling
from protocol.steps import SlotStart

FLOATS = ("temperature", "min_p", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("uses", "top_k", "prompt_tokens", "logprobs", "edit_counts", "word_counts")
REALS = ("temperature", "min_p", "top_p", "repetition", "presence", "frequency")  # where FLOATS go in `SlotSampling`
MAX_EOS = 64  # stop token ids of a model
MAX_EDITS = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_EOS
MAX_WORDS = 2 * MAX_BAD_WORDS  # each as it stands alone and behind a space
FOREVER = 2**31 - 1  # a position that no sequence reaches; no token's id either

Column = NDArray[Any]


@dataclass(frozen=True)
class Lists:
    """The lists of one slot's request. Ids outside the vocabulary are left out: nothing can choose them."""

    edits: tuple[tuple[int, int, float, float], ...]  # token, until, early, late: as in `SlotSampling`
    words: tuple[tuple[int, ...], ...]
    allowed: frozenset[int] | None  # None allows all


def read_lists(sampling: Sampling, prompt_tokens: int, vocabulary: int) -> Lists:
    """Biases, and the stop tokens that min_tokens forbids, as edits; bad words; allowed tokens."""
    bias: dict[int, float] = {}
    for token, value in sampling.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    stops = {*sampling.stop_token_ids, *sampling.eos_token_ids} if sampling.min_tokens else set()
    until = min(prompt_tokens + sampling.min_tokens, FOREVER)
    allowed = frozenset(token for token in sampling.allowed_token_ids if 0 <= token < vocabulary)
    return Lists(
        edits=tuple(
            (token, until, -np.inf if token in stops else bias[token], bias.get(token, 0.0))
            for token in sorted({*bias, *stops})
            if 0 <= token < vocabulary
        ),
        words=tuple(word for word in sampling.bad_words if word and 0 <= word[-1] < vocabulary),
        allowed=allowed if sampling.allowed_token_ids else None,
    )


def read_uses(sampling: Sampling, lists: Lists, vocabulary: int) -> int:
    """The bits of what a request uses."""
    draws = sampling.temperature >= GREEDY_BELOW
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return (
        DRAWS * draws
        | TOP_K * (draws and 0 < sampling.top_k < vocabulary)
        | TOP_P * (draws and sampling.top_p < 1.0)
        | PENALTIES * (penalties != (1.0, 0.0, 0.0))
        | EDITS * (len(lists.edits) > 0)
        | WORDS * (len(lists.words) > 0)
        | ALLOWED * (lists.allowed is not None)
    )


def empty_tables(slots: int, vocabulary: int, places: int, device: torch.device) -> SlotSampling:
    """Tables of slots that use nothing, and a store of masks with `places` for grammars."""

    def zeros(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    temperature, min_p, top_p, repetition, presence, frequency = zeros(len(FLOATS), slots, kind=torch.float32)
    uses, top_k, prompt_tokens, logprobs, edit_counts, word_counts = zeros(len(INTEGERS), slots)
    for column in (temperature, top_p, repetition):
        column.fill_(1.0)
    return SlotSampling(
        uses=uses,
        temperature=temperature,
        min_p=min_p,
        top_p=top_p,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        seed=zeros(slots, kind=torch.int64),
        top_k=top_k,
        prompt_tokens=prompt_tokens,
        logprobs=logprobs.fill_(-1),
        edit_counts=edit_counts,
        edit_tokens=zeros(slots, MAX_EDITS),
        edit_until=zeros(slots, MAX_EDITS),
        edit_early=zeros(slots, MAX_EDITS, kind=torch.float32),
        edit_late=zeros(slots, MAX_EDITS, kind=torch.float32),
        word_counts=word_counts,
        words=zeros(slots, MAX_WORDS, MAX_BAD_WORD_TOKENS),
        masks=zeros(places + slots, -(-vocabulary // 32)),
        own_masks=places,
    )


class SlotParameters:
    """Sampling parameters of every slot, the scratch slot included."""

    def __init__(self, slots: int, vocabulary: int, upload: Upload, mask_places: int = 0) -> None:
        self.vocabulary = vocabulary
        tables = empty_tables(slots, vocabulary, mask_places, upload.device)
        # Columns of one kind stand together, so that a start is one copy to all of them: [columns, slots]
        self._floats = torch.stack([getattr(tables, name) for name in REALS])
        self._integers = torch.stack([getattr(tables, name) for name in INTEGERS])
        columns = zip((*REALS, *INTEGERS), (*self._floats, *self._integers), strict=True)
        self.sampling = replace(tables, **dict(columns))
        self.uses = np.zeros(slots, np.int64)  # bits
        self.logprobs = np.full(slots, -1, np.int64)  # width asked for, -1 none
        self.prompt_logprobs = np.full(slots, -1, np.int64)
        self._upload = upload

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Take over the parameters of the requests that enter slots."""
        floats = np.empty((len(FLOATS), len(starts)), np.float32)
        integers = np.empty((len(INTEGERS), len(starts)), np.int32)
        seeds = np.empty(len(starts), np.int64)
        listed: dict[int, Lists] = {}
        for at, start in enumerate(starts):
            sampling, slot = start.sampling, start.slot
            lists = read_lists(sampling, start.prompt_tokens, self.vocabulary)
            used = read_uses(sampling, lists, self.vocabulary)
            if used & (EDITS | WORDS | ALLOWED):
                listed[slot] = lists
            self.uses[slot] = used
            self.logprobs[slot] = sampling.logprobs
            self.prompt_logprobs[slot] = sampling.prompt_logprobs
            floats[:, at] = [getattr(sampling, name) for name in FLOATS]
            top_k = sampling.top_k if used & TOP_K else 0
            counts = len(lists.edits), len(lists.words)
            integers[:, at] = used, top_k, start.prompt_tokens, sampling.logprobs, *counts
            seeds[at] = (start.seed + 2**63) % 2**64 - 2**63  # the same 64 bits as a signed number
        slots, new_floats, new_integers, new_seeds = self._upload.send(
            (np.array([start.slot for start in starts], np.int64), floats, integers, seeds)
        )
        self._floats.index_copy_(1, slots, new_floats)
        self._integers.index_copy_(1, slots, new_integers)
        self.sampling.seed.index_copy_(0, slots, new_seeds)
        if listed:
            self._start_lists(listed)

    def _start_lists(self, listed: dict[int, Lists]) -> None:
        """Fill the lines of slots with lists. A line's end behind its count is never read."""
        table = self.sampling
        edits = {slot: np.array(lists.edits, np.float64) for slot, lists in listed.items() if lists.edits}
        if edits:
            width = max(len(line) for line in edits.values())
            assert width <= MAX_EDITS, f"{width} edits, more than limits allow"
            given = np.zeros((4, len(edits), width))
            for at, line in enumerate(edits.values()):
                given[:, at, : len(line)] = line.T
            self._copy(
                edits,
                [given[0].astype(np.int32), given[1].astype(np.int32), *given[2:].astype(np.float32)],
                [table.edit_tokens, table.edit_until, table.edit_early, table.edit_late],
            )
        words = {slot: lists.words for slot, lists in listed.items() if lists.words}
        if words:
            self._copy(words, [word_lines(list(words.values()))], [table.words])
        allowed = {table.own_masks + slot: lists.allowed for slot, lists in listed.items() if lists.allowed is not None}
        if allowed:
            self._copy(allowed, [mask_lines(list(allowed.values()), self.vocabulary)], [table.masks])

    def _copy(self, lines: Iterable[int], given: list[Column], tables: list[Tensor]) -> None:
        """Put given[i] at the start of `lines` of tables[i]."""
        index, *sent = self._upload.send([np.array(list(lines), np.int64), *given])
        for table, new in zip(tables, sent, strict=True):
            table[:, : new.shape[1]].index_copy_(0, index, new)


def word_lines(words: Sequence[tuple[tuple[int, ...], ...]]) -> Column:
    """Bad words of some slots as in `SlotSampling.words`: int32 [slots, most of them, MAX_BAD_WORD_TOKENS]."""
    width = max(len(line) for line in words)
    assert width <= MAX_WORDS, f"{width} bad words, more than limits allow"
    found = np.full((len(words), width, MAX_BAD_WORD_TOKENS), WORD_END, np.int32)
    for at, line in enumerate(words):
        for place, word in enumerate(line):
            # An id that is no token's, which a tokenizer cannot have made, must not read as an end.
            found[at, place, : len(word)] = [token if token >= 0 else FOREVER for token in word[::-1]]
    return found


def mask_lines(allowed: Sequence[frozenset[int]], vocabulary: int) -> Column:
    """Sets of tokens as in `SlotSampling.masks`: int32 [sets, ceil(vocabulary / 32)]."""
    bits = np.zeros((len(allowed), -(-vocabulary // 32) * 32), bool)
    for line, tokens in zip(bits, allowed, strict=True):
        line[list(tokens)] = True
    return np.packbits(bits, axis=1, bitorder="little").view("<i4")
