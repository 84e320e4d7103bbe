"""Drafts in plans and results: upper bounds, corrections, ends within a draft, what is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.engine_core.scheduling.lifecycle import preempt
from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.protocol.messages import Finish, Sampling, StopHit
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import REJECTED, StepPlan, StepResult
from tests.sim.executor import ints
from tests.sim.idle import is_idle
from tests.sim.lives import World
from tests.sim.model import EOS, VOCAB, Nature, rollout
from tests.sim.server import ROOMY, Server

FOUR = replace(ROOMY, speculation=SpeculationOptions(num_speculative_tokens=4))
PROMPT = [3, 4, 5]


def truth(max_tokens: int = 20, seed: int = 1, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What request `seed` of a new server says to the prompt."""
    sampling = Sampling(seed=seed, max_tokens=max_tokens, ignore_eos=True, eos_token_ids=(EOS,))
    return rollout(list(prompt), sampling, seed, Nature(), 10**6)[0]


def drafts(plan: StepPlan | None) -> dict[int, list[int]]:
    """Slot → its drafts."""
    assert plan is not None
    ids, found, place = [token for (token,) in ints(plan.draft_ids)], {}, 0
    for slot, count in ints(plan.drafts, 2):
        found[slot] = ids[place : place + count]
        place += count
    assert place == len(ids)
    return found


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def predicting(world: World = FOUR, **fields: object) -> tuple[Server, int]:
    """A server with one request whose prediction is right."""
    server = Server(world)
    return server, server.submit(PROMPT, prediction=truth(), **{"max_tokens": 20, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_right_prediction_takes_a_fifth_of_the_steps(depth: int) -> None:
    server, number = predicting()
    steps = 0
    while server.scheduler.unfinished or server.results:
        while server.scheduler.in_flight < depth and server.plan() is not None:
            steps += 1
        server.apply()
    seen = server.seen(number)
    assert (seen.tokens, seen.finish) == (truth(), Finish.LENGTH)
    assert steps <= 1 + 4 + depth
    assert seen.drafted is not None
    assert seen.drafted[0] >= 20 - steps
    stand = server.scheduler.statistics()
    assert stand.accepted_tokens == seen.drafted[0] == sum(stand.accepted_at)
    assert stand.draft_tokens == sum(seen.drafted)
    assert stand.drafts <= steps
    assert is_idle(server.scheduler)


def test_drafts_begin_after_what_the_step_in_flight_will_say() -> None:
    server, _ = predicting()
    first, second, third = (server.plan() for _ in range(3))
    said = truth()
    assert drafts(first) == {}
    assert drafts(second) == {0: said[1:5]}
    assert drafts(third) == {0: said[6:10]}


def test_planned_is_the_most_there_can_be_and_is_put_right() -> None:
    server = Server(FOUR)
    said = truth()
    server.submit(PROMPT, prediction=[*said[:3], wrong(said[3]), *said[4:]], max_tokens=20)
    slots = server.scheduler._state.slots
    server.plan()
    server.plan()
    assert drafts_in_flight(server) == 4
    assert slots.num_computed_tokens[0] == 3 + 1 + 4
    server.apply()
    server.apply()  # two drafts accepted, then another token
    assert (slots.num_tokens[0], slots.num_computed_tokens[0]) == (3 + 1 + 3, 3 + 3)
    assert server.scheduler.check(thorough=True).ok
    server.run(2)
    assert server.seen(1).tokens == said


def drafts_in_flight(server: Server) -> int:
    return sum(flight.drafts.total for flight in server.scheduler._state.steps.in_flight if flight.drafts is not None)


def test_rejected_entries_are_no_tokens_and_their_columns_stay_aligned() -> None:
    server = Server(FOUR)
    said = [truth(seed=number) for number in (1, 2, 3)]
    server.submit(PROMPT, max_tokens=20, prediction=[wrong(token) for token in said[0]])
    server.submit(PROMPT, max_tokens=20)
    server.submit(PROMPT, max_tokens=20, prediction=said[2])
    server.plan()
    server.apply()
    plan = server.plan()
    assert {slot: len(ids) for slot, ids in drafts(plan).items()} == {2: 4}, "the first of them guesses wrongly"
    server.apply()
    assert [len(server.seen(number).tokens) for number in (1, 2, 3)] == [2, 2, 6]
    server.run(2)
    assert [server.seen(number).tokens for number in (1, 2, 3)] == said


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["stop", "eos", "length", "model"])
def test_an_end_inside_a_draft_is_the_end_and_the_rest_is_thrown_away(kind: str, depth: int) -> None:
    said = truth()
    place = next(index for index in range(7, 20) if said[index] not in said[:index])
    options: dict[str, object] = {"max_tokens": 20}
    world = FOUR
    if kind == "stop":
        options["stop_token_ids"] = (said[place],)
    elif kind == "eos":
        options |= {"eos_token_ids": (said[place],), "ignore_eos": False}
    elif kind == "length":
        options["max_tokens"] = place + 1
    else:
        world = replace(FOUR, max_model_len=len(PROMPT) + place + 1)
    server = Server(world)
    number = server.submit(PROMPT, prediction=[*said[:place], wrong(said[place]), 9, 9, 9], **options)  # type: ignore[arg-type]
    server.run(depth)
    seen = server.seen(number)
    assert seen.tokens == said[: place + 1]
    assert seen.finish == (Finish.STOP if kind in ("stop", "eos") else Finish.LENGTH)
    assert seen.stop_token == (said[place] if kind == "stop" else None)


def accepted(step: int, entries: list[int], busy: float = 0.0) -> StepResult:
    return StepResult(step=step, epoch=0, token_ids=np.array(entries, np.int32).tobytes(), busy=busy)


def test_tokens_after_an_end_do_not_count_and_their_drafts_are_rejected() -> None:
    server = Server(FOUR)
    number = server.submit(PROMPT, prediction=[10, 11, 12, 13, 14, 15], max_tokens=20, stop_token_ids=(12,))
    scheduler = server.scheduler
    scheduler.plan(0.0)
    scheduler.apply(accepted(1, [10]), 0.0)
    choice = scheduler._state.requests[number].sequences[0]
    assert choice.drafter is not None
    choice.drafter._ending = frozenset()  # as if the proposer did not know the stop id
    assert drafts(scheduler.plan(0.0)) == {0: [11, 12, 13, 14]}
    scheduler.apply(accepted(2, [11, 12, 13, 14, 15]), 0.0)
    seen = server.seen(number)
    assert (seen.tokens, seen.finish, seen.stop_token, seen.drafted) == ([10, 11, 12], Finish.STOP, 12, (2, 2))
    stand = scheduler.statistics()
    assert (stand.output_tokens, stand.surplus_tokens, stand.accepted_at) == (3, 3, [1, 1, 0, 0])
    assert is_idle(scheduler)


def test_non_finite_logits_behind_a_draft_end_the_row_with_the_tokens_before_them() -> None:
    server, number = predicting(fails_at=3)
    server.run(2)
    seen = server.seen(number)
    assert (seen.tokens, seen.finish) == (truth()[:3], Finish.ERROR)
    assert "non-finite" in str(seen.error)
    assert is_idle(server.scheduler)


def test_a_row_without_room_for_a_draft_waits_for_its_true_length_and_goes_on() -> None:
    """Two steps in flight might reach max_tokens; their drafts are rejected, so the row must run again."""
    server = Server(FOUR)
    said = truth(8)
    number = server.submit(PROMPT, max_tokens=8, prediction=[said[0], said[1], *[wrong(token) for token in said[2:]]])
    server.run(3)
    assert server.seen(number).tokens == said
    assert server.scheduler.statistics().surplus_tokens == 0


def test_drafts_cost_budget_and_leave_half_of_it_to_prompts() -> None:
    server = Server(replace(FOUR, budget=7, slots=4))
    server.submit(PROMPT, max_tokens=20, prediction=truth())
    server.step()
    server.submit([8] * 30)
    plan = server.step()
    assert {slot: len(ids) for slot, ids in drafts(plan).items()} == {0: 3}
    assert [count for _, _, count, _ in ints(plan.chunks, 4)] == [3]  # type: ignore[union-attr]
    server.run(2)


@pytest.mark.parametrize(("budget", "most"), [(8, 4), (3, 2), (2, 1), (1, 0)])
def test_no_step_is_larger_than_its_budget(budget: int, most: int) -> None:
    server = Server(replace(FOUR, budget=budget, slots=1))
    server.submit(PROMPT, max_tokens=20, prediction=truth())
    while not server.seen(1).tokens:
        server.step()
    assert sum(map(len, drafts(server.step()).values())) == most
    server.run(2)
    assert server.seen(1).tokens == truth()


def test_a_step_has_at_most_so_many_drafts() -> None:
    server = Server(replace(FOUR, speculation=SpeculationOptions(num_speculative_tokens=4, max_step_drafts=6)))
    for seed in (1, 2, 3):
        server.submit(PROMPT, max_tokens=20, prediction=truth(seed=seed))
    server.step()
    assert sum(map(len, drafts(server.step()).values())) == 6
    server.run(2)


def test_drafts_go_before_anybody_waits_for_a_block() -> None:
    server, number = predicting(replace(FOUR, block_size=2))
    other = server.submit([9], max_tokens=20)
    server.step()
    pool = server.scheduler._state.kv.pool
    lost = pool.take(pool.available - 1)
    plan = server.step()
    assert drafts(plan) == {}
    assert len(ints(plan.blocks, 2)) + pool.available == 1  # type: ignore[union-attr]
    pool.release(lost)
    assert drafts(server.step()) == {0: truth()[2:6]}
    server.run(2)
    assert server.scheduler.statistics().preemptions == 0
    assert [server.seen(one).tokens for one in (number, other)] == [truth(), truth(seed=2, prompt=[9])]


def test_drafts_stay_where_the_blocks_just_suffice() -> None:
    server, _ = predicting(replace(FOUR, block_size=2))
    server.submit([9], max_tokens=20)
    server.step()
    pool = server.scheduler._state.kv.pool
    pool.take(pool.available - 2)
    assert drafts(server.plan()) == {0: truth()[1:5]}
    assert pool.available == 0
    assert server.scheduler.statistics().preemptions == 0


def test_blocks_are_there_for_every_draft_even_when_a_row_needs_several() -> None:
    server, number = predicting(replace(FOUR, block_size=1))
    server.step()
    server.step()
    plan = server.plan()
    assert [slot for slot, _ in ints(plan.blocks, 2)] == [0] * 5  # type: ignore[union-attr]
    server.apply()
    server.run(2)
    assert server.seen(number).tokens == truth()


def test_blocks_of_tokens_that_count_are_sealed_and_no_others() -> None:
    server = Server(replace(FOUR, block_size=2))
    said = truth()
    server.submit(PROMPT, max_tokens=20, prediction=[*said[:2], *[wrong(token) for token in said[2:]]])
    server.plan()
    server.plan()
    server.apply()
    server.apply()
    choice = server.scheduler._state.slots.sequences[0]
    assert choice is not None
    assert choice.cached == (len(choice.tokens) - 1) // 2
    server.run(2)
    server.submit([*PROMPT, *said], max_tokens=1)
    server.run()
    assert server.seen(2).cached == 22


@pytest.mark.parametrize("applied", [0, 1])
def test_a_preempted_choice_keeps_the_drafts_that_were_accepted_in_flight(applied: int) -> None:
    server, number = predicting()
    server.step()
    server.plan()
    server.plan()
    for _ in range(applied):
        server.apply()
    state = server.scheduler._state
    (choice,) = [choice for choice in state.slots.sequences if choice is not None]
    preempt(state, choice)
    while server.results:
        assert server.scheduler.plan(0.0) is None
        server.apply()
    assert len(server.seen(number).tokens) == 11
    server.run(2)
    assert server.seen(number).tokens == truth()


def test_an_abort_with_drafts_in_flight_frees_what_they_touch_behind_the_fence() -> None:
    server, number = predicting()
    server.step()
    server.plan()
    server.plan()
    held = server.scheduler.statistics().pool.held
    server.scheduler.abort(number)
    assert server.scheduler.statistics().pool.held == held
    server.apply()
    assert server.scheduler.statistics().pool.held == held
    server.apply()
    assert server.scheduler.statistics().pool.held == 0
    seen = server.seen(number)
    assert (seen.finish, seen.tokens, seen.drafted) == (Finish.ABORT, truth()[:1], None)
    assert server.scheduler.statistics().surplus_tokens == 10
    assert is_idle(server.scheduler)


def test_a_new_epoch_forgets_the_drafts_in_flight() -> None:
    server, number = predicting()
    server.step()
    server.plan()
    server.plan()
    server.results.clear()
    server.scheduler.restart(5, 0.0)
    server.executor = server.new_executor(5)
    server.run(2)
    assert server.seen(number).tokens == truth()


def test_a_source_that_leaves_with_drafts_in_flight() -> None:
    server, _ = predicting()
    server.step()
    server.plan()
    server.scheduler.forget(0)
    server.apply()
    assert is_idle(server.scheduler)
    assert server.scheduler.undelivered() == ()


def test_a_stop_string_inside_a_draft_ends_the_choice_with_more_tokens_than_it_took() -> None:
    server, number = predicting()
    server.step()
    server.step()
    assert len(server.seen(number).tokens) == 6
    server.scheduler.stop_hit(StopHit(number, 0, 3))
    server.run(2)
    seen = server.seen(number)
    assert (seen.finish, seen.tokens, seen.drafted) == (Finish.STOP, truth()[:6], (4, 0))


def test_several_tokens_of_a_row_come_in_one_row_with_their_logprobs() -> None:
    server, number = predicting(logprobs=0)
    server.submit(PROMPT, max_tokens=20, logprobs=0)
    server.plan()
    server.apply()
    server.plan()
    result = server.results.popleft()
    server.scheduler.apply(result, 0.0)
    server.executor.applied(result.step)
    (batch,) = server.scheduler.outputs(0)
    assert isinstance(batch, TokenBatch)
    assert np.frombuffer(batch.counts, np.int32).tolist() == [5, 1]
    assert [len(extra.logprobs.ranks) // 4 for extra in batch.extras if extra.logprobs is not None] == [5, 1]
    server.record.take(batch)
    server.run(2)
    for life in server.lives.values():
        server.record.verify(life, server.world, aborted=False, stopped=False)
    assert server.seen(number).tokens == truth()


def test_steps_whose_delivery_was_late_are_merged_in_order() -> None:
    server, number = predicting()
    while server.scheduler.unfinished:
        server.plan()
        result = server.results.popleft()
        server.scheduler.apply(result, 0.0)
        server.executor.applied(result.step)
    (batch,) = server.scheduler.outputs(0)
    server.record.take(batch)
    assert server.seen(number).tokens == truth()
    assert server.seen(number).drafted is not None


def test_rows_of_different_sources_keep_their_tokens_apart() -> None:
    server = Server(FOUR)
    for seed in (1, 2, 3, 4):
        server.submit(PROMPT, max_tokens=20, prediction=truth(seed=seed) if seed != 3 else (), source=seed % 2)
    server.run(2)
    assert [server.seen(seed).tokens for seed in (1, 2, 3, 4)] == [truth(seed=seed) for seed in (1, 2, 3, 4)]


def test_who_does_not_want_drafts_has_none() -> None:
    server = Server(replace(FOUR, speculation=SpeculationOptions(method="ngram")))
    number = server.submit(PROMPT, max_tokens=20, period=2, prediction=truth(), speculate=False)
    server.run(2)
    assert server.scheduler.statistics().drafts == 0
    assert server.seen(number).drafted is None


def test_prompt_lookup_shortens_a_text_that_repeats_itself() -> None:
    steps = {}
    for method in ("none", "ngram"):
        server = Server(replace(FOUR, speculation=SpeculationOptions(method=method), max_model_len=200))
        number = server.submit(PROMPT, max_tokens=120, period=4)
        server.run(2)
        steps[method] = server.scheduler._state.steps.planned
        server.record.verify(server.lives[number], server.world, aborted=False, stopped=False)
    assert steps["ngram"] < 0.75 * steps["none"]


def test_drafts_that_never_come_true_are_hardly_sent_once_steps_have_a_cost() -> None:
    server = Server(FOUR)
    number = server.submit(PROMPT, max_tokens=60, prediction=[wrong(token) for token in truth(60)] * 2)
    server.run(1)
    assert server.seen(number).tokens == truth(60)
    assert server.scheduler.statistics().draft_tokens < 30


def test_a_device_whose_arithmetic_is_full_gets_no_drafts() -> None:
    """Busy time in proportion to positions: every draft costs as much as a row."""
    server = Server(FOUR)
    server.submit(PROMPT, max_tokens=60, prediction=[*truth(60)])
    scheduler, sent, step = server.scheduler, [], 0
    while (plan := scheduler.plan(0.0)) is not None:
        step += 1
        ids = drafts(plan).get(0, [])
        sent.append(len(ids))
        said = truth(60)[len(scheduler._state.requests[1].sequences[0].tokens) - 3 :]
        good = 0
        while good < len(ids) and ids[good] == said[good]:
            good += 1
        entries = said[: good + 1] + [REJECTED] * (len(ids) - good)
        scheduler.apply(accepted(step, entries, busy=0.01 * (1 + len(ids))), 0.0)
    assert server.seen(1).tokens == truth(60)
    assert sum(sent[-20:]) <= 4
    assert scheduler._state.spec.cost._steps > 20


@pytest.mark.skipif(not __debug__, reason="our own mistakes are told by assertions, which are off")
@pytest.mark.parametrize("entries", [[10, 11], [REJECTED, 1, 2, 3, 4]])
def test_a_result_of_another_shape_is_our_own_mistake(entries: list[int]) -> None:
    server, _ = predicting()
    server.step()
    server.plan()
    with pytest.raises(AssertionError):
        server.scheduler.apply(accepted(2, entries), 0.0)


@pytest.mark.parametrize("stop_strings", [False, True])
def test_rows_tell_what_became_of_drafts_where_a_stop_string_may_end_the_choice(stop_strings: bool) -> None:
    """The tokenizer ends such a choice by itself, so it must know; the others are told once, with their last row."""
    server = Server(FOUR)
    said = truth()
    server.submit(PROMPT, max_tokens=20, prediction=[*said[:7], wrong(said[7])], stop_strings=stop_strings)
    found = []
    while server.scheduler.unfinished:
        server.plan()
        server.scheduler.apply(server.results.popleft(), 0.0)
        for batch in server.scheduler.outputs(0):
            assert isinstance(batch, TokenBatch)
            found += [(extra.drafted, Finish(batch.finish[extra.row])) for extra in batch.extras if extra.drafted]
    last = found[-1]
    assert last[1] == Finish.LENGTH
    assert last[0] is not None
    assert last[0][0] >= 4
    if not stop_strings:
        assert len(found) == 1
        return
    assert len(found) > 1
    assert [finish for _, finish in found[:-1]] == [Finish.NONE] * (len(found) - 1)
    sums = [sum(drafted or ()) for drafted, _ in found]
    assert sums == sorted(sums)
