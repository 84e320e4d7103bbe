"""Requests as the tests state them, the sampler's tables made from them, and its steps written again, plainly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.kernels.random import gumbel_rows
from penstock.kernels.records import (
    ALLOWED,
    DRAWS,
    EDITS,
    NO_DRAFT,
    NO_MASK,
    PENALTIES,
    PROCESSED,
    TOP_K,
    TOP_P,
    WORD_END,
    WORDS,
    Entries,
    SlotHistory,
    SlotSampling,
)

FOREVER = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One row's parameters as a request states them, and where it stands."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 1
    bias: tuple[tuple[int, float], ...] = ()
    forbidden_until: tuple[tuple[int, int], ...] = ()  # token, position
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] = ()
    mask: tuple[int, ...] | None = None  # what a grammar allows
    tokens: tuple[int, ...] = (1, 2, 3)
    prompt: int = 1
    drafts: tuple[int, ...] = ()  # the last entry of the row follows all of them
    logprobs: int = -1
    processed: bool = False  # what the log-probabilities are of

    @property
    def sequence(self) -> tuple[int, ...]:
        """What the last entry sees before it."""
        return self.tokens + self.drafts

    @property
    def penalised(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1, 0, 0)


@dataclasses.dataclass(frozen=True)
class Scene:
    """What the sampler is given for some rows, row i in slot i; the slot behind them is scratch."""

    sampling: SlotSampling
    history: SlotHistory
    entries: Entries
    lasts: list[int]  # the last entry of each row
    row_of: list[int]  # the row of each entry

    def on(self, device: str) -> Scene:
        parts = (moved(part, device) for part in (self.sampling, self.history, self.entries))
        return Scene(*parts, self.lasts, self.row_of)


def moved(part: Any, device: str) -> Any:
    """A copy of a dataclass of tensors on a device."""
    found = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return type(part)(**{name: x.clone().to(device) if isinstance(x, torch.Tensor) else x for name, x in found.items()})


def packed(tokens: Sequence[int], vocabulary: int) -> torch.Tensor:
    bits = np.zeros(-(-vocabulary // 32) * 32, bool)
    bits[list(tokens)] = True
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4").copy())


def uses(row: Row) -> int:
    drawn = row.temperature > 0
    return (
        DRAWS * drawn
        | TOP_K * (drawn and row.top_k > 0)
        | TOP_P * (drawn and row.top_p < 1)
        | PENALTIES * row.penalised
        | EDITS * bool(row.bias or row.forbidden_until)
        | WORDS * bool(row.bad_words)
        | ALLOWED * bool(row.allowed)
        | PROCESSED * row.processed
    )


def tables(rows: Sequence[Row], vocabulary: int) -> SlotSampling:
    """The rows' parameters; grammars' masks stand in front, one for each row."""
    slots = len(rows) + 1

    def column(name: str, kind: torch.dtype, scratch: float) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows] + [scratch], dtype=kind)

    edits = [
        {token: (FOREVER, value, value) for token, value in row.bias}
        | {token: (until, -math.inf, dict(row.bias).get(token, 0.0)) for token, until in row.forbidden_until}
        for row in rows
    ]
    assert all(len({token for token, _ in row.bias}) == len(row.bias) for row in rows)
    most = max(1, *(len(found) for found in edits), 1)
    table = np.zeros((4, slots, most))
    for slot, found in enumerate(edits):
        for at, (token, (until, early, late)) in enumerate(found.items()):
            table[:, slot, at] = token, until, early, late
    longest = max((len(word) for row in rows for word in row.bad_words), default=1)
    words = np.full((slots, max(1, *(len(row.bad_words) for row in rows), 1), longest), WORD_END, np.int32)
    for slot, row in enumerate(rows):
        for at, word in enumerate(row.bad_words):
            words[slot, at, : len(word)] = word[::-1]
    masks = np.zeros((len(rows) + slots, -(-vocabulary // 32)), np.int32)
    for slot, row in enumerate(rows):
        if row.mask is not None:
            masks[slot] = packed(row.mask, vocabulary).numpy()
        if row.allowed:
            masks[len(rows) + slot] = packed(row.allowed, vocabulary).numpy()
    return SlotSampling(
        uses=torch.tensor([*map(uses, rows), 0], dtype=torch.int32),
        temperature=column("temperature", torch.float32, 1.0),
        min_p=column("min_p", torch.float32, 0.0),
        top_p=column("top_p", torch.float32, 1.0),
        repetition=column("repetition", torch.float32, 1.0),
        presence=column("presence", torch.float32, 0.0),
        frequency=column("frequency", torch.float32, 0.0),
        seed=column("seed", torch.int64, 0),
        top_k=column("top_k", torch.int32, 0),
        prompt_tokens=column("prompt", torch.int32, 0),
        logprobs=column("logprobs", torch.int32, -1),
        edit_counts=torch.tensor([*map(len, edits), 0], dtype=torch.int32),
        edit_tokens=torch.from_numpy(table[0]).int(),
        edit_until=torch.from_numpy(table[1]).int(),
        edit_early=torch.from_numpy(table[2]).float(),
        edit_late=torch.from_numpy(table[3]).float(),
        word_counts=torch.tensor([*(len(row.bad_words) for row in rows), 0], dtype=torch.int32),
        words=torch.from_numpy(words),
        masks=torch.from_numpy(masks),
        own_masks=len(rows),
    )


def scene(rows: Sequence[Row], vocabulary: int, padding: int = 0) -> Scene:
    """Tables and entries of these rows, and `padding` entries of the scratch slot behind them."""
    slots = len(rows) + 1
    tokens = np.zeros((slots, max(len(row.sequence) for row in rows) + 2), np.int32)
    counts = np.zeros((slots, vocabulary), np.int32)
    for slot, row in enumerate(rows):
        tokens[slot, : len(row.tokens)] = row.tokens
        for token in set(row.tokens[: row.prompt]):
            counts[slot, token] |= 1
        for token in row.tokens[row.prompt :]:
            counts[slot, token] += 2
    known = torch.tensor([*(len(row.tokens) for row in rows), 1], dtype=torch.int32)
    sizes = [len(row.drafts) + 1 for row in rows] + [1] * padding
    row_of = np.repeat(np.arange(len(sizes)), sizes)
    start = np.concatenate(([0], np.cumsum(sizes)))
    following = [draft for row in rows for draft in (*row.drafts, NO_DRAFT)] + [NO_DRAFT] * padding
    masks = [at if rows[at].mask is not None else NO_MASK for at in row_of[: start[len(rows)]]] + [NO_MASK] * padding
    entries = Entries(
        start=torch.from_numpy(start).int(),
        slots=torch.from_numpy(np.minimum(row_of, len(rows))).int(),
        depth=torch.from_numpy(np.arange(len(row_of)) - np.repeat(start[:-1], sizes)).int(),
        drafts=torch.tensor(following, dtype=torch.int32),
        masks=torch.tensor(masks, dtype=torch.int32),
    )
    history = SlotHistory(torch.from_numpy(tokens), known, torch.from_numpy(counts))
    return Scene(tables(rows, vocabulary), history, entries, (start[1:] - 1)[: len(rows)].tolist(), row_of.tolist())


def adjusted(logits: NDArray[np.float64], row: Row) -> NDArray[np.float64]:
    """Steps 1 and 2 of kernels/sampling.py written again, one row, plainly, in float64."""
    output = list(row.sequence[row.prompt :])
    logits = logits.copy()
    for allowed in (row.allowed or None, row.mask):
        if allowed is not None:
            logits[np.isin(np.arange(len(logits)), allowed, invert=True)] = -math.inf
    for word in row.bad_words:
        prefix = list(word[:-1])
        if not prefix or output[-len(prefix) :] == prefix:
            logits[word[-1]] = -math.inf
    for token, until in row.forbidden_until:
        if len(row.sequence) < until:
            logits[token] = -math.inf
    for token, value in row.bias:
        logits[token] += value
    for token in set(row.sequence):
        logits[token] = logits[token] / row.repetition if logits[token] > 0 else logits[token] * row.repetition
    for token in set(output):
        logits[token] -= row.frequency * output.count(token) + row.presence
    return logits


def distribution(logits: NDArray[np.float64], row: Row) -> NDArray[np.float64]:
    """The probabilities that a row is sampled with."""
    logits = adjusted(logits, row)
    if row.temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(float)
    weights = np.exp((logits - logits.max()) / row.temperature)
    weights[weights < row.min_p * weights.max()] = 0
    if row.top_k:
        weights[weights < np.sort(weights)[::-1][min(row.top_k, len(weights)) - 1]] = 0
    if row.top_p < 1:
        ranked = np.sort(weights)[::-1]
        reached = np.cumsum(ranked)
        weights[weights < ranked[int((reached - ranked < row.top_p * weights.sum()).sum()) - 1]] = 0
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return probabilities


def scores(logits: NDArray[np.float64], row: Row) -> NDArray[np.float64]:
    """What the last entry of a row takes the best of: log-probabilities plus noise, -inf for what it may not take."""
    probabilities = distribution(logits, row)
    found = np.full(len(logits), -math.inf)
    found[probabilities > 0] = np.log(probabilities[probabilities > 0])
    if row.temperature:
        seed, position = torch.tensor([row.seed]), torch.tensor([len(row.sequence)])
        found += gumbel_rows(seed, position, len(logits))[0].double().numpy()
    return found


def entry_rows(rows: Sequence[Row]) -> list[Row]:
    """For each entry of these rows, one whose last entry it is."""
    return [dataclasses.replace(row, drafts=row.drafts[:depth]) for row in rows for depth in range(len(row.drafts) + 1)]


def random_rows(chance: np.random.Generator, count: int, vocabulary: int) -> list[Row]:
    """Requests that use everything, mixed."""
    few = min(12, vocabulary)
    rows = []
    for _ in range(count):
        tokens = tuple(int(token) for token in chance.integers(0, few, chance.integers(1, 20)))
        some = [tuple(int(at) for at in chance.choice(vocabulary, vocabulary // 2, False)) for _ in range(2)]
        rows.append(Row(
            temperature=float(chance.choice([0.0, 0.3, 1.0, 1.7])),
            min_p=float(chance.choice([0.0, 0.02, 0.3])),
            top_k=int(chance.choice([0, 1, 3, 17, 500])),
            top_p=float(chance.choice([1.0, 0.99, 0.7, 0.1])),
            repetition=float(chance.choice([1.0, 0.8, 1.4])),
            presence=float(chance.choice([0.0, -0.5, 1.0])),
            frequency=float(chance.choice([0.0, 0.3])),
            seed=int(chance.integers(-(2**63), 2**63)),
            bias=tuple((int(token), float(chance.normal())) for token in chance.choice(vocabulary, 2, False)),
            forbidden_until=((0, int(chance.integers(0, 20))),),
            bad_words=tuple(
                tuple(int(token) for token in chance.integers(0, few, chance.integers(1, 4))) for _ in range(3)
            ),
            allowed=() if chance.random() < 0.7 else some[0],
            mask=None if chance.random() < 0.7 else some[1],
            tokens=tokens,
            prompt=int(chance.integers(1, len(tokens) + 1)),
            drafts=tuple(int(token) for token in chance.integers(0, few, chance.choice([0, 0, 1, 4]))),
        ))  # fmt: skip
    return rows


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> tuple[float, float]:
    """The statistic over bins merged to at least 5 expected, and its limit for one false alarm in 100,000."""
    order = np.argsort(expected)
    seen, due, bins = 0.0, 0.0, []
    for at in order:
        seen, due = seen + counts[at], due + expected[at]
        if due >= 5:
            bins.append((seen, due))
            seen, due = 0.0, 0.0
    freedom = max(1, len(bins) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((seen - due) ** 2 / due for seen, due in bins), limit


def edge_logits(vocabulary: int) -> torch.Tensor:
    """Tokens of weight 1, 1/2, 1/4 and 1/4, in all 2; the others have none."""
    logits = torch.full((vocabulary,), -1e4)
    logits[:4] = torch.tensor([1.0, 0.5, 0.25, 0.25]).log()
    return logits


EDGES = [  # a row, and what it keeps of the tokens of `edge_logits`
    (Row(top_p=0.5), {0}),
    (Row(top_p=0.5000001), {0, 1}),
    (Row(top_p=0.75), {0, 1}),
    (Row(top_p=0.7500001), {0, 1, 2, 3}),
    (Row(top_p=0.5, top_k=20), {0}),
    (Row(top_p=0.75, top_k=20), {0, 1}),
    (Row(top_p=0.75, top_k=90), {0, 1}),
    (Row(top_p=0.75, min_p=0.1), {0, 1}),
]
