"""The sampler against a plain reference in float64, its distributions, and that a row never depends on its company."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels import sampling
from kernels.random import gumbel_rows
from kernels.sampling import Allowed, BadWords, Draws, Edits, History, Penalties, SamplingBatch

VOCABULARY = 64


@dataclasses.dataclass(frozen=True)
class Row:
    """One row's parameters as a request states them."""

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
    tokens: tuple[int, ...] = (1, 2, 3)
    prompt: int = 1


def batch_of(rows: list[Row]) -> tuple[SamplingBatch, History, torch.Tensor]:
    """What the sampler is given for these rows, row i in slot i."""

    def pick(test: list[bool]) -> torch.Tensor:
        return torch.tensor([at for at, yes in enumerate(test) if yes], dtype=torch.int64)

    def floats(at: torch.Tensor, name: str) -> torch.Tensor:
        return torch.tensor([getattr(rows[i], name) for i in at], dtype=torch.float32)

    width = max(len(row.tokens) for row in rows) + 1
    tokens = torch.zeros(len(rows), width, dtype=torch.int32)
    counts = torch.zeros(len(rows), VOCABULARY, dtype=torch.int32)
    for slot, row in enumerate(rows):
        tokens[slot, : len(row.tokens)] = torch.tensor(row.tokens)
        for token in set(row.tokens[: row.prompt]):
            counts[slot, token] |= 1
        for token in row.tokens[row.prompt :]:
            counts[slot, token] += 2
    history = History(tokens, torch.tensor([row.prompt for row in rows]), counts)
    drawn = pick([row.temperature > 0 for row in rows])
    greedy = pick([row.temperature == 0 for row in rows])
    edits = [(i, token, value, 1 << 40) for i, row in enumerate(rows) for token, value in row.bias]
    edits += [(i, token, -math.inf, until) for i, row in enumerate(rows) for token, until in row.forbidden_until]
    words = [(i, word) for i, row in enumerate(rows) for word in row.bad_words]
    longest = max((len(word) for _, word in words), default=1)
    prefixes = torch.full((len(words), longest - 1), -1)
    for at, (_, word) in enumerate(words):
        prefixes[at, : len(word) - 1] = torch.tensor(word[:-1][::-1], dtype=torch.int64)
    allowed = [(i, token) for i, row in enumerate(rows) for token in row.allowed]
    penalised = pick([(row.repetition, row.presence, row.frequency) != (1, 0, 0) for row in rows])
    top_k = torch.tensor([rows[i].top_k for i in drawn], dtype=torch.int64)
    batch = SamplingBatch(
        greedy=greedy if len(drawn) else None,
        draws=Draws(
            drawn, torch.tensor([rows[i].seed for i in drawn]), floats(drawn, "temperature"), floats(drawn, "min_p"),
            top_k, floats(drawn, "top_p"), int(top_k.max()),
            any(rows[i].top_p < 1 for i in drawn),
        ) if len(drawn) else None,
        edits=Edits(
            *(torch.tensor([edit[at] for edit in edits]) for at in (0, 1)),
            torch.tensor([edit[2] for edit in edits], dtype=torch.float32), torch.tensor([edit[3] for edit in edits]),
        ) if edits else None,
        words=BadWords(
            torch.tensor([i for i, _ in words]), torch.tensor([i for i, _ in words]),
            torch.tensor([word[-1] for _, word in words]), prefixes,
        ) if words else None,
        allowed=Allowed(
            torch.tensor(sorted({i for i, _ in allowed})), *(torch.tensor([e[at] for e in allowed]) for at in (0, 1))
        ) if allowed else None,
        penalties=Penalties(
            penalised, penalised, floats(penalised, "repetition"), floats(penalised, "presence"),
            floats(penalised, "frequency"),
        ) if len(penalised) else None,
    )  # fmt: skip
    return batch, history, torch.tensor([len(row.tokens) for row in rows])


def sample(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    batch, history, positions = batch_of(rows)
    return [int(token) for token in sampling.sample(logits.clone(), batch, history, positions)]


def adjusted(logits: NDArray[np.float64], row: Row) -> NDArray[np.float64]:
    """Steps 1 and 2 of kernels/sampling.py written again, one row, plainly, in float64."""
    output = list(row.tokens[row.prompt :])
    logits = logits.copy()
    if row.allowed:
        logits[[token for token in range(len(logits)) if token not in row.allowed]] = -math.inf
    for word in row.bad_words:
        prefix = list(word[:-1])
        if not prefix or output[-len(prefix) :] == prefix:
            logits[word[-1]] = -math.inf
    for token, until in row.forbidden_until:
        if len(row.tokens) < until:
            logits[token] = -math.inf
    for token, value in row.bias:
        logits[token] += value
    for token in set(row.tokens):
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


FILTERS = [
    Row(),
    Row(temperature=0.7),
    Row(temperature=2.0),
    Row(top_k=5),
    Row(top_k=1000),
    Row(top_p=0.8),
    Row(top_p=0.05),
    Row(min_p=0.1),
    Row(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    Row(temperature=1.5, top_p=0.95, min_p=0.05, presence=0.5),
    Row(repetition=1.3, frequency=0.4, presence=-0.3, tokens=(5, 6, 5, 6, 7, 6), prompt=2),
    Row(bias=((7, 3.0), (8, -100.0)), top_k=8),
    Row(allowed=(3, 9, 27, 40)),
    Row(bad_words=((4,), (2, 3, 5), (3, 6), (1, 2, 3, 7)), tokens=(1, 2, 3), prompt=1),
    Row(forbidden_until=((10, 99), (11, 2)), temperature=0.9),
]


@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_sampled_distribution(row: Row) -> None:
    draws = 20_000
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2
    rows = [dataclasses.replace(row, seed=seed) for seed in range(draws)]
    expected = distribution(logits.double().numpy(), row) * draws
    counts = np.bincount(sample(logits.expand(draws, -1), rows), minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit


@pytest.mark.parametrize("case", range(30))
def test_random_rows_match_the_plain_reference_noise_included(case: int) -> None:
    chance = np.random.default_rng(case)
    rows = []
    for _ in range(40):
        tokens = tuple(int(token) for token in chance.integers(0, 12, chance.integers(1, 20)))
        rows.append(Row(
            temperature=float(chance.choice([0.0, 0.3, 1.0, 1.7])),
            min_p=float(chance.choice([0.0, 0.02, 0.3])),
            top_k=int(chance.choice([0, 1, 3, 17, 500])),
            top_p=float(chance.choice([1.0, 0.99, 0.7, 0.1])),
            repetition=float(chance.choice([1.0, 0.8, 1.4])),
            presence=float(chance.choice([0.0, -0.5, 1.0])),
            frequency=float(chance.choice([0.0, 0.3])),
            seed=int(chance.integers(-(2**63), 2**63)),
            bias=tuple((int(token), float(chance.normal())) for token in chance.integers(0, VOCABULARY, 2)),
            forbidden_until=((0, int(chance.integers(0, 20))),),
            bad_words=tuple(
                tuple(int(token) for token in chance.integers(0, 12, chance.integers(1, 4))) for _ in range(3)
            ),
            allowed=() if chance.random() < 0.7 else tuple(int(t) for t in chance.choice(VOCABULARY, 30, False)),
            tokens=tokens,
            prompt=int(chance.integers(1, len(tokens) + 1)),
        ))  # fmt: skip
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(case)) * 2
    found = sample(logits, rows)
    for at, row in enumerate(rows):
        noise = gumbel_rows(torch.tensor([row.seed]), torch.tensor([len(row.tokens)]), VOCABULARY)[0].double().numpy()
        probabilities = distribution(logits[at].double().numpy(), row)
        scores = np.full(VOCABULARY, -math.inf)
        scores[probabilities > 0] = np.log(probabilities[probabilities > 0])
        scores += noise if row.temperature else 0
        # Equal within float32: where the best two are closer than its rounding either may win.
        assert scores[found[at]] > scores.max() - 1e-4


def test_a_row_is_the_same_alone_and_in_any_company() -> None:
    logits = torch.randn(len(FILTERS) + 1, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    rows = [*FILTERS, Row(temperature=0)]
    together = sample(logits, rows)
    assert together == [sample(logits[at : at + 1], [row])[0] for at, row in enumerate(rows)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


def test_few_candidates_and_whole_rows_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    peaked = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 40
    rows = [Row(seed=seed, temperature=0.8) for seed in range(64)]
    few = sample(peaked, rows)
    monkeypatch.setattr(sampling, "GUMBEL_MAX", 1e9)
    assert sample(peaked, rows) == few
    assert len(set(few)) > 10


def test_greedy_takes_the_lowest_of_equals_and_needs_no_noise() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[0, [9, 4, 60]] = 2.0
    logits[2, 63] = 0.5
    assert sample(logits, [Row(temperature=0, seed=seed) for seed in (1, 2, 3)]) == [4, 0, 63]


def test_equals_at_a_floor_are_all_kept() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, :10] = 1.0
    for row in (Row(top_k=3), Row(top_p=0.1), Row(min_p=0.9)):
        found = {sample(logits, [dataclasses.replace(row, seed=seed)])[0] for seed in range(300)}
        assert found == set(range(10))


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(1))
    assert sample(logits, [Row(top_k=1, seed=at) for at in range(50)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [*FILTERS, Row(temperature=0)], ids=str)
def test_a_row_with_a_non_finite_logit_fails_alone(bad: float, row: Row) -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(7))
    rows = [Row(top_p=0.9, seed=3), row, Row(temperature=0)]
    good = sample(logits, rows)
    logits[1, 13] = bad
    assert sample(logits, rows) == [good[0], -1, good[2]]
    assert good[1] != -1


def test_a_row_with_every_token_forbidden_fails_alone() -> None:
    logits = torch.randn(2, VOCABULARY)
    everything = Row(allowed=(5,), bias=((5, -math.inf),))
    for nothing in (everything, dataclasses.replace(everything, temperature=0, repetition=1.2)):
        found = sample(logits, [nothing, Row(temperature=0)])
        assert found == [-1, int(logits[1].argmax())]


@pytest.mark.parametrize("top_k", [0, 700])
def test_a_nucleus_is_the_smallest_set_that_reaches_its_mass(top_k: int) -> None:
    vocabulary = 5000
    spread = torch.tensor([[0.01], [1], [3], [9]])
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(1)) * spread
    logits -= logits.amax(-1, keepdim=True)
    for p in (0.3, 0.9, 0.999):
        ways = torch.full((4,), top_k), torch.full((4,), p)
        draws = Draws(torch.arange(4), torch.arange(4), torch.ones(4), torch.zeros(4), *ways, top_k, True)
        floor = sampling.floors(logits, draws)
        for at in range(4):
            left = logits[at].sort(descending=True).values[: top_k or vocabulary].double().exp()
            kept = logits[at][logits[at] >= floor[at]].double().exp()
            assert len(kept) <= len(left)
            assert float(kept.sum() - kept.min()) < p * float(left.sum()) * (1 + 1e-6)
            assert float(kept.sum()) > p * float(left.sum()) * (1 - 1e-6)


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(4))
    chosen = torch.tensor([0, 5, 9, 63, int(logits[4].argmax())])
    expected = torch.log_softmax(logits.double(), -1)
    for width in (0, 1, 20):
        ids, values, ranks = sampling.logprobs(logits, chosen, width)
        assert ids.shape == values.shape == (5, 1 + width)
        assert torch.equal(ids[:, 0], chosen)
        assert torch.allclose(values.double(), expected.gather(1, ids), atol=1e-5)
        assert torch.equal(ids[:, 1:], logits.topk(width).indices)
        assert ranks.tolist() == [1 + int((row > row[at]).sum()) for row, at in zip(logits, chosen, strict=True)]
    assert ranks[4] == 1


@pytest.mark.parametrize("row", [Row(temperature=0), Row(), Row(temperature=0.8, top_p=0.95, top_k=40)], ids=str)
def test_sixty_four_rows_of_a_small_vocabulary_take_few_milliseconds(row: Row) -> None:
    vocabulary, rows = 4096, 64
    logits = torch.randn(rows, vocabulary) * 3
    batch, history, positions = batch_of([dataclasses.replace(row, seed=seed) for seed in range(rows)])
    best = math.inf
    for _ in range(5):
        copy = logits.clone()
        start = time.perf_counter()
        sampling.sample(copy, batch, history, positions)
        best = min(best, time.perf_counter() - start)
    assert best < 0.1  # 1 to 9 ms on one idle core; the margin is for busy machines
