"""The face of the scheduler: epochs, late delivery, statistics; and the same tokens whatever the server looks like."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.protocol.messages import Finish
from tests.sim.idle import is_idle
from tests.sim.images import Illustrated
from tests.sim.lives import World, random_life
from tests.sim.server import ROOMY, Server
from tests.sim.simulation import Simulation


def test_a_new_epoch_recomputes_what_ran_and_loses_no_token() -> None:
    server = Server()
    numbers = [server.submit([token, 5, 6, 7, 8], max_tokens=9, n=2) for token in (3, 4)]
    for _ in range(3):
        server.step()
    server.plan()
    server.plan()
    stale = list(server.results)
    server.results.clear()
    server.executor = server.new_executor(1)
    server.scheduler.restart(1, 0.0)
    assert server.scheduler.in_flight == 0
    for result in stale:
        server.scheduler.apply(result, 0.0)
    stand = server.scheduler.statistics()
    assert (stand.epoch, stand.stale_results, stand.running, stand.waiting) == (1, 2, 0, 4)
    assert (stand.pool.held, stand.pool.idle) == (0, 0)
    server.run(2)
    for number in numbers:
        server.record.verify(server.lives[number], server.world, aborted=False, stopped=False)


def test_a_new_epoch_with_fewer_blocks_fails_only_what_cannot_fit() -> None:
    server = Server(replace(ROOMY, blocks=16))
    large = server.submit([3] * 8, max_tokens=50, n=3)
    small = server.submit([4] * 8, max_tokens=5)
    server.step()
    server.executor = server.new_executor(1, blocks=4)
    server.results.clear()
    server.scheduler.restart(1, 0.0, blocks=4)
    server.run(2)
    assert [server.seen(large, choice).finish for choice in range(3)] == [Finish.ERROR] * 3
    assert len(server.seen(small).tokens) == 5
    assert server.scheduler.statistics().pool.total == 4


def test_when_nobody_will_compute_them_all_requests_fail_and_say_why() -> None:
    server = Server(replace(ROOMY, slots=1))
    running, waiting = server.submit([3], n=3), server.submit([4])
    server.plan()
    server.scheduler.fail("no executor")
    seen = [*[server.seen(running, choice) for choice in range(3)], server.seen(waiting)]
    assert [(one.finish, one.error) for one in seen] == [(Finish.UNAVAILABLE, "no executor")] * 4
    server.apply()
    assert is_idle(server.scheduler)
    assert server.scheduler.statistics().failed == 4


def test_statistics_add_up() -> None:
    server = Server()
    numbers = [server.submit([token] * 5, n=2) for token in (3, 4)]
    server.submit([])
    stand = server.scheduler.statistics()
    assert (stand.waiting, stand.requests, stand.rejected, stand.prompt_tokens) == (2, 2, 1, 10)
    server.plan()
    assert server.scheduler.in_flight == server.scheduler.statistics().in_flight == 1
    server.run()
    stand = server.scheduler.statistics()
    assert (stand.finished, stand.output_tokens, stand.requests) == (4, 16, 0)
    assert stand.scheduled_tokens == 2 * (5 + 3) + 2 * (1 + 3)
    assert stand.reused_tokens == 2 * 4
    assert stand.pool.free + stand.pool.idle == stand.pool.total
    assert len(numbers) == 2


def test_the_drain_rate_is_that_of_the_last_seconds() -> None:
    server = Server()
    for second in range(60):
        server.scheduler.expire(float(second))
        server.submit([3], max_tokens=1)
        plan = server.scheduler.plan(float(second))
        assert plan is not None
        server.scheduler.apply(server.executor.run(plan)[0], float(second))
        server.executor.applied(plan.step)
    assert server.scheduler.statistics().drain_rate == pytest.approx(1.0, rel=0.15)
    assert len(server.scheduler._state.stats.totals.ends) < 50


@pytest.mark.skipif(not __debug__, reason="our own mistakes are told by assertions, which are off")
@pytest.mark.parametrize(
    "wrong",
    [{"blocks": 0}, {"max_num_batched_tokens": 7}, {"policy": "lifo"}, {"max_model_len": 1}, {"expected_share": 2.0}],
)
def test_options_that_make_no_sense_are_our_own_mistake(wrong: dict[str, int | str]) -> None:
    options = {
        "blocks": 4,
        "block_size": 4,
        "max_model_len": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "vocab_size": 9,
    }
    SchedulingOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        SchedulingOptions(**{**options, **wrong})  # type: ignore[arg-type]


def delivered(world: World, seed: int) -> dict[tuple[int, int], tuple[list[int], Finish]]:
    rng = random.Random(seed)
    stems = [Illustrated([rng.randrange(64) for _ in range(40)], ()) for _ in range(3)]
    lives = [random_life(rng, replace(ROOMY, max_model_len=40), stems, number, number / 8) for number in range(60)]
    lives = [replace(life, abort_after=None, stop_at=None) for life in lives]
    outcome = Simulation(world, lives, random.Random(seed)).run()
    return {key: (seen.tokens, seen.finish) for key, seen in outcome.record.seen.items()}


def test_the_same_tokens_whatever_the_server_looks_like() -> None:
    plain = World(blocks=600, block_size=16, slots=64, budget=8192, max_model_len=40, depth=1)
    expected = delivered(plain, 5)
    assert len(expected) >= 60
    for depth, budget, caching, size in itertools.product((1, 2), (16, 64, 8192), (True, False), (8, 16, 32)):
        world = replace(plain, depth=depth, budget=budget, prefix_caching=caching, block_size=size, slots=16)
        assert delivered(world, 5) == expected
    for depth, careless in itertools.product((1, 2, 3), (True, False)):
        tiny = replace(plain, depth=depth, block_size=4, blocks=11, careless=careless, restarts=0.02, policy="priority")
        assert delivered(tiny, 5) == expected
    alone = replace(plain, slots=1, budget=1)
    assert delivered(alone, 5) == expected
