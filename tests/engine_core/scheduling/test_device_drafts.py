"""Drafts of the executors' own in plans and results: asked for a step ahead, told where masks need them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.engine_core.scheduling.lifecycle import preempt
from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.engine_core.speculation.step_cost import KNOWN
from penstock.protocol.messages import Automaton, Finish
from penstock.protocol.steps import OWN_DRAFT, StepPlan
from tests.engine_core.scheduling.test_drafting import drafts, truth, wrong
from tests.engine_core.scheduling.test_masking import FREE
from tests.engine_core.scheduling.test_masking import truth as guided_truth
from tests.sim.executor import ints
from tests.sim.idle import is_idle
from tests.sim.lives import World
from tests.sim.server import ROOMY, Server

OWN = SpeculationOptions(method="draft_model", num_speculative_tokens=4)
FOUR = replace(ROOMY, speculation=OWN, skill=1.0)
PROMPT = [3, 4, 5]
Row = tuple[int, int, int, int]


def asked(plan: StepPlan | None) -> dict[int, Row]:
    """Slot → its row of `drafting`, without the slot: start, count, drafts, told."""
    assert plan is not None
    return {row[0]: tuple(row[1:]) for row in ints(plan.drafting, 5)}  # type: ignore[misc]


def submitted(world: World = FOUR, **fields: object) -> tuple[Server, int]:
    server = Server(world)
    return server, server.submit(PROMPT, **{"max_tokens": 20, **fields})  # type: ignore[arg-type]


def test_a_prompt_is_kept_up_with_and_drafted_behind_at_once() -> None:
    server, _ = submitted(replace(FOUR, budget=8))
    server.submit(list(range(20)), max_tokens=20)
    first = server.plan()
    assert asked(first) == {0: (0, 4, 4, 0), 1: (0, 5, 0, 0)}, "a chunk that does not sample has no drafts"
    second = server.plan()
    assert drafts(second) == {0: [OWN_DRAFT] * 3}, "half of the budget is the prompt's"
    assert asked(second)[1] == (5, 4, 0, 0)
    server.apply()
    server.run(2)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_right_drafts_take_a_fifth_of_the_steps(depth: int) -> None:
    server, number = submitted()
    steps = 0
    while server.scheduler.unfinished or server.results:
        while server.scheduler.in_flight < depth and server.plan() is not None:
            steps += 1
        server.apply()
    seen = server.seen(number)
    assert (seen.tokens, seen.finish) == (truth(), Finish.LENGTH)
    assert steps <= 1 + 4 + depth
    assert seen.drafted == (20 - (1 + 4), 0)
    assert server.executor.unseen == 0
    assert is_idle(server.scheduler)


def test_what_the_draft_model_lacks_is_what_it_was_not_given() -> None:
    server, _ = submitted()
    assert asked(server.plan()) == {0: (0, 4, 4, 0)}
    assert asked(server.plan()) == {0: (-2, 2, 4, 0)}, "the last draft and the token behind it"
    server.apply()
    server.apply()
    state = server.scheduler._state
    state.spec.device_drafts.choose_lengths = lambda slots, *_: np.zeros(len(slots), np.int64)  # type: ignore[method-assign]
    for lacking in (2, 3, 4):
        assert asked(server.step()) == {}
        assert state.spec.device_drafts.unseen[0] == lacking
    del state.spec.device_drafts.choose_lengths
    plan = server.step()
    assert asked(plan)[0][:2] == (-5, 5), "what it slept through"
    server.run(2)
    assert server.executor.unseen == 0


def test_fewer_may_be_verified_than_were_made() -> None:
    server, number = submitted(replace(FOUR, budget=3, slots=1))
    server.step()
    plan = server.step()
    assert drafts(plan) == {0: [OWN_DRAFT] * 2}, "no more than the budget holds"
    server.run(2)
    assert server.seen(number).tokens == truth()


@pytest.mark.parametrize(("skill", "least"), [(0.0, 0), (1.0, 10)])
def test_wrong_drafts_are_given_up_and_change_nothing(skill: float, least: int) -> None:
    server, number = submitted(replace(FOUR, skill=skill, max_model_len=200, blocks=64), max_tokens=100)
    server.executor._pace = 0.001  # a position costs a tenth of a step
    server.run(2)
    seen = server.seen(number)
    assert seen.tokens == truth(100)
    assert seen.drafted is not None
    assert seen.drafted[0] >= least
    assert skill or seen.drafted[1] < 40
    statistics = server.scheduler.statistics()
    assert statistics.draft_tokens == sum(seen.drafted)


def test_fixed_lengths_follow_nothing_that_is_measured() -> None:
    fixed = SpeculationOptions(method="draft_model", num_speculative_tokens=4, adaptive=False)
    server, number = submitted(replace(FOUR, speculation=fixed, skill=0.0))
    server.executor._pace = 0.001
    server.run(1)
    seen = server.seen(number)
    assert seen.tokens == truth()
    assert seen.drafted is not None
    assert seen.drafted[1] > 4 * (20 - 1 - 2 * 4), (
        "each step has all, as long as there is room for this one's and the next's"
    )


def test_a_request_may_do_without() -> None:
    server, number = submitted(speculate=False)
    assert asked(server.plan()) == {0: (0, 3, 0, 0)}, "its prompt may be somebody else's prefix"
    assert asked(server.plan()) == {}
    server.apply()
    server.run(2)
    assert server.seen(number).drafted is None


def test_predictions_go_before_and_drafts_take_over_where_they_are_lost() -> None:
    said = truth()
    server, number = submitted(prediction=[*said[:8], *[wrong(token) for token in said[8:]]])
    kinds = []
    while server.scheduler.unfinished:
        plan = server.step()
        kinds += ["own" if OWN_DRAFT in ids else "host" for ids in drafts(plan).values()]
    server.deliver()
    assert server.seen(number).tokens == said
    assert {"own", "host"} <= set(kinds)


def test_drafts_of_masked_rows_are_told_and_their_masks_follow_them() -> None:
    server, number = submitted(automaton=FREE, max_tokens=12)
    free = server.submit(PROMPT, max_tokens=12)
    plan = server.plan()
    assert {slot: row[3] for slot, row in asked(plan).items()} == {0: 1, 1: 0}
    assert len(ints(server.results[0].drafts)) == 4
    server.plan()
    flight = server.scheduler._state.steps.in_flight[1]
    (guided,) = flight.guided
    assert guided.drafts == [OWN_DRAFT] * 4, "not known yet"
    told = [token for (token,) in ints(server.results[0].drafts)]
    server.apply()
    assert guided.drafts == told
    server.run(2)
    assert (server.seen(number).tokens, server.seen(number).finish) == guided_truth(number, FREE)
    assert server.seen(free).tokens == truth(12, seed=2)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("source", ["1 100 0", "2 3 0", "3 8 0", "5 30 0"])
def test_an_output_follows_its_automaton(source: str, depth: int) -> None:
    automaton = Automaton(source=source)
    server, number = submitted(replace(FOUR, skill=0.8), automaton=automaton, max_tokens=12)
    server.run(depth)
    assert (server.seen(number).tokens, server.seen(number).finish) == guided_truth(number, automaton)


def test_blocks_are_there_for_what_is_drafted() -> None:
    server, number = submitted(replace(FOUR, block_size=1))
    plan = server.plan()
    assert len(ints(plan.blocks, 2)) == 4 + 1  # type: ignore[union-attr]
    server.apply()
    server.run(2)
    assert server.seen(number).tokens == truth()
    assert server.executor.unseen == 0


def test_without_blocks_there_are_no_drafts_and_nobody_waits() -> None:
    server, number = submitted(replace(FOUR, block_size=2))
    server.step()
    pool = server.scheduler._state.kv.pool
    lost = pool.take(pool.available)
    plan = server.plan()
    assert [row[2] for row in asked(plan).values()] in ([], [1], [2])
    pool.release(lost)
    server.apply()
    server.run(2)
    assert server.seen(number).tokens == truth()
    assert server.scheduler.statistics().preemptions == 0


def test_a_preempted_choice_begins_anew_and_keeps_what_was_accepted() -> None:
    server, number = submitted()
    server.step()
    server.plan()
    server.plan()
    state = server.scheduler._state
    (choice,) = [choice for choice in state.slots.sequences if choice is not None]
    preempt(state, choice)
    while server.results:
        assert server.scheduler.plan(0.0) is None
        server.apply()
    assert len(server.seen(number).tokens) == 11
    assert asked(server.plan())[0][0] >= 0, "its tokens are a prompt again"
    server.apply()
    server.run(2)
    assert server.seen(number).tokens == truth()


def test_a_new_epoch_forgets_what_was_drafted() -> None:
    server, number = submitted()
    server.step()
    server.plan()
    server.results.clear()
    server.scheduler.restart(5, 0.0)
    server.executor = server.new_executor(5)
    plan = server.plan()
    assert drafts(plan) == {}
    server.apply()
    server.run(2)
    assert server.seen(number).tokens == truth()


def test_choices_share_what_the_draft_model_has_seen_of_the_prompt() -> None:
    server = Server(replace(FOUR, block_size=2))
    number = server.submit([*PROMPT, 6, 7], n=3, max_tokens=12)
    server.run(2)
    assert server.executor.unseen == 0
    assert len({tuple(server.seen(number, choice).tokens) for choice in range(3)}) >= 1
    assert server.scheduler.statistics().accepted_tokens > 10


def test_what_decoding_slept_through_is_not_there_for_a_prefix_and_costs_nothing_but_guesses() -> None:
    server, number = submitted(replace(FOUR, block_size=2), speculate=False)
    server.run(2)
    said = server.seen(number).tokens
    server.submit([*PROMPT, *said], max_tokens=10)
    server.run(2)
    assert (server.seen(2).cached or 0) > 0
    assert server.executor.unseen > 0
    assert server.seen(2).tokens == truth(10, seed=2, prompt=[*PROMPT, *said])


def test_the_time_of_drafting_is_the_drafts_own() -> None:
    server, _ = submitted(max_tokens=40)
    server.executor._pace = 0.001
    server.plan()
    server.apply()
    state = server.scheduler._state
    cost = state.spec.device_drafts.cost
    assert not cost._classes
    for _ in range(4 + KNOWN):
        server.step()
    assert cost._classes, "behind a step with a chunk the prompt is kept up with, too"
    assert cost.seconds(1, 4) == pytest.approx(0.004)
    assert state.spec.device_drafts._of_all()[0] > 0.5
    server.run(2)


def test_an_end_inside_a_draft_is_the_end() -> None:
    said = truth()
    place = next(index for index in range(7, 20) if said[index] not in said[:index])
    server, number = submitted(stop_token_ids=(said[place],))
    server.run(2)
    seen = server.seen(number)
    assert (seen.tokens, seen.finish, seen.stop_token) == (said[: place + 1], Finish.STOP, said[place])
