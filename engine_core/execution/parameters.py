"""Sampling parameters of the slots: numbers in device columns, lists on the host, and a step's `SamplingBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.execution.transfer import Upload
from kernels.sampling import GREEDY_BELOW, Allowed, BadWords, Draws, Edits, Penalties, SamplingBatch
from protocol.messages import Sampling
from protocol.steps import SlotStart

FLOATS = ("temperature", "min_p", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("seed", "top_k", "prompt_tokens")
FOREVER = 2**62  # a position that no sequence reaches

# What a slot's request uses, as bits of `SlotParameters.uses`.
DRAWS = 1
TOP_P = 2
PENALTIES = 4
EDITS = 8
WORDS = 16
ALLOWED = 32

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Lists:
    """The lists of one slot's request. Ids outside the vocabulary are left out: nothing can choose them."""

    edit_tokens: IntArray
    edit_values: NDArray[np.float32]
    edit_until: IntArray
    words: tuple[tuple[int, ...], ...]
    allowed: IntArray


def read_lists(sampling: Sampling, prompt_tokens: int, vocabulary: int) -> Lists:
    """Biases, and the stop tokens that min_tokens forbids, as edits; bad words; allowed tokens."""
    bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < vocabulary]
    stops = sorted({*sampling.stop_token_ids, *sampling.eos_token_ids} if sampling.min_tokens else ())
    stops = [token for token in stops if 0 <= token < vocabulary]
    until = [FOREVER] * len(bias) + [prompt_tokens + sampling.min_tokens] * len(stops)
    return Lists(
        edit_tokens=np.array([token for token, _ in bias] + stops, np.int64),
        edit_values=np.array([value for _, value in bias] + [-np.inf] * len(stops), np.float32),
        edit_until=np.array(until, np.int64),
        words=tuple(word for word in sampling.bad_words if word and 0 <= word[-1] < vocabulary),
        allowed=np.array(sorted({token for token in sampling.allowed_token_ids if 0 <= token < vocabulary}), np.int64),
    )


def uses(sampling: Sampling, lists: Lists) -> int:
    """The bits of what a request uses."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return (
        DRAWS * (sampling.temperature >= GREEDY_BELOW)
        | TOP_P * (sampling.top_p < 1.0)
        | PENALTIES * (penalties != (1.0, 0.0, 0.0))
        | EDITS * (len(lists.edit_tokens) > 0)
        | WORDS * (len(lists.words) > 0)
        | ALLOWED * (len(sampling.allowed_token_ids) > 0)
    )


class SlotParameters:
    """Sampling parameters of every slot, the scratch slot included."""

    def __init__(self, slots: int, vocabulary: int, upload: Upload) -> None:
        self.vocabulary = vocabulary
        self.uses = np.zeros(slots, np.int64)  # bits
        self.logprobs = np.full(slots, -1, np.int64)  # width asked for, -1 none
        self.prompt_logprobs = np.full(slots, -1, np.int64)
        self.floats = torch.ones(len(FLOATS), slots, device=upload.device)
        self.integers = torch.zeros(len(INTEGERS), slots, dtype=torch.int64, device=upload.device)
        self._top_k = np.zeros(slots, np.int64)
        self._lists: dict[int, Lists] = {}
        self._upload = upload

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Take over the parameters of the requests that enter slots."""
        floats = np.empty((len(FLOATS), len(starts)), np.float32)
        integers = np.empty((len(INTEGERS), len(starts)), np.int64)
        for at, start in enumerate(starts):
            sampling, slot = start.sampling, start.slot
            lists = self._lists[slot] = read_lists(sampling, start.prompt_tokens, self.vocabulary)
            self.uses[slot] = uses(sampling, lists)
            self.logprobs[slot] = sampling.logprobs
            self.prompt_logprobs[slot] = sampling.prompt_logprobs
            self._top_k[slot] = sampling.top_k
            floats[:, at] = [getattr(sampling, name) for name in FLOATS]
            seed = (start.seed + 2**63) % 2**64 - 2**63  # the same 64 bits as a signed number
            integers[:, at] = seed, sampling.top_k, start.prompt_tokens
        slots, new_floats, new_integers = self._upload.send(
            (np.array([start.slot for start in starts], np.int64), floats, integers)
        )
        self.floats.index_copy_(1, slots, new_floats)
        self.integers.index_copy_(1, slots, new_integers)

    def batch(self, slots: IntArray) -> SamplingBatch:
        """How the rows of these slots are sampled; good until one of the slots starts another request."""
        used = self.uses[slots]
        features = int(np.bitwise_or.reduce(used, initial=0))
        if not features & ~TOP_P:
            return SamplingBatch(greedy=None)
        arrays: dict[str, NDArray[Any]] = {}
        if features & DRAWS:
            self._draw_arrays(slots, used, arrays)
        if features & PENALTIES:
            arrays["penalised"] = np.flatnonzero(used & PENALTIES)
            arrays["penalised_slots"] = slots[arrays["penalised"]]
        if features & EDITS:
            self._edit_arrays(slots, used, arrays)
        if features & WORDS:
            self._word_arrays(slots, used, arrays)
        if features & ALLOWED:
            self._allowed_arrays(slots, used, arrays)
        sent = dict(zip(arrays, self._upload.send(list(arrays.values())), strict=True))
        edits = [sent[name] for name in ("edit_rows", "edit_tokens", "edit_values", "edit_until") if name in sent]
        words = [sent[name] for name in ("word_rows", "word_slots", "word_tokens", "word_prefixes") if name in sent]
        allowed = [sent[name] for name in ("allowed", "allowed_rows", "allowed_tokens") if name in sent]
        return SamplingBatch(
            greedy=sent.get("greedy"),
            draws=self._draws(arrays["drawn_slots"], sent) if features & DRAWS else None,
            edits=Edits(*edits) if edits else None,
            words=BadWords(*words) if words else None,
            allowed=Allowed(*allowed) if allowed else None,
            penalties=self._penalties(sent) if features & PENALTIES else None,
        )

    def _draw_arrays(self, slots: IntArray, used: IntArray, arrays: dict[str, NDArray[Any]]) -> None:
        drawn = arrays["drawn"] = np.flatnonzero(used & DRAWS)
        arrays["drawn_slots"] = slots[drawn]
        arrays["greedy"] = np.flatnonzero(~used & DRAWS)

    def _draws(self, slots: IntArray, sent: dict[str, torch.Tensor]) -> Draws:
        temperature, min_p, top_p = self.floats[:3].index_select(1, sent["drawn_slots"])
        seeds, top_k = self.integers[:2].index_select(1, sent["drawn_slots"])
        return Draws(
            rows=sent["drawn"],
            seeds=seeds,
            temperature=temperature,
            min_p=min_p,
            top_k=top_k,
            top_p=top_p,
            largest_top_k=int(self._top_k[slots].max()),
            nucleus=bool((self.uses[slots] & TOP_P).any()),
        )

    def _penalties(self, sent: dict[str, torch.Tensor]) -> Penalties:
        repetition, presence, frequency = self.floats[3:].index_select(1, sent["penalised_slots"])
        return Penalties(sent["penalised"], sent["penalised_slots"], repetition, presence, frequency)

    def _edit_arrays(self, slots: IntArray, used: IntArray, arrays: dict[str, NDArray[Any]]) -> None:
        rows = np.flatnonzero(used & EDITS)
        lists = [self._lists[slot] for slot in slots[rows].tolist()]
        arrays["edit_rows"] = np.repeat(rows, [len(one.edit_tokens) for one in lists])
        arrays["edit_tokens"] = np.concatenate([one.edit_tokens for one in lists])
        arrays["edit_values"] = np.concatenate([one.edit_values for one in lists])
        arrays["edit_until"] = np.concatenate([one.edit_until for one in lists])

    def _word_arrays(self, slots: IntArray, used: IntArray, arrays: dict[str, NDArray[Any]]) -> None:
        rows = np.flatnonzero(used & WORDS)
        words = [(row, word) for row in rows.tolist() for word in self._lists[int(slots[row])].words]
        prefixes = np.full((len(words), max(len(word) for _, word in words) - 1), -1, np.int64)
        for at, (_, word) in enumerate(words):
            # An id that is no token's, which a tokenizer cannot have made, must not read as "anything".
            prefixes[at, : len(word) - 1] = [token if token >= 0 else FOREVER for token in word[-2::-1]]
        arrays["word_rows"] = np.array([row for row, _ in words], np.int64)
        arrays["word_slots"] = slots[arrays["word_rows"]]
        arrays["word_tokens"] = np.array([word[-1] for _, word in words], np.int64)
        arrays["word_prefixes"] = prefixes

    def _allowed_arrays(self, slots: IntArray, used: IntArray, arrays: dict[str, NDArray[Any]]) -> None:
        rows = arrays["allowed"] = np.flatnonzero(used & ALLOWED)
        allowed = [self._lists[slot].allowed for slot in slots[rows].tolist()]
        arrays["allowed_rows"] = np.repeat(rows, [len(tokens) for tokens in allowed])
        arrays["allowed_tokens"] = np.concatenate(allowed)
