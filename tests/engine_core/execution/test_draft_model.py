"""Drafts of the device's own change no token, whatever draft model makes them; a good one has them accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine_core import loading
from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import OWN_DRAFT, REJECTED, StepPlan, StepResult
from tests.engine_core.execution.harness import (
    GREEDY,
    LENGTH,
    Life,
    block_tables,
    column,
    decode,
    prefill,
    tiny_model,
    tiny_runner,
    tiny_spec,
    tokens_of,
)
from tests.engine_core.execution.test_same_tokens import lives, outputs

STEPS = 14
MOST = 4


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


@pytest.fixture(scope="module")
def twin(model: Decoder) -> Draft:
    """The model itself: it guesses everything right."""
    return Draft(model, tiny_spec(), MOST)


@pytest.fixture(scope="module")
def stranger() -> Draft:
    other = registry.build(tiny_spec(), torch.float32, torch.device("cpu"), LENGTH)
    with torch.inference_mode():
        loading.load(other, Path(), "dummy", seed=11)
    return Draft(other, tiny_spec(), MOST)


@pytest.fixture(scope="module")
def plain(model: Decoder) -> list[list[int]]:
    found = lives()
    runner = tiny_runner(model, blocks=200)
    prefill(runner, found)
    decode(runner, found, STEPS + 2 * MOST)
    return outputs(found)


def drafting_runner(model: Decoder, draft: Draft) -> Runner:
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=200, block_size=8, max_model_len=LENGTH, max_num_seqs=8
    )
    return Runner(model, tiny_spec(), options, draft)


@dataclass
class Bench:
    """Lives that decode with drafts of the device's own."""

    runner: Runner
    lives: Sequence[Life]
    step: int = 0
    entries: int = 0  # of drafts
    accepted: int = 0

    def prefill(self, count: int, budget: int = 1000) -> None:
        """Every prompt in chunks of `budget`, through the draft model too; `count` drafts behind its end."""
        for life in self.lives:
            starts: tuple[object, ...] = (life.start(),)
            for first in range(0, len(life.prompt), budget):
                size = min(budget, len(life.prompt) - first)
                last = first + size == len(life.prompt)
                row = (life.slot, first, size + (last and count > 0), count if last else 0, 0)
                plan = StepPlan(
                    step=self.step, epoch=0, starts=starts, chunks=column(life.slot, first, size, last),  # type: ignore[arg-type]
                    drafting=column(*row),
                )  # fmt: skip
                starts = ()
                result = self.launch(plan)
            life.output += tokens_of(result)

    def launch(self, plan: StepPlan) -> StepResult:
        self.step += 1
        return self.runner.collect(self.runner.launch(plan))

    def decode(self, carried: int, lacking: int, count: int, *, told: bool = False) -> StepResult:
        """One step: every row carries so many drafts, and has `count` made behind it."""
        slots = [life.slot for life in self.lives]
        rows = [(slot, -lacking, lacking, count, told) for slot in slots]
        plan = StepPlan(
            step=self.step, epoch=0, decode_on=column(*slots) if self.step else b"",
            drafts=column(*np.ravel([(slot, carried) for slot in slots])) if carried else b"",
            draft_ids=column(*[OWN_DRAFT] * carried * len(slots)),
            drafting=column(*np.ravel(rows)) if count else b"",
        )  # fmt: skip
        result = self.launch(plan)
        lines = np.array(tokens_of(result)).reshape(len(slots), 1 + carried)
        for life, line in zip(self.lives, lines.tolist(), strict=True):
            new = [token for token in line if token != REJECTED]
            self.entries += carried
            self.accepted += len(new) - 1
            life.output += new
        return result


def same(bench: Bench, plain: list[list[int]]) -> bool:
    return all(
        life.output[: len(said)] == said[: len(life.output)] for life, said in zip(bench.lives, plain, strict=True)
    )


@pytest.mark.sweep
@pytest.mark.parametrize("count", [1, 2, MOST])
@pytest.mark.parametrize("budget", [7, 1000])
def test_a_twin_guesses_right_and_a_stranger_changes_nothing(
    model: Decoder, twin: Draft, stranger: Draft, plain: list[list[int]], count: int, budget: int
) -> None:
    """Greedy and sampled, with filters, penalties, biases, bad words, minimum lengths and log-probabilities. Only
    penalties on the drafts themselves make a twin miss: it does not count what it has guessed."""
    for draft, least in ((twin, 0.85), (stranger, 0.0)):
        bench = Bench(drafting_runner(model, draft), lives())
        bench.prefill(count, budget)
        while min(len(life.output) for life in bench.lives) < STEPS:
            bench.decode(count, 2, count)
        assert same(bench, plain)
        assert bench.accepted >= least * bench.entries
        assert draft is twin or bench.accepted < 0.5 * bench.entries


def test_a_greedy_twin_guesses_everything(model: Decoder, twin: Draft) -> None:
    tables = block_tables(2, 16)
    bench = Bench(
        drafting_runner(model, twin),
        [Life([5, 17, at], GREEDY, slot=at, blocks=tables[at]) for at in range(2)],
    )
    bench.prefill(MOST)
    for _ in range(8):
        bench.decode(MOST, 2, MOST)
    assert bench.accepted == bench.entries == 8 * 2 * MOST


@pytest.mark.parametrize("carried", [0, 1, 3])
def test_fewer_drafts_may_be_verified_than_were_made(
    model: Decoder, twin: Draft, plain: list[list[int]], carried: int
) -> None:
    bench = Bench(drafting_runner(model, twin), lives())
    bench.prefill(MOST)
    for _ in range(4):
        bench.decode(carried, 1 + carried, MOST)
    assert same(bench, plain)
    assert {len(life.output) for life in bench.lives} >= {1 + 4 * (1 + carried)}


def test_what_the_draft_model_slept_through_is_caught_up(model: Decoder, twin: Draft) -> None:
    """Without the positions in between its next guesses would be blind."""
    found = {}
    for lacking in (2, 10):
        tables = block_tables(4, 16)
        bench = Bench(
            drafting_runner(model, twin),
            [Life([5, 17, 30 + at], GREEDY, slot=at, blocks=tables[at]) for at in range(4)],
        )
        bench.prefill(0)
        for _ in range(8):
            bench.decode(0, 0, 0)
        bench.decode(0, lacking, MOST)
        bench.decode(MOST, 2, MOST)
        found[lacking] = bench.accepted
    assert found[10] == 4 * MOST
    assert found[2] < 4 * MOST


def test_told_drafts_are_those_that_the_next_step_verifies(model: Decoder, twin: Draft) -> None:
    tables = block_tables(3, 16)
    ways = GREEDY, Sampling(temperature=1.0), Sampling(temperature=0.8, top_p=0.9)
    bench = Bench(
        drafting_runner(model, twin),
        [Life([5, 17, at], ways[at], seed=at, slot=at, blocks=tables[at]) for at in range(3)],
    )
    bench.prefill(0)
    told = np.frombuffer(bench.decode(0, 2, MOST, told=True).drafts, "<i4").reshape(3, MOST)
    before = [len(life.output) for life in bench.lives]
    bench.decode(MOST, 2, MOST)
    assert [life.output[at : at + MOST] for life, at in zip(bench.lives, before, strict=True)] == told.tolist()
    assert bench.decode(MOST, 2, 2).drafts == b""


def test_drafts_leave_no_trace_in_what_the_slots_have_seen(model: Decoder, twin: Draft, plain: list[list[int]]) -> None:
    """Penalty counts are of outputs alone, and a step without drafts goes on as if none had been made."""
    bench = Bench(drafting_runner(model, twin), lives())
    bench.prefill(MOST)
    history = bench.runner._slots.history
    counts, known = history.counts.clone(), history.known.clone()
    bench.runner.draft(bench.runner.finish(bench.runner.begin(StepPlan(step=0, epoch=0)), None))
    assert torch.equal(history.counts, counts)
    assert torch.equal(history.known, known)
    for _ in range(5):
        bench.decode(0, 0, 0)
    assert same(bench, plain)


def test_a_draft_model_that_is_broken_costs_its_drafts_alone(model: Decoder, plain: list[list[int]]) -> None:
    broken = registry.build(tiny_spec(), torch.float32, torch.device("cpu"), LENGTH)
    with torch.inference_mode():
        for destination in broken.destinations().values():
            assert destination.tensor is not None
            destination.tensor.fill_(float("nan"))
    bench = Bench(drafting_runner(model, Draft(broken, tiny_spec(), MOST)), lives())
    bench.prefill(MOST)
    for _ in range(4):
        bench.decode(MOST, 2, MOST)
    assert same(bench, plain)
