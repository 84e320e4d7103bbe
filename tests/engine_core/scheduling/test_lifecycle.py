"""How lives end from outside, and what they leave behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.engine_core.scheduling.lifecycle import preempt
from penstock.protocol.messages import Automaton, Finish, StopHit, Written
from tests.sim.idle import is_idle
from tests.sim.server import ROOMY, Server, chunks

STEM = [7, 3, 9, 4, 8, 5, 6, 2]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_an_abort_frees_blocks_and_slot_with_the_last_step_that_touches_them(ahead: int) -> None:
    server = Server()
    number = server.submit(STEM, max_tokens=20)
    server.step()
    for _ in range(ahead):
        server.plan()
    server.scheduler.abort(number)
    assert server.seen(number).finish == Finish.ABORT
    assert server.scheduler.unfinished == 0
    for _ in range(ahead):
        assert server.scheduler.statistics().pool.held > 0
        assert not is_idle(server.scheduler)
        assert server.plan() is None
        server.apply()
    assert server.scheduler.statistics().pool.held == 0
    assert is_idle(server.scheduler)
    assert server.scheduler.statistics().surplus_tokens == ahead


def test_an_abort_ends_every_choice_also_those_not_begun() -> None:
    server = Server(replace(ROOMY, budget=8))
    number = server.submit(STEM * 2, n=5)
    server.step()
    server.scheduler.abort(number)
    server.scheduler.abort(number)
    server.scheduler.abort(4711)
    assert [server.seen(number, choice).finish for choice in range(5)] == [Finish.ABORT] * 5
    assert server.scheduler.statistics().aborted == 5
    assert is_idle(server.scheduler)


def test_a_waiting_request_can_be_aborted() -> None:
    server = Server(replace(ROOMY, slots=1))
    running, waiting = server.submit([3]), server.submit([4])
    server.step()
    server.scheduler.abort(waiting)
    assert server.seen(waiting).finish == Finish.ABORT
    assert server.seen(waiting).tokens == []
    server.run()
    assert len(server.seen(running).tokens) == 4


def test_a_stop_string_ends_one_choice_as_stopped() -> None:
    server = Server()
    number = server.submit(STEM, n=2, max_tokens=9)
    for _ in range(3):
        server.step()
    server.plan()
    server.scheduler.stop_hit(StopHit(number, 1, 1))
    server.scheduler.stop_hit(StopHit(number, 1, 1))
    server.scheduler.stop_hit(StopHit(number, 7, 1))
    server.scheduler.stop_hit(StopHit(99, 0, 1))
    server.run(2)
    assert server.seen(number, 1).finish == Finish.STOP
    assert server.seen(number, 0).finish == Finish.LENGTH
    assert len(server.seen(number, 0).tokens) == 9


def test_a_stop_string_in_tokens_that_nobody_has_seen_is_ignored() -> None:
    server = Server()
    number = server.submit(STEM, n=2, max_tokens=4)
    server.plan()
    for tokens in (0, 1, 5):
        server.scheduler.stop_hit(StopHit(number, 0, tokens))
    server.run()
    assert [len(server.seen(number, choice).tokens) for choice in (0, 1)] == [4, 4]


def test_a_source_that_is_gone_leaves_nothing_behind() -> None:
    server = Server()
    stays = server.submit([3], source=1)
    for token in (4, 5):
        server.submit([token], source=2, n=2)
    server.submit([], source=2)
    server.plan()
    server.scheduler.forget(2)
    assert server.scheduler.undelivered() == ()
    server.run()
    assert list(server.record.seen) == [(stays, 0)]
    assert server.record.rejected == {}
    server.scheduler.forget(2)


def test_decoded_blocks_are_named_when_their_choice_leaves_even_if_their_turn_had_not_come() -> None:
    server = Server(replace(ROOMY, slots=100, budget=800, blocks=1000))
    numbers = [server.submit([token % 60, token // 60, 5], max_tokens=2) for token in range(100)]
    server.run()  # 100 rows fill their first block with their last step; 64 of them are named in it
    seen = [server.seen(number).tokens for number in numbers]
    again = [server.submit([token % 60, token // 60, 5, *seen[token]][:6], max_tokens=1) for token in range(100)]
    server.run()
    assert [server.seen(number).cached for number in again] == [4] * 100


def test_decoded_blocks_are_found_while_their_choice_runs() -> None:
    server = Server(replace(ROOMY, slots=4, budget=64, blocks=100))
    number = server.submit(STEM, max_tokens=40)
    for _ in range(16):
        server.step()
    tokens = [*STEM, *server.seen(number).tokens]
    again = server.submit(tokens, max_tokens=1)
    server.step()
    assert server.scheduler.statistics().running == 1
    assert server.seen(again).cached == (len(tokens) - 1) // 4 * 4


def test_content_of_a_failed_sequence_is_not_found() -> None:
    server = Server()
    failed = server.submit(STEM, fails_at=1)
    server.run()
    assert server.seen(failed).finish == Finish.ERROR
    server.submit(STEM)
    assert [start for _, start, _, _ in chunks(server.step())] == [0]


def test_a_preempted_choice_finds_its_own_blocks_again() -> None:
    server = Server()
    number = server.submit(STEM, max_tokens=12)
    for _ in range(6):
        server.step()
    state = server.scheduler._state
    (choice,) = [choice for choice in state.slots.sequences if choice is not None]
    preempt(state, choice)
    assert server.scheduler.statistics().preemptions == 1
    assert chunks(server.step()) == [(0, 12, 2, 1)]
    server.run(2)
    server.record.verify(server.lives[number], server.world, aborted=False, stopped=False)
    assert server.seen(number).cached == 0


def test_a_preempted_choice_resumes_only_after_its_tokens_in_flight() -> None:
    server = Server()
    number = server.submit(STEM, max_tokens=12)
    for _ in range(3):
        server.plan()
    state = server.scheduler._state
    (choice,) = [choice for choice in state.slots.sequences if choice is not None]
    preempt(state, choice)
    for _ in range(3):
        assert server.plan() is None, "its tokens are not all known"
        server.apply()
    assert len(server.seen(number).tokens) == 3
    server.run(3)
    server.record.verify(server.lives[number], server.world, aborted=False, stopped=False)


def test_a_preempted_choice_that_ends_with_a_token_in_flight_never_runs_again() -> None:
    server = Server()
    number = server.submit(STEM, max_tokens=2)
    server.plan()
    server.plan()
    state = server.scheduler._state
    (choice,) = [choice for choice in state.slots.sequences if choice is not None]
    preempt(state, choice)
    server.apply()
    server.apply()
    assert server.seen(number).finish == Finish.LENGTH
    assert is_idle(server.scheduler)


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def test_a_request_that_another_scheduler_had_begun_goes_on_where_each_choice_stood() -> None:
    first = Server()
    first.submit(STEM, n=4, max_tokens=9, temperature=1.0, logprobs=0, prompt_logprobs=0)
    first.run()
    whole = [first.seen(1, choice).tokens for choice in range(4)]
    second = Server()
    cuts = (3, 0, 8)
    written = tuple(Written(packed(tokens[:cut])) for tokens, cut in zip(whole, cuts, strict=False))
    second.submit(
        STEM, n=4, max_tokens=9, temperature=1.0, logprobs=0, prompt_logprobs=0,
        written=(*written, Written(packed(whole[3]), ended=True)),
    )  # fmt: skip
    second.run(2)
    for choice, cut in enumerate(cuts):
        seen = second.seen(1, choice)
        assert seen.tokens == whole[choice][cut:]
        assert seen.finish == Finish.LENGTH
        assert len(seen.scores) == 9 - cut
        assert (seen.cached is None) == bool(cut)
        assert seen.prompt_scores is None
    assert (1, 3) not in second.record.seen
    assert second.scheduler.statistics().finished == 3


def test_a_guide_takes_what_was_written_and_one_that_cannot_ends_its_choice() -> None:
    automaton = Automaton(source="5 30 0")
    first = Server()
    first.submit(STEM, max_tokens=8, automaton=automaton)
    first.run()
    whole = first.seen(1).tokens
    second = Server()
    second.submit(STEM, max_tokens=8, automaton=automaton, written=(Written(packed(whole[:4])),))
    second.submit(STEM, max_tokens=8, automaton=Automaton(source="5 30 2"), written=(Written(packed(whole[:4])),))
    second.run()
    assert second.seen(1).tokens == whole[4:]
    assert (second.seen(2).tokens, second.seen(2).finish) == ([], Finish.GRAMMAR)
