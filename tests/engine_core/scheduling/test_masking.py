"""Masked rows: named in the plan, worked on once as soon as their state is known, and what their guides end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.engine_core.scheduling.lifecycle import preempt
from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.engine_core.scheduling.plan_builder import MaskWork
from penstock.protocol.errors import GrammarFailure
from penstock.protocol.messages import Automaton, Finish, Sampling
from penstock.protocol.steps import StepPlan, StepResult, choice_seed
from tests.sim.executor import ints
from tests.sim.grammar import FakeGuide
from tests.sim.idle import is_idle
from tests.sim.model import EOS, Nature, rollout
from tests.sim.server import ROOMY, Server

PROMPT = [3, 4, 5]
FREE = Automaton(source="1 100 0")
LONG = 12


def masked(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [slot for (slot,) in ints(plan.masked)]


def truth(number: int, automaton: Automaton, choice: int = 0, **sampling: object) -> tuple[list[int], Finish]:
    options = {"max_tokens": LONG, "ignore_eos": True, "eos_token_ids": (EOS,), "seed": number, **sampling}
    given = Sampling(**options)  # type: ignore[arg-type]
    return rollout(PROMPT, given, choice_seed(number, choice), Nature(), 10**6, FakeGuide(automaton))


class Bench(Server):
    """A server whose executor is played by hand."""

    def answer(self, tokens: list[int], step: int) -> None:
        self.scheduler.apply(StepResult(step=step, epoch=0, token_ids=np.array(tokens, np.int32).tobytes()), 0.0)


def works(server: Server) -> list[MaskWork]:
    found = []
    while (work := server.scheduler.mask_work()) is not None:
        found.append(work)
    return found


def all_allowed(seed: int = 1) -> Automaton:
    """An automaton that begins after a token that never comes: nothing is masked, everything is guided."""
    return Automaton(source=f"{seed} 100 0", after=b"\xff\xff\xff\x7f")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("source", ["1 100 0", "2 3 0", "3 8 0", "4 1 0", "5 30 0"])
def test_an_output_follows_its_automaton(source: str, depth: int) -> None:
    automaton = Automaton(source=source)
    server = Server()
    number = server.submit(PROMPT, max_tokens=LONG, automaton=automaton)
    free = server.submit(PROMPT, max_tokens=LONG)
    server.run(depth)
    seen = server.seen(number)
    assert (seen.tokens, seen.finish) == truth(number, automaton)
    alone = Server()
    alone.submit([9], max_tokens=1)
    same = alone.submit(PROMPT, max_tokens=LONG)
    alone.run()
    assert server.seen(free).tokens == alone.seen(same).tokens


def test_the_work_of_a_first_step_is_there_with_its_plan_and_of_the_next_with_the_result() -> None:
    server = Bench()
    server.submit(PROMPT, max_tokens=LONG, automaton=FREE)
    assert works(server) == []
    assert masked(server.scheduler.plan(0.0)) == [0]
    (first,) = works(server)
    assert (first.step, first.epoch, [(row.drafts, row.entry) for row in first.rows]) == (1, 0, [([], 0)])
    assert masked(server.scheduler.plan(0.0)) == [0]
    assert works(server) == [], "its guide has not taken the token in flight"
    guide = first.rows[0].guide
    server.answer(sorted(guide.allowed())[:1], 1)  # type: ignore[attr-defined]
    (second,) = works(server)
    assert (second.step, second.rows[0].guide) == (2, guide)


def test_a_newcomers_masks_do_not_wait_for_a_step_that_it_is_not_in() -> None:
    server = Bench()
    server.submit(PROMPT, max_tokens=LONG)
    server.scheduler.plan(0.0)
    server.submit([9, 9], max_tokens=LONG, automaton=FREE)
    assert masked(server.scheduler.plan(0.0)) == [1]
    (work,) = works(server)
    assert (work.step, work.rows[0].entry) == (2, 1)


def test_a_chunk_that_does_not_sample_is_not_masked() -> None:
    server = Server(replace(ROOMY, budget=8))
    server.submit(list(range(20)), automaton=FREE)
    assert [masked(server.step()) for _ in range(3)] == [[], [], [0]]
    server.run(2)


def test_only_guided_rows_are_masked_and_entries_count_drafts() -> None:
    server = Server()
    said, _ = rollout(PROMPT, Sampling(seed=1, max_tokens=9), 1, Nature(), 99)
    server.submit(PROMPT, max_tokens=LONG, prediction=said)
    server.submit([6], max_tokens=LONG, automaton=FREE)
    server.step()
    plan = server.scheduler.plan(0.0)
    assert plan is not None
    assert plan.drafts
    assert masked(plan) == [1]
    (work,) = works(server)
    (drafted,) = [count for slot, count in ints(plan.drafts, 2) if slot == 0]
    assert work.rows[0].entry == 1 + drafted


def test_forced_runs_are_drafts_with_their_entries_masked() -> None:
    """Over many automata a run of forced tokens takes fewer steps, and what is said does not change."""
    saved = 0
    for source in range(40):
        automaton = Automaton(source=f"{source} 30 0")
        server = Server()
        number = server.submit(PROMPT, max_tokens=LONG, automaton=automaton)
        steps = 0
        while server.scheduler.unfinished:
            while server.scheduler.in_flight < 2 and server.plan() is not None:
                steps += 1
            server.apply()
        while server.results:
            server.apply()
        said, finish = truth(number, automaton)
        assert (server.seen(number).tokens, server.seen(number).finish) == (said, finish)
        saved += len(said) + 1 - steps
    assert saved > 20


def test_every_choice_has_a_guide_of_its_own() -> None:
    server = Server()
    number = server.submit(PROMPT, n=3, max_tokens=LONG, automaton=FREE)
    server.run(2)
    for choice in range(3):
        seen = server.seen(number, choice)
        assert (seen.tokens, seen.finish) == truth(number, FREE, choice)
    assert len({tuple(server.seen(number, choice).tokens) for choice in range(3)}) > 1


def test_an_end_of_sequence_is_taken_where_it_ends_the_request() -> None:
    automaton = Automaton(source="2 3 0")
    for ignoring in (False, True):
        server = Server()
        number = server.submit(PROMPT, max_tokens=LONG, automaton=automaton, ignore_eos=ignoring)
        server.run(2)
        seen = server.seen(number)
        assert seen.finish == Finish.STOP
        assert (seen.tokens[-1] == EOS) is not ignoring
        assert len(seen.tokens) == (3 if ignoring else 4)


def test_a_complete_structure_ends_where_min_tokens_keeps_the_end_away() -> None:
    server = Server()
    number = server.submit(PROMPT, max_tokens=LONG, min_tokens=9, automaton=Automaton(source="2 3 0"), ignore_eos=False)
    server.run(2)
    seen = server.seen(number)
    assert (seen.finish, len(seen.tokens)) == (Finish.STOP, 3)


def test_max_tokens_inside_a_structure_is_a_length() -> None:
    server = Server()
    number = server.submit(PROMPT, max_tokens=2, automaton=FREE)
    server.run(2)
    assert server.seen(number).finish == Finish.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_a_guide_that_fails_ends_its_request_and_no_other(depth: int) -> None:
    server = Server()
    good = server.submit([9], max_tokens=LONG)
    bad = server.submit(PROMPT, max_tokens=LONG, automaton=Automaton(source="1 100 4"))
    other = server.submit(PROMPT, max_tokens=LONG, automaton=Automaton(source="1 100 0"))
    server.run(depth)
    seen = server.seen(bad)
    assert seen.finish == Finish.GRAMMAR
    assert seen.error == "made to fail"
    assert seen.tokens == truth(bad, Automaton(source="1 100 0"))[0][:3]
    assert server.seen(other).tokens == truth(other, FREE)[0]
    assert len(server.seen(good).tokens) == LONG
    assert is_idle(server.scheduler)


def test_rows_that_have_ended_need_no_mask_and_the_step_still_gets_its_message() -> None:
    server = Bench()
    number = server.submit(PROMPT, max_tokens=LONG, automaton=FREE, speculate=False)
    server.scheduler.plan(0.0)
    (first,) = works(server)
    server.scheduler.plan(0.0)
    server.scheduler.abort(number)
    server.answer([sorted(first.rows[0].guide.allowed())[0]], 1)  # type: ignore[attr-defined]
    (second,) = works(server)
    assert (second.step, second.rows) == (2, ())
    server.answer([7], 2)
    assert is_idle(server.scheduler)


def test_a_row_that_ends_with_the_token_before_needs_no_mask() -> None:
    server = Bench()
    server.submit(PROMPT, max_tokens=LONG, automaton=FREE, speculate=False)
    server.scheduler.plan(0.0)
    assert len(works(server)) == 1
    server.scheduler.plan(0.0)
    server.scheduler.follow(StepResult(step=1, epoch=0, token_ids=np.array([-1], np.int32).tobytes()))
    (second,) = works(server)
    assert (second.step, second.rows) == (2, ())


def test_a_row_whose_structure_has_not_begun_is_masked() -> None:
    """Its output may not end yet, and the token in flight may bind it after the plan has left."""
    automaton = Automaton(source="1 100 0", after=(9).to_bytes(4, "little"))
    server = Bench()
    server.submit(PROMPT, max_tokens=LONG, automaton=automaton)
    assert masked(server.scheduler.plan(0.0)) == [0]
    assert [len(work.rows) for work in works(server)] == [1]
    server.scheduler.plan(0.0)
    server.answer([9], 1)
    (work,) = works(server)
    assert [row.guide.bound for row in work.rows] == [True]


def test_a_row_sits_out_while_its_guide_is_elsewhere() -> None:
    server = Server()
    server.submit(PROMPT, max_tokens=LONG)
    server.submit(PROMPT, max_tokens=LONG, automaton=FREE, speculate=False)
    server.step()
    server.step()
    (guide,) = [choice.guide for choice in server.scheduler._state.slots.sequences if choice and choice.guide]
    guide.seconds = 1.0
    assert masked(server.step()) == [1]
    guide.lent = True
    assert masked(server.step()) == [], "another output has brought its mask; and it is not called meanwhile"
    assert server.scheduler.late_masks() == []
    guide.lent = False
    assert masked(server.step()) == [1]
    server.run()


@pytest.mark.parametrize("applied", [0, 1])
def test_a_preempted_choice_goes_on_under_its_guide(applied: int) -> None:
    server = Server()
    number = server.submit(PROMPT, max_tokens=LONG, automaton=FREE)
    server.step()
    server.plan()
    server.plan()
    for _ in range(applied):
        server.apply()
    state = server.scheduler._state
    (choice,) = [choice for choice in state.slots.sequences if choice is not None]
    preempt(state, choice)
    server.mask()
    while server.results:
        server.apply()
    plan = server.plan()
    assert masked(plan) == [choice.slot], "the chunk that recomputes it samples"
    server.run(2)
    assert (server.seen(number).tokens, server.seen(number).finish) == truth(number, FREE)


def test_a_new_epoch_begins_with_the_tokens_that_were_taken() -> None:
    server = Server()
    number = server.submit(PROMPT, max_tokens=LONG, automaton=FREE)
    server.step()
    server.scheduler.plan(0.0)
    server.scheduler.plan(0.0)
    server.scheduler.restart(3, 0.0)
    assert server.scheduler.mask_work() is None
    server.executor = server.new_executor(3)
    server.run(2)
    assert (server.seen(number).tokens, server.seen(number).finish) == truth(number, FREE)


def test_what_the_automaton_allows_is_said_as_without_it() -> None:
    plain, guided = Server(), Server(replace(ROOMY, speculation=SpeculationOptions(method="ngram")))
    plain.submit(PROMPT, max_tokens=40, period=3)
    guided.submit(PROMPT, max_tokens=40, period=3, automaton=all_allowed())
    plain.run(2)
    guided.run(2)
    assert guided.seen(1).tokens == plain.seen(1).tokens
    assert guided.scheduler.statistics().accepted_tokens > 5


def test_a_guide_is_never_called_while_its_masks_are_filled() -> None:
    guide = FakeGuide(FREE)
    guide.lent = True
    with pytest.raises(AssertionError):
        guide.forced()
    guide.lent = False
    with pytest.raises(GrammarFailure):
        FakeGuide(Automaton(source="1 100 1")).advance([sorted(guide.allowed())[0]])
