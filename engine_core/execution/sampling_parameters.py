"""Sampling parameters of the slots: the sampler's tables, filled as requests enter slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.records import (
    ALLOWED,
    DRAWS,
    EDITS,
    NUMBERS,
    PENALTIES,
    PROCESSED,
    SEED_WORDS,
    TOP_K,
    TOP_P,
    WORD_END,
    WORDS,
    SlotSampling,
)
from penstock.kernels.sampling import GREEDY_BELOW
from penstock.protocol.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import SlotStart

# A slot's numbers behind its seed; all but the first are columns of `SlotSampling`.
INTEGERS = ("known", "uses", "top_k", "prompt_tokens", "logprobs", "edit_counts", "word_counts")
REALS = ("temperature", "min_p", "top_p", "repetition", "presence", "frequency")
ALIGNED = 4  # numbers; lines of a table that begin at a multiple, which is 16 bytes, are read fastest
MAX_EOS = 64  # stop token ids of a model
MAX_EDITS = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_EOS
MAX_WORDS = 2 * MAX_BAD_WORDS  # each as it stands alone and behind a space
NUMBER = 4  # bytes of each in a plan
FOREVER = 2**31 - 1  # a position that no sequence reaches; no token's id either
Column = NDArray[Any]


@dataclass(frozen=True)
class Lists:
    """The lists of one slot's request. Ids outside the vocabulary are left out: nothing can choose them."""

    edits: tuple[tuple[int, int, float, float], ...]  # token, until, early, late: as in `SlotSampling`
    words: tuple[tuple[int, ...], ...]
    allowed: frozenset[int] | None  # None allows all


NO_LISTS = Lists((), (), None)


def read_lists(sampling: Sampling, prompt_tokens: int, vocabulary: int) -> Lists:
    """Biases, and the stop tokens that min_tokens forbids, as edits; bad words; allowed tokens."""
    if not (sampling.logit_bias or sampling.min_tokens or sampling.bad_words or sampling.allowed_token_ids):
        return NO_LISTS
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
        | PROCESSED * sampling.processed_logprobs
    )


def number_columns(numbers: Tensor, slots: int) -> dict[str, Tensor]:
    """The columns that stand in a table as `kernels.changes.SlotMemory` has it, each [slots]; of slots of nobody."""
    assert SEED_WORDS + len(INTEGERS) + len(REALS) == len(numbers)
    seeds, lines = numbers[:SEED_WORDS].view(-1).view(torch.int64), iter(numbers[SEED_WORDS:])
    columns = {"seed": seeds[:slots]}
    columns |= {name: next(lines)[:slots] for name in INTEGERS}
    columns |= {name: next(lines).view(torch.float32)[:slots] for name in REALS}
    columns["logprobs"].fill_(-1)
    for name in ("temperature", "top_p", "repetition"):
        columns[name].fill_(1.0)
    return columns


def empty_tables(numbers: dict[str, Tensor], vocabulary: int, places: int) -> SlotSampling:
    """Tables of slots that use nothing over their numbers' columns, and a store of masks with `places` for grammars."""
    (slots,), device = numbers["uses"].shape, numbers["uses"].device

    def zeros(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    return SlotSampling(
        **{name: column for name, column in numbers.items() if name != "known"},
        edit_tokens=zeros(slots, MAX_EDITS),
        edit_until=zeros(slots, MAX_EDITS),
        edit_early=zeros(slots, MAX_EDITS, kind=torch.float32),
        edit_late=zeros(slots, MAX_EDITS, kind=torch.float32),
        words=zeros(slots, MAX_WORDS, MAX_BAD_WORD_TOKENS),
        masks=zeros(places + slots, -(-vocabulary // 32)),
        own_masks=places,
    )


class SlotParameters:
    """Sampling parameters of every slot, the scratch slot included."""

    def __init__(self, slots: int, vocabulary: int, upload: Upload, mask_slots: int = 0) -> None:
        self.vocabulary = vocabulary
        lines = -(-slots // ALIGNED) * ALIGNED
        self.numbers = torch.zeros(NUMBERS, lines, dtype=torch.int32, device=upload.device)
        columns = number_columns(self.numbers, slots)
        self.known = columns["known"]  # how many tokens each slot has
        self.sampling = empty_tables(columns, vocabulary, mask_slots)
        self.uses = np.zeros(slots, np.int64)  # bits
        self.logprobs = np.full(slots, -1, np.int64)  # width asked for, -1 none
        self.prompt_logprobs = np.full(slots, -1, np.int64)
        self._upload = upload

    def start(self, starts: Sequence[SlotStart]) -> list[tuple[float, ...]]:
        """Take over the parameters of the requests that enter slots, but for their numbers: those are returned, as the
        end of a `kernels.changes.HEAD`, for whoever changes the slots."""
        found: list[tuple[float, ...]] = []
        listed: dict[int, Lists] = {}
        for start in starts:
            sampling, slot = start.sampling, start.slot
            lists = read_lists(sampling, start.prompt_tokens, self.vocabulary)
            used = read_uses(sampling, lists, self.vocabulary)
            if used & (EDITS | WORDS | ALLOWED):
                listed[slot] = lists
            self.uses[slot] = used
            self.logprobs[slot] = sampling.logprobs
            self.prompt_logprobs[slot] = sampling.prompt_logprobs
            found.append((
                (start.seed + 2**63) % 2**64 - 2**63,  # the same 64 bits as a signed number
                len(start.token_ids) // NUMBER, used, sampling.top_k if used & TOP_K else 0, start.prompt_tokens,
                sampling.logprobs, len(lists.edits), len(lists.words),
                sampling.temperature, sampling.min_p, sampling.top_p,
                sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
            ))  # fmt: skip
        if listed:
            self._start_lists(listed)
        return found

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
