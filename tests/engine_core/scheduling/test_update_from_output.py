"""What results mean: ends, surplus tokens, extras, sources."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.scheduling.outbox import joined
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.scheduling.state import Chunk, Drafts, InFlightStep
from penstock.engine_core.scheduling.update_from_output import attach_logprobs, collect_prompt_logprobs
from penstock.engine_core.speculation import acceptance
from penstock.protocol.messages import Finish, Sampling, SubmitTokens
from penstock.protocol.outputs import Logprobs, TokenBatch, TokenExtra
from penstock.protocol.steps import RowLogprobs, StepResult, choice_seed
from tests.engine_core.grammar.vocabulary import automaton, tokens
from tests.sim.idle import is_idle
from tests.sim.lives import scheduling_options
from tests.sim.model import EOS, VOCAB, Nature, rollout
from tests.sim.record import Record
from tests.sim.server import ROOMY, Server

OPTIONS = scheduling_options(replace(ROOMY, slots=16))


def tokens_of(server: Server, number: int, choice: int = 0) -> list[int]:
    """What the model gives when nothing ends it but max_tokens."""
    life = server.lives[number]
    seed = choice_seed(life.message.sampling.seed, choice)
    return rollout(life.prompt, life.message.sampling, seed, Nature(life.nature.root), 10**6)[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_id_ends_its_choice_and_the_surplus_is_thrown_away(depth: int) -> None:
    plain = Server()
    wanted = tokens_of(plain, plain.submit([3, 4, 5], max_tokens=9))
    place = next(index for index in range(2, 9) if wanted[index] not in wanted[:index])
    server = Server()
    number = server.submit([3, 4, 5], max_tokens=9, stop_token_ids=(wanted[place],))
    server.run(depth)
    seen = server.seen(number)
    assert (seen.tokens, seen.finish, seen.stop_token) == (wanted[: place + 1], Finish.STOP, wanted[place])
    assert server.scheduler.statistics().surplus_tokens == min(depth - 1, 8 - place)


def test_an_end_of_sequence_is_kept_in_the_ids_and_names_no_stop_token() -> None:
    plain = Server()
    wanted = tokens_of(plain, plain.submit([3, 4, 5], max_tokens=9))
    server = Server()
    number = server.submit([3, 4, 5], max_tokens=9, eos_token_ids=(wanted[0], VOCAB + 5), ignore_eos=False)
    server.run(2)
    seen = server.seen(number)
    assert (seen.tokens, seen.finish, seen.stop_token) == (wanted[:1], Finish.STOP, None)
    assert server.scheduler.statistics().output_tokens == 1


def test_below_min_tokens_nothing_stops() -> None:
    server = Server()
    number = server.submit([3], max_tokens=6, min_tokens=4, stop_token_ids=tuple(range(2, VOCAB)), temperature=0.0)
    state = server.scheduler._state
    for step in range(1, 6):
        state_plan = server.scheduler.plan(0.0)
        assert state_plan is not None
        result = StepResult(step=step, epoch=0, token_ids=np.array([7], np.int32).tobytes())
        server.scheduler.apply(result, 0.0)
        assert server.seen(number).finish == (Finish.STOP if step == 4 else Finish.NONE)
        if step == 4:
            break
    assert not state.requests


def test_a_row_that_is_not_finite_fails_alone() -> None:
    server = Server()
    numbers = [server.submit([token, 4, 5], max_tokens=6, fails_at=2 if token == 4 else -1) for token in (3, 4, 5)]
    server.run(2)
    good, bad, fine = [server.seen(number) for number in numbers]
    assert (bad.finish, len(bad.tokens)) == (Finish.ERROR, 2)
    assert "non-finite" in str(bad.error)
    for seen, number in ((good, numbers[0]), (fine, numbers[2])):
        assert (seen.tokens, seen.finish) == (tokens_of(server, number), Finish.LENGTH)
    stand = server.scheduler.statistics()
    assert (stand.finished, stand.failed, stand.aborted) == (2, 1, 0)


def test_what_a_failed_row_computed_is_not_found_again() -> None:
    server = Server()
    server.submit([3] * 12, fails_at=1)
    server.run(2)
    number = server.submit([3] * 12)
    server.run()
    assert server.seen(number).cached == 0


def test_one_choice_fails_and_its_siblings_go_on() -> None:
    server = Server()
    number = server.submit([3, 4, 5], n=3, max_tokens=5)
    server.plan()
    server.plan()
    first = server.results.popleft()
    server.scheduler.apply(StepResult(step=first.step, epoch=0, token_ids=np.array([-1], np.int32).tobytes()), 0.0)
    server.executor.applied(first.step)
    server.run(2)
    assert server.seen(number, 0).finish == Finish.ERROR
    for choice in (1, 2):
        assert server.seen(number, choice).tokens == tokens_of(server, number, choice)


def test_logprobs_and_prompt_logprobs_survive_late_delivery_and_chunks() -> None:
    server = Server(replace(ROOMY, budget=8))
    number = server.submit(list(range(3, 23)), logprobs=0, prompt_logprobs=0, n=2, max_tokens=6)
    one = server.submit([5], logprobs=0, prompt_logprobs=0)
    while server.scheduler.unfinished:
        assert server.plan() is not None
        result = server.results.popleft()
        server.scheduler.apply(result, 0.0)
        server.executor.applied(result.step)
    server.deliver()
    assert server.seen(one).prompt_scores == []
    for life in server.lives.values():
        server.record.verify(life, server.world, aborted=False, stopped=False)
    assert number in server.lives


def test_each_source_gets_its_own_rows() -> None:
    server = Server()
    numbers = [server.submit([token], source=token, max_tokens=3) for token in (3, 4, 4)]
    server.plan()
    result = server.results.popleft()
    server.scheduler.apply(result, 0.0)
    assert sorted(server.scheduler.undelivered()) == [3, 4]
    (three,) = server.scheduler.outputs(3)
    (four,) = server.scheduler.outputs(4)
    assert isinstance(three, TokenBatch)
    assert isinstance(four, TokenBatch)
    assert np.frombuffer(three.ids, np.int64).tolist() == numbers[:1]
    assert np.frombuffer(four.ids, np.int64).tolist() == numbers[1:]
    assert [extra.cached_tokens for extra in (*three.extras, *four.extras)] == [0, 0, 0]
    assert server.scheduler.outputs(5) == []


def test_results_of_another_epoch_are_discarded() -> None:
    server = Server()
    number = server.submit([3, 4])
    server.plan()
    server.scheduler.apply(replace_epoch(server.results[0], 7), 0.0)
    assert server.scheduler.in_flight == 1
    assert server.scheduler.statistics().stale_results == 1
    server.run()
    assert len(server.seen(number).tokens) == 4


def replace_epoch(result: StepResult, epoch: int) -> StepResult:
    return StepResult(step=result.step, epoch=epoch, token_ids=result.token_ids)


@pytest.mark.skipif(not __debug__, reason="our own mistakes are told by assertions, which are off")
def test_results_out_of_order_are_our_own_mistake() -> None:
    server = Server()
    server.submit([3, 4])
    server.plan()
    server.plan()
    with pytest.raises(AssertionError):
        server.scheduler.apply(server.results[1], 0.0)


def test_the_end_of_one_does_not_end_another_that_ignores_it() -> None:
    server = Server()
    ignoring = server.submit([3], max_tokens=1)
    caring = server.submit([4], max_tokens=5, ignore_eos=False)
    server.scheduler.plan(0.0)
    answer = StepResult(step=1, epoch=0, token_ids=np.array([EOS, EOS], np.int32).tobytes())
    server.scheduler.apply(answer, 0.0)
    assert server.seen(ignoring).finish == Finish.LENGTH
    assert server.seen(caring).finish == Finish.STOP
    assert is_idle(server.scheduler)


def made_logprobs(first: int, count: int) -> Logprobs:
    """Of positions `first`.., whose numbers tell them apart."""
    places = np.arange(first, first + count)
    return Logprobs(
        2,
        np.stack((places, places + 100), 1).astype(np.int32).tobytes(),
        np.stack((places, places + 100), 1).astype(np.float32).tobytes(),
        places.astype(np.int32).tobytes(),
    )


@pytest.mark.parametrize("start", [0, 3, 5, 6, 12])
def test_positions_of_a_recomputed_prompt_that_were_scored_before_count_once(start: int) -> None:
    """Chunks are cut elsewhere the second time. What leaves a gap, or brings nothing new, is not taken."""
    server = Server(replace(ROOMY, budget=8))
    server.submit([*range(3, 23)], prompt_logprobs=1)
    server.plan()
    state = server.scheduler._state
    (choice,) = [choice for choice in state.slots.sequences if choice is not None]
    choice.prompt_logprobs.parts, choice.prompt_logprobs.positions = [made_logprobs(0, 5)], 5
    chunk = Chunk(choice, start, 7, sample=False)
    flight = InFlightStep(9, state.slots.decoding(), (chunk,))
    part = RowLogprobs(0, made_logprobs(start, 7))
    collect_prompt_logprobs(flight, StepResult(step=9, epoch=0, token_ids=b"", prompt_logprobs=(part,)))
    scores = joined(choice.prompt_logprobs.parts)
    assert scores is not None
    expected = max(5, start + 7) if start <= 5 else 5
    assert choice.prompt_logprobs.positions == expected
    assert scores == made_logprobs(0, expected)


def test_log_probabilities_behind_a_choices_end_are_not_told() -> None:
    """Of the first row's three entries two count, of the second's two one."""
    lane = Server().scheduler._state.slots.decoding()
    drafts = Drafts(np.array([0, 1]), np.array([2, 1]), [[7, 7], [7]], np.zeros(2, bool))
    parts = tuple(RowLogprobs(entry, made_logprobs(entry, 1)) for entry in range(5))
    extras: dict[int, TokenExtra] = {}
    result = StepResult(step=1, epoch=0, token_ids=b"", logprobs=parts)
    attach_logprobs(InFlightStep(1, lane, (), drafts), result, np.array([2, 1], np.int32), extras)
    assert extras[0].logprobs == made_logprobs(0, 2)
    assert extras[1].logprobs == made_logprobs(3, 1)


def test_many_guided_rows_end_where_each_of_them_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are followed together, the second time through states that are known: by a limit, a stop id, a token that no
    mask allowed, a row that is not finite, an abort."""
    monkeypatch.setattr(acceptance, "HOPED", 0.0)  # none looks for likely tokens
    scheduler, record = Scheduler(msgspec.structs.replace(OPTIONS, vocab_size=tokens().width)), Record()
    pattern = automaton("regex", "[abc]{60}")
    origin = Guide(tokens(), pattern)
    said = [tokens().single[byte] for byte in b"abcacb" * 10]
    stop, wrong = tokens().single[b"c"[0]], tokens().single[b"z"[0]]
    for first in (100, 200):
        for row in range(14):
            stops = (stop,) if row == 10 else ()
            sampling = Sampling(max_tokens=6 + row, ignore_eos=True, seed=row, stop_token_ids=stops)
            prompt = np.array([3, 4, 5, row], np.int32).tobytes()
            message = SubmitTokens(id=first + row, token_ids=prompt, sampling=sampling, automaton=pattern)
            scheduler.submit(message, 0, 0.0, origin.copy())
        for place in range(20):
            plan = scheduler.plan(0.0)
            while scheduler.mask_work() is not None:
                pass
            if plan is None:
                break
            numbers = [each.request.message.id - first for each in scheduler._state.steps.in_flight[-1].batch.sequences]
            odd = {11: wrong, 12: -1} if place == 3 else {}
            entries = np.array([odd.get(number, said[place]) for number in numbers], np.int32)
            scheduler.apply(StepResult(step=plan.step, epoch=0, token_ids=entries.tobytes()), 0.0)
            if place == 4:
                scheduler.abort(first + 13)
            for given in scheduler.outputs(0):
                record.take(given)
        assert not scheduler.unfinished
        seen = [record.seen[first + row, 0] for row in range(14)]
        assert [len(each.tokens) for each in seen] == [*range(6, 16), 3, 3, 3, 5]
        assert [each.finish for each in seen[:10]] == [Finish.LENGTH] * 10
        assert [each.finish for each in seen[10:]] == [Finish.STOP, Finish.GRAMMAR, Finish.ERROR, Finish.ABORT]
