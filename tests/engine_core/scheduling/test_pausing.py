"""Pauses: which requests run on, which wait and which end, and when a pause holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.protocol.control import PauseMode
from penstock.protocol.messages import Finish, Pooling
from penstock.protocol.steps import StepPlan
from tests.sim.idle import is_idle
from tests.sim.lives import PLAIN
from tests.sim.server import ROOMY, Server

STEM = [7, 3, 9, 4, 8, 5, 6, 2]
SPECULATIVE = SpeculationOptions(method="ngram", num_speculative_tokens=4)


def undisturbed(prompt: list[int], tokens: int, **options: object) -> list[int]:
    server = Server()
    number = server.submit(prompt, max_tokens=tokens, **options)  # type: ignore[arg-type]
    server.run()
    return server.seen(number).tokens


def change(server: Server, version: str | None) -> None:
    server.scheduler.freeze(frozen=True)
    server.scheduler.forget_computed(server.now, version)
    server.scheduler.freeze(frozen=False)


def starts(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [start.computed for start in plan.starts]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_kept_requests_stand_still_with_what_they_have_and_go_on(ahead: int) -> None:
    server = Server()
    number = server.submit(STEM, max_tokens=20)
    server.step()
    for _ in range(ahead):
        server.plan()
    server.scheduler.pause(PauseMode.KEEP, server.now)
    newcomer = server.submit([3], max_tokens=2)
    assert server.scheduler.paused == (ahead == 0), "steps in flight are applied first"
    for _ in range(ahead):
        assert server.plan() is None
        server.apply()
    assert server.scheduler.paused
    assert server.plan() is None
    assert len(server.seen(number).tokens) == 1 + ahead
    assert server.scheduler.statistics().running == 1
    assert server.scheduler.statistics().reasons == {"pause": 1}
    server.scheduler.pause(None, server.now)
    server.run()
    assert server.scheduler.statistics().preemptions == 0
    assert server.seen(number).tokens == undisturbed(STEM, 20)
    assert len(server.seen(newcomer).tokens) == 2


def test_what_came_before_runs_to_its_end_and_the_rest_waits() -> None:
    server = Server(replace(ROOMY, slots=1))
    first, second = server.submit(STEM, max_tokens=6), server.submit([4], max_tokens=3)
    server.step()
    server.scheduler.pause(PauseMode.WAIT, server.now)
    newcomers = [server.submit([5, index], max_tokens=2) for index in range(3)]
    assert not server.scheduler.paused
    assert server.scheduler.counts == (1, 4)
    assert server.scheduler.statistics().reasons == {"slot": 1, "pause": 3}
    while not server.scheduler.paused:
        server.step()
    assert (server.seen(first).finish, server.seen(second).finish) == (Finish.LENGTH, Finish.LENGTH)
    assert server.plan() is None
    server.scheduler.abort(newcomers[1])
    assert server.seen(newcomers[1]).finish == Finish.ABORT
    assert server.scheduler.paused
    server.scheduler.pause(None, server.now)
    server.run()
    assert [server.seen(number).finish for number in newcomers] == [Finish.LENGTH, Finish.ABORT, Finish.LENGTH]
    assert is_idle(server.scheduler)


def test_a_source_that_leaves_takes_what_was_held_with_it() -> None:
    server = Server()
    server.scheduler.pause(PauseMode.WAIT, server.now)
    server.submit(STEM, n=3, source=1)
    kept = server.submit([4], source=2)
    server.scheduler.forget(1)
    server.scheduler.pause(PauseMode.KEEP, server.now)
    assert server.scheduler.unfinished == 1, "another mode holds nothing apart"
    server.scheduler.pause(None, server.now)
    server.run()
    assert len(server.seen(kept).tokens) == 4


def test_held_requests_wait_from_their_release_on() -> None:
    server = Server()
    server.scheduler.pause(PauseMode.WAIT, server.now)
    number = server.submit(STEM)
    server.now = 1e6
    server.scheduler.pause(None, server.now)
    assert server.scheduler._state.requests[number].since == 1e6


def test_an_abort_ends_all_and_newcomers_wait() -> None:
    server = Server()
    running, choices = server.submit(STEM, max_tokens=20), server.submit([3], n=2, max_tokens=20)
    server.step()
    server.plan()
    server.scheduler.pause(PauseMode.ABORT, server.now)
    newcomer = server.submit([4])
    assert server.seen(running).finish == Finish.ABORT
    assert [server.seen(choices, choice).finish for choice in range(2)] == [Finish.ABORT] * 2
    assert not server.scheduler.paused
    server.apply()
    assert server.scheduler.paused
    assert server.plan() is None
    server.scheduler.pause(None, server.now)
    server.run()
    assert len(server.seen(newcomer).tokens) == 4


def test_what_is_frozen_stays_so_behind_the_operators_resume() -> None:
    server = Server()
    server.submit(STEM)
    server.scheduler.freeze(frozen=True)
    server.scheduler.pause(PauseMode.KEEP, server.now)
    server.scheduler.pause(None, server.now)
    assert server.plan() is None
    server.scheduler.freeze(frozen=False)
    assert server.plan() is not None


def test_nothing_computed_before_is_used_behind_a_change() -> None:
    """Neither by what runs, nor by what shares its prompt."""
    server = Server()
    number = server.submit(STEM, max_tokens=20)
    for _ in range(3):
        server.step()
    server.scheduler.freeze(frozen=True)
    server.scheduler.forget_computed(server.now)
    assert server.scheduler.statistics().pool.held == 0
    server.scheduler.freeze(frozen=False)
    sharer = server.submit(STEM)
    assert starts(server.plan())[0] == 0
    server.apply()
    server.run()
    assert server.seen(number).tokens == undisturbed(STEM, 20)
    assert len(server.seen(sharer).tokens) == 4
    assert server.scheduler.check(thorough=True).ok
    assert is_idle(server.scheduler)


@pytest.mark.parametrize("prediction", [(), STEM])
def test_tokens_are_of_the_version_that_they_were_computed_with(prediction: tuple[int, ...]) -> None:
    server = Server(replace(ROOMY, speculation=SPECULATIVE if prediction else PLAIN))
    number = server.submit(STEM, max_tokens=20, prediction=prediction, prompt_logprobs=0)
    for _ in range(3):
        server.step()
    change(server, None)
    server.step()
    before = len(server.seen(number).tokens)
    change(server, "7")
    later, vector = server.submit(STEM, n=2), server.submit(STEM, pooling=Pooling(kind="mean"))
    server.run()
    assert server.seen(number).weights == [(0, "0"), (before, "7")]
    assert [server.seen(later, choice).weights for choice in range(2)] == [[(0, "7")]] * 2
    assert server.seen(vector).weights == [(0, "7")]


def test_no_prompt_has_log_probabilities_of_two_versions() -> None:
    server = Server(replace(ROOMY, slots=2, budget=4))
    number = server.submit(STEM, prompt_logprobs=0)
    server.step()
    (sequence,) = server.scheduler._state.requests[number].sequences.values()
    assert sequence.prompt_logprobs.positions
    change(server, "7")
    assert not sequence.prompt_logprobs.positions
    server.run()
    assert len(server.seen(number).prompt_scores or ()) == len(STEM) - 1


def test_one_request_ends_by_what_it_is_called() -> None:
    server = Server()
    named, other = server.submit(STEM, rid="a", n=2), server.submit(STEM, rid="ab")
    server.step()
    server.scheduler.abort_all(server.now, "a")
    server.run()
    assert [server.seen(named, choice).finish for choice in range(2)] == [Finish.ABORT] * 2
    assert server.seen(other).finish == Finish.LENGTH


def test_states_of_recurrent_layers_are_forgotten_too() -> None:
    server = Server(replace(ROOMY, recurrent=True, places=4, max_model_len=256, blocks=512, budget=256))
    prompt = (np.arange(200) % 50).tolist()
    server.submit(prompt, max_tokens=2)
    server.run()
    server.scheduler.freeze(frozen=True)
    server.scheduler.forget_computed(server.now)
    server.scheduler.freeze(frozen=False)
    number = server.submit(prompt, max_tokens=2)
    plan = server.plan()
    assert starts(plan) == [0]
    server.apply()
    server.run()
    assert len(server.seen(number).tokens) == 2
    assert server.scheduler.check(thorough=True).ok
