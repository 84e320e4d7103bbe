"""Many requests with one set of parameters and a seed each, decoded with drafts of a known quality, all in one call.

The model is a table: the logits of a token follow from the token before it. So is the grammar: what may come next
follows from the last token too. That is enough for penalties, masks and drafts to meet at every position of a draft,
and the exact distribution behind any prefix is a few lines in float64.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.random import gumbel_rows
from penstock.kernels.records import NO_DRAFT, NO_MASK, Entries, SlotHistory
from penstock.kernels.sampling import accept, sample_entries
from tests.kernels.sampling_scene import Row, distribution, moved, packed, scene

VOCABULARY = 8
DEPTH = 3  # drafts of a row
ROOM = 32  # tokens of a slot


@dataclasses.dataclass(frozen=True)
class Model:
    """Logits, and what a grammar allows, by the token before."""

    logits: NDArray[np.float32]  # [vocabulary, vocabulary]
    drafter: NDArray[np.float32]  # the same of a draft model, which is near
    allowed: tuple[tuple[int, ...], ...]  # by the token before


def model(seed: int) -> Model:
    chance = np.random.default_rng(seed)
    logits = (chance.normal(size=(VOCABULARY, VOCABULARY)) * 1.5).astype(np.float32)
    drafter = logits + chance.normal(size=logits.shape).astype(np.float32) * 0.7
    allowed = tuple(tuple(sorted(chance.choice(VOCABULARY, 5, False).tolist())) for _ in range(VOCABULARY))
    return Model(logits, drafter, allowed)


CASES = {
    "temperature": Row(temperature=0.7),
    "top_k": Row(top_k=4, temperature=1.3),
    "top_p": Row(top_p=0.8),
    "min_p": Row(min_p=0.12),
    "penalties": Row(repetition=1.3, frequency=0.4, presence=0.5, tokens=(1, 2, 3, 2), prompt=2),
    "grammar": Row(mask=()),
    "everything": Row(
        temperature=0.9, top_k=6, top_p=0.95, min_p=0.02, repetition=1.2, frequency=0.3, presence=-0.4,
        mask=(), tokens=(5, 1, 2, 2), prompt=1,
    ),
}  # fmt: skip
QUALITIES = ("shared noise", "independent", "constant")


class Crowd:
    """`count` requests of one case on a device; row i is slot i. A case with a mask is under the model's grammar."""

    def __init__(self, given: Model, case: Row, count: int, seed: int, device: str = "cpu") -> None:
        self.model, self.case, self.count, self.device = given, case, count, device
        self.seeds = torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63, count))
        single = scene([case], VOCABULARY)
        lines = torch.tensor([0] * count + [1])  # every slot as the one, and scratch
        found = {field.name: getattr(single.sampling, field.name) for field in dataclasses.fields(single.sampling)}
        tables = {name: x[lines] for name, x in found.items() if isinstance(x, Tensor) and name != "masks"}
        tables["seed"] = torch.cat((self.seeds, torch.zeros(1, dtype=torch.int64)))
        grammar = torch.stack([packed(allowed, VOCABULARY) for allowed in given.allowed])
        masks = torch.cat((grammar, single.sampling.masks[1:][lines]))
        sampling = dataclasses.replace(single.sampling, **tables, masks=masks, own_masks=VOCABULARY)
        tokens = torch.zeros(count + 1, ROOM, dtype=torch.int32)
        tokens[:, : len(case.tokens)] = torch.tensor(case.tokens)
        history = SlotHistory(tokens, single.history.known[lines], single.history.counts[lines])
        self.sampling, self.history = moved(sampling, device), moved(history, device)

    def step(self, drafts: Tensor, rate: float | None = None) -> Tensor:
        """One step, in which every row verifies its drafts: int32 [rows, k] -> tokens [rows, k + 1]."""
        width = drafts.shape[1] + 1
        known = self.history.known[: self.count].cpu().long()
        last = self.history.tokens.cpu()[torch.arange(self.count), known - 1]
        before = torch.cat((last[:, None], drafts), 1).flatten()  # the token before each entry
        nothing = torch.full((self.count, 1), NO_DRAFT, dtype=torch.int32)
        entries = Entries(
            start=torch.arange(0, self.count * width + 1, width, dtype=torch.int32),
            slots=torch.arange(self.count, dtype=torch.int32).repeat_interleave(width),
            depth=torch.arange(width, dtype=torch.int32).repeat(self.count),
            drafts=torch.cat((drafts, nothing), 1).flatten(),
            masks=before if self.case.mask is not None else torch.full_like(before, NO_MASK),
        )
        entries = moved(entries, self.device)
        logits = torch.from_numpy(self.model.logits)[before.long()].to(self.device)
        tokens = sample_entries(logits, entries, self.sampling, self.history).tokens
        accept(tokens, entries, self.sampling, self.history, rate)
        return tokens.cpu().view(self.count, width)

    def drafts(self, quality: str) -> Tensor:
        """Guesses of the next tokens: int32 [rows, DEPTH]."""
        if quality == "constant":
            best: tuple[int, ...] = ()
            for _ in range(DEPTH):
                best = (*best, int(exact(self.model, self.case, best).argmax()))
            return torch.tensor([best], dtype=torch.int32).repeat(self.count, 1)
        seeds = self.seeds if quality == "shared noise" else self.seeds ^ 0x5DEECE66D
        known = self.history.known[: self.count].cpu().long()
        last = self.history.tokens.cpu()[torch.arange(self.count), known - 1].long()
        found = []
        for depth in range(DEPTH):
            logits = torch.from_numpy(self.model.drafter)[last] / max(self.case.temperature, 0.1)
            last = (logits + gumbel_rows(seeds, known + depth, VOCABULARY)).argmax(1)
            found.append(last.int())
        return torch.stack(found, 1)

    def said(self) -> Tensor:
        """Tokens that each row has said: int32 [rows]."""
        return self.history.known[: self.count].cpu() - len(self.case.tokens)

    def sequences(self) -> Tensor:
        """What each row has said so far: int32 [rows, room], zero behind its end."""
        return self.history.tokens[: self.count, len(self.case.tokens) :].cpu()


def exact(given: Model, case: Row, prefix: tuple[int, ...]) -> NDArray[np.float64]:
    """The target's own distribution behind a prefix of accepted drafts, in float64."""
    last = (*case.tokens, *prefix)[-1]
    mask = given.allowed[last] if case.mask is not None else None
    return distribution(given.logits[last].astype(np.float64), dataclasses.replace(case, drafts=prefix, mask=mask))


def chi_square(counts: NDArray[np.int64], due: NDArray[np.float64]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, over bins merged until each is expected five times.

    Raises AssertionError when something impossible was drawn.
    """
    assert not counts[due == 0].any(), "a token was drawn that has no chance"
    bins: list[tuple[float, float]] = []
    seen = expected = 0.0
    for at in np.argsort(due):
        seen, expected = seen + counts[at], expected + due[at]
        if expected >= 5:
            bins.append((seen, expected))
            seen = expected = 0.0
    return sum((seen - expected) ** 2 / expected for seen, expected in bins), max(0, len(bins) - 1)


def chance_of(statistic: float, freedom: int) -> float:
    """That chi-square is at least so large: the regularised upper incomplete gamma function; 1 without freedom."""
    if not freedom:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def position_statistics(given: Model, case: Row, drafts: Tensor, tokens: Tensor) -> list[tuple[float, int]]:
    """For each position of the draft: statistic and freedom of what was drawn there, given the drafts accepted before.

    drafts: [rows, k], tokens: [rows, k + 1] as `Crowd.step` gives them. Prefixes are told apart and summed up.
    """
    code = np.zeros(len(tokens), np.int64)  # of the accepted prefix
    alive = np.ones(len(tokens), bool)
    found = []
    for position in range(tokens.shape[1]):
        drawn = tokens[:, position].numpy()
        alive &= drawn >= 0
        width = VOCABULARY**position
        counts = np.bincount(code[alive] * VOCABULARY + drawn[alive], minlength=width * VOCABULARY)
        statistic, freedom = 0.0, 0
        for prefix, row in enumerate(counts.reshape(width, VOCABULARY)):
            if row.any():
                said = tuple(prefix // VOCABULARY**back % VOCABULARY for back in reversed(range(position)))
                one, more = chi_square(row, exact(given, case, said) * row.sum())
                statistic, freedom = statistic + one, freedom + more
        found.append((statistic, freedom))
        if position < drafts.shape[1]:
            code = code * VOCABULARY + drafts[:, position].numpy()
    return found


def uniform_distance(chances: list[float]) -> tuple[float, float]:
    """Kolmogorov's distance of numbers from the uniform distribution, and its limit for one false alarm in 100."""
    ranked = np.sort(chances)
    steps = np.arange(len(ranked) + 1) / len(ranked)
    distance = max(np.abs(ranked - steps[1:]).max(), np.abs(ranked - steps[:-1]).max())
    return float(distance), 1.628 / math.sqrt(len(ranked))
