"""Drafts change no token, whatever is guessed; masks forbid what allowed_token_ids would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from penstock.engine_core.execution.model_runner import Runner
from penstock.engine_core.models.decoder import Decoder
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import REJECTED, StepMasks, StepPlan, StepResult
from tests.engine_core.execution.harness import (
    GREEDY,
    VOCABULARY,
    Life,
    block_tables,
    column,
    decode,
    prefill,
    tiny_model,
    tiny_runner,
    tokens_of,
)
from tests.engine_core.execution.test_same_tokens import lives, outputs

STEPS = 14
Guess = Callable[[list[int], int, np.random.Generator], list[int]]  # what will be said, how many, chance


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


@pytest.fixture(scope="module")
def plain(model: Decoder) -> list[list[int]]:
    found = lives()
    runner = tiny_runner(model, blocks=200)
    prefill(runner, found)
    decode(runner, found, STEPS + 8)
    return outputs(found)


def right(said: list[int], count: int, _: np.random.Generator) -> list[int]:
    return said[:count]


def wrong(said: list[int], count: int, _: np.random.Generator) -> list[int]:
    return [(token + 1) % VOCABULARY for token in said[:count]]


def half(said: list[int], count: int, _: np.random.Generator) -> list[int]:
    good = count // 2
    return [*said[:good], *((token + 1) % VOCABULARY for token in said[good:count])]


def any_number(said: list[int], count: int, chance: np.random.Generator) -> list[int]:
    """None up to `count`, each right four times in five."""
    drafts = said[: chance.integers(0, count + 1)]
    return [token if chance.random() < 0.8 else int(chance.integers(VOCABULARY)) for token in drafts]


def drafted(
    runner: Runner, found: Sequence[Life], said: Sequence[list[int]], guess: Guess, count: int, depth: int
) -> int:
    """Decode under drafts until each life has STEPS tokens more; how many steps that took.

    Plans leave before the results of the steps before them are read, as with a scheduler that guessed as well.
    """
    chance = np.random.default_rng(count)
    at = [len(life.output) for life in found]  # tokens that each will have before the next step
    on = column(*(life.slot for life in found))
    flight, steps = [], 0
    while min(at) < STEPS or flight:
        if min(at) < STEPS and len(flight) < depth:
            guesses = [guess(tokens[place:], count, chance) for tokens, place in zip(said, at, strict=True)]
            for row, (tokens, drafts) in enumerate(zip(said, guesses, strict=True)):
                hits = [ours == theirs for ours, theirs in zip(drafts, tokens[at[row] :], strict=False)]
                at[row] += 1 + (hits.index(False) if False in hits else len(hits))
            pairs = [(life.slot, len(drafts)) for life, drafts in zip(found, guesses, strict=True) if drafts]
            plan = StepPlan(
                step=steps, epoch=0, decode_on=on if steps == 0 else b"", drafts=column(*np.ravel(pairs).astype(int)),
                draft_ids=column(*(token for drafts in guesses for token in drafts)),
            )  # fmt: skip
            flight.append((guesses, runner.launch(plan)))
            steps += 1
        else:
            guesses, launched = flight.pop(0)
            take(found, guesses, runner.collect(launched))
    return steps


def take(found: Sequence[Life], guesses: Sequence[list[int]], result: StepResult) -> None:
    tokens = tokens_of(result)
    for life, drafts in zip(found, guesses, strict=True):
        entries, tokens = tokens[: 1 + len(drafts)], tokens[1 + len(drafts) :]
        kept = entries.index(REJECTED) if REJECTED in entries else len(entries)
        assert all(token == REJECTED for token in entries[kept:])
        assert entries[: kept - 1] == drafts[: kept - 1]
        life.output += entries[:kept]
    assert tokens == []


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("guess", [right, wrong, half, any_number])
def test_drafts_change_no_token(model: Decoder, plain: list[list[int]], guess: Guess, count: int, depth: int) -> None:
    """Greedy and seeded-sampled rows, with penalties, bad words, biases and minimum lengths, side by side."""
    found = lives()
    runner = tiny_runner(model, blocks=200)
    prefill(runner, found)
    steps = drafted(runner, found, plain, guess, count, depth)
    assert [output[:STEPS] for output in outputs(found)] == [output[:STEPS] for output in plain]
    if guess is right:
        assert steps == -(-(STEPS - 1) // (count + 1))
    if guess is wrong:
        assert steps == STEPS - 1
        assert runner.statistics().rejected == steps * count * len(found)


def test_plain_steps_go_on_where_drafts_ended(model: Decoder, plain: list[list[int]]) -> None:
    found = lives()
    runner = tiny_runner(model, blocks=200)
    prefill(runner, found)
    drafted(runner, found, plain, any_number, 3, 2)
    shortest = min(len(output) for output in outputs(found))
    decode(runner, found, 4)
    assert all(output[: len(said)] == said[: len(output)] for output, said in zip(outputs(found), plain, strict=True))
    assert min(len(output) for output in outputs(found)) == shortest + 4


def test_logprobs_of_drafted_entries_are_those_of_plain_steps(model: Decoder) -> None:
    way = Sampling(temperature=0.0, logprobs=2)
    first = Life([3, 1, 4, 1, 5], way, blocks=range(1, 17))
    runner = tiny_runner(model)
    prefill(runner, [first])
    expected = []
    for step in range(3):
        result = runner.collect(runner.launch(StepPlan(step=step, epoch=0, decode_on=column(0))))
        first.output += tokens_of(result)
        expected += [np.frombuffer(row.logprobs.values, "<f4") for row in result.logprobs]
    again = Life(first.prompt, way, blocks=range(17, 33))
    runner = tiny_runner(model)
    prefill(runner, [again])
    plan = StepPlan(
        step=0, epoch=0, decode_on=column(0), drafts=column(0, 3),
        draft_ids=column(first.output[1], first.output[2], (first.output[3] + 1) % VOCABULARY),
    )  # fmt: skip
    result = runner.collect(runner.launch(plan))
    assert tokens_of(result) == [*first.output[1:4], REJECTED]
    assert [row.row for row in result.logprobs] == [0, 1, 2]
    assert all(
        np.allclose(np.frombuffer(row.logprobs.values, "<f4"), values, atol=1e-4)
        for row, values in zip(result.logprobs, expected, strict=True)
    )


def mask(*allowed: int) -> bytes:
    bits = np.zeros(-(-VOCABULARY // 32) * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("way", [GREEDY, Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.8, top_k=9)])
def test_a_mask_is_what_allowed_tokens_are(model: Decoder, way: Sampling) -> None:
    """Step by step, beside a row that is free; a mask that stands already is named alone."""
    allowed = tuple(range(10, 40, 3))
    tables = block_tables(2, 16)
    asked = Sampling(temperature=way.temperature, top_p=way.top_p, top_k=way.top_k, allowed_token_ids=allowed)
    ways = asked, way
    found = [Life([5, 17, 2], one, slot=at, blocks=tables[at]) for at, one in enumerate(ways)]
    runner = tiny_runner(model)
    prefill(runner, found)
    decode(runner, found, 6)

    masked = [Life([5, 17, 2], way, slot=at, blocks=tables[at]) for at in range(2)]
    runner = tiny_runner(model)
    chunks = column(0, 0, 3, 1, 1, 0, 3, 1)
    plan = StepPlan(step=0, epoch=0, starts=tuple(life.start() for life in masked), chunks=chunks, masked=column(0))
    for step in range(7):
        begun = runner.begin(plan)
        fresh = (column(9), mask(*allowed)) if step == 0 else (b"", b"")
        masks = StepMasks(step=step, epoch=0, entries=column(0), slots=column(9), new_slots=fresh[0], bits=fresh[1])
        for life, token in zip(masked, tokens_of(runner.collect(runner.finish(begun, masks))), strict=True):
            life.output.append(token)
        plan = StepPlan(step=step + 1, epoch=0, decode_on=column(0, 1) if step == 0 else b"", masked=column(0))
    assert outputs(masked) == outputs(found)
    assert set(masked[0].output) <= set(allowed)
    assert not set(masked[1].output) <= set(allowed)


def test_each_entry_of_a_draft_has_its_own_mask(model: Decoder) -> None:
    life = Life([5, 17, 2], GREEDY, blocks=range(1, 17))
    runner = tiny_runner(model)
    prefill(runner, [life])
    plan = StepPlan(
        step=0, epoch=0, decode_on=column(0), drafts=column(0, 2), draft_ids=column(20, 30), masked=column(0)
    )
    masks = StepMasks(
        step=0, epoch=0, entries=column(0, 1, 2), slots=column(3, 1, 2), new_slots=column(1, 2, 3),
        bits=mask(30) + mask(40) + mask(20),
    )  # fmt: skip
    assert tokens_of(runner.collect(runner.finish(runner.begin(plan), masks))) == [20, 30, 40]


def test_a_mask_that_allows_nothing_fails_its_row_alone(model: Decoder) -> None:
    tables = block_tables(2, 16)
    found = [Life([5, 17, 2], GREEDY, slot=at, blocks=tables[at]) for at in range(2)]
    runner = tiny_runner(model)
    prefill(runner, found)
    plan = StepPlan(step=0, epoch=0, decode_on=column(0, 1), masked=column(1))
    masks = StepMasks(step=0, epoch=0, entries=column(1), slots=column(0), new_slots=column(0), bits=mask())
    tokens = tokens_of(runner.collect(runner.finish(runner.begin(plan), masks)))
    assert tokens[0] >= 0
    assert tokens[1] == -1
    assert runner.statistics().failed == 1
