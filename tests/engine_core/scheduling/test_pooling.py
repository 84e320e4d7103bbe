"""Requests that pool: prompt-only rows of the same steps, and how each ends with its vector."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.messages import Finish, Pooling
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import StepPlan
from tests.sim.executor import ints
from tests.sim.idle import is_idle
from tests.sim.model import VOCAB, cells
from tests.sim.server import ROOMY, Server

LAST, MEAN = Pooling(kind="last"), Pooling(kind="mean")
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11]


def chunks(plan: StepPlan | None) -> list[list[int]]:
    assert plan is not None
    return ints(plan.chunks, 4)


def vector(prompt: list[int], *, whole: bool) -> list[float]:
    return [cells(0, prompt)[-1] % 9973, len(prompt) if whole else 0]


def test_its_last_chunk_does_not_sample_and_brings_the_vector() -> None:
    server = Server(replace(ROOMY, budget=8, slots=2))
    number = server.submit(PROMPT, pooling=MEAN)
    assert [row[1:] for row in chunks(server.step())] == [[0, 8, 0]]
    assert server.seen(number).finish == Finish.NONE
    assert [row[1:] for row in chunks(server.step())] == [[8, 1, 0]]
    seen = server.seen(number)
    assert (seen.tokens, seen.finish, seen.cached, seen.vector) == ([], Finish.STOP, 0, vector(PROMPT, whole=True))
    assert is_idle(server.scheduler)
    stand = server.scheduler.statistics()
    assert (stand.finished, stand.output_tokens, stand.surplus_tokens, stand.prompt_tokens) == (1, 0, 0, 9)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_shares_steps_with_those_that_generate(depth: int) -> None:
    server = Server(replace(ROOMY, budget=16))
    writers = [server.submit([token, 4, 5], max_tokens=6) for token in (20, 21)]
    pooled = [server.submit(PROMPT[: 3 + token], pooling=MEAN) for token in range(5)]
    server.run(depth)
    for token, number in enumerate(pooled):
        assert server.seen(number).vector == vector(PROMPT[: 3 + token], whole=True)
    alone = Server()
    again = [alone.submit([token, 4, 5], max_tokens=6) for token in (20, 21)]
    alone.run()
    assert [server.seen(n).tokens for n in writers] == [alone.seen(n).tokens for n in again]


@pytest.mark.parametrize(("kind", "reused"), [("last", 8), ("logits", 8), ("mean", 0), ("cls", 0)])
def test_only_a_last_position_may_begin_behind_the_cache(kind: str, reused: int) -> None:
    server = Server()
    server.submit(PROMPT)
    server.run()
    number = server.submit(PROMPT, pooling=Pooling(kind=kind, tokens=(1,) if kind == "logits" else ()))
    plan = server.step()
    assert [row[1:] for row in chunks(plan)] == [[reused, len(PROMPT) - reused, 0]]
    assert server.seen(number).cached == reused


def test_what_it_computed_is_found_by_others() -> None:
    server = Server()
    server.submit(PROMPT, pooling=MEAN)
    server.run()
    number = server.submit(PROMPT)
    server.run()
    assert server.seen(number).cached == 8


def test_equal_prompts_that_need_every_position_do_not_wait_for_each_other() -> None:
    server = Server(replace(ROOMY, budget=8, slots=4))
    for _ in range(2):
        server.submit(PROMPT[:4], pooling=MEAN)
    assert [row[1:] for row in chunks(server.plan())] == [[0, 4, 0], [0, 4, 0]]
    server.apply()
    server.run()


def test_an_abort_ends_it_and_its_vector_is_thrown_away() -> None:
    server = Server()
    number = server.submit(PROMPT, pooling=LAST)
    server.plan()
    server.scheduler.abort(number)
    server.apply()
    seen = server.seen(number)
    assert (seen.finish, seen.vector) == (Finish.ABORT, None)
    assert is_idle(server.scheduler)


def test_a_vector_that_is_not_finite_fails_alone() -> None:
    server = Server()
    bad = server.submit(PROMPT, pooling=LAST, fails_at=0)
    good = server.submit(PROMPT[:5], pooling=LAST)
    server.run()
    assert server.seen(bad).finish == Finish.ERROR
    assert "non-finite" in str(server.seen(bad).error)
    assert server.seen(good).vector == vector(PROMPT[:5], whole=False)
    assert server.scheduler.statistics().failed == 1


def test_a_new_epoch_begins_its_prompt_again() -> None:
    server = Server(replace(ROOMY, budget=8, slots=2))
    number = server.submit(PROMPT, pooling=MEAN)
    server.step()
    server.plan()
    server.results.clear()
    server.scheduler.restart(1, 0.0)
    server.executor = server.new_executor(1)
    server.run()
    assert server.seen(number).vector == vector(PROMPT, whole=True)


def test_each_source_gets_its_own_and_a_step_to_a_message() -> None:
    server = Server(replace(ROOMY, budget=8, slots=8))
    numbers = [server.submit([5 + place, 6, 7, 8], pooling=LAST, source=place % 2) for place in range(4)]
    scheduler: Scheduler = server.scheduler
    for _ in range(2):
        plan = scheduler.plan(0.0)
        assert plan is not None
        (result,) = server.executor.run(plan)
        scheduler.apply(result, 0.0)
        server.executor.applied(result.step)
    assert set(scheduler.undelivered()) == {0, 1}
    batches = scheduler.outputs(0)
    assert len(batches) == 2
    for batch in batches:
        assert isinstance(batch, TokenBatch)
        assert len(batch.extras) == len(batch.finish) == 1
        server.record.take(batch)
    (first,) = scheduler.outputs(1, limit=1)
    server.record.take(first)
    server.deliver()
    for place, number in enumerate(numbers):
        assert server.seen(number).vector == vector([5 + place, 6, 7, 8], whole=False)


def test_a_prompt_of_the_whole_length_is_pooled_and_a_longer_one_refused() -> None:
    server = Server()
    fits = server.submit([1 + place % 9 for place in range(64)], pooling=Pooling(kind="mean", param="input[3]"))
    longer = server.submit([1] * 65, pooling=Pooling(kind="mean", param="input[3]"))
    server.run()
    assert server.seen(fits).finish == Finish.STOP
    refused = server.record.rejected[longer]
    assert (refused.param, refused.code) == ("input[3]", "context_length_exceeded")


def test_what_cannot_be_pooled_is_refused() -> None:
    server = Server()
    several = server.submit(PROMPT, pooling=LAST, n=2)
    unknown = server.submit(PROMPT, pooling=Pooling(kind="logits", tokens=(VOCAB,)))
    server.deliver()
    assert set(server.record.rejected) == {several, unknown}


def test_it_teaches_the_forecast_nothing() -> None:
    server = Server(replace(ROOMY, expected_share=1.0))
    for _ in range(20):
        server.submit(PROMPT, pooling=LAST)
    server.run()
    assert server.scheduler._state.forecast.share(0) == 1.0
