"""Guides take a result's tokens ahead of the rest, and who ends by them ends the same either way."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine_core.scheduling.update_from_output import BROKEN_OFF, NOT_FINITE, can_end
from penstock.protocol.messages import Automaton, Finish
from penstock.protocol.steps import StepResult
from tests.sim.grammar import FakeGuide
from tests.sim.model import EOS
from tests.sim.server import ROOMY, Server

PROMPT = [3, 4, 5]
FREE = Automaton(source="1 100 0")


def result(step: int, tokens: list[int], epoch: int = 0) -> StepResult:
    return StepResult(step=step, epoch=epoch, token_ids=np.array(tokens, np.int32).tobytes())


def guide_of(server: Server) -> FakeGuide:
    (choice,) = [choice for choice in server.scheduler._state.slots.sequences if choice is not None]
    assert isinstance(choice.guide, FakeGuide)
    return choice.guide


def begun(automaton: Automaton = FREE, **sampling: object) -> Server:
    """A server with one guided request and two steps in flight, the first of which has its masks."""
    server = Server()
    server.submit(PROMPT, automaton=automaton, **sampling)  # type: ignore[arg-type]
    for _ in range(2):
        server.scheduler.plan(0.0)
    assert server.scheduler.mask_work() is not None
    return server


def test_the_next_masks_can_be_made_before_a_result_is_applied() -> None:
    server = begun(max_tokens=12)
    assert server.scheduler.mask_work() is None
    token = sorted(guide_of(server).allowed())[0]
    server.scheduler.follow(result(1, [token]))
    work = server.scheduler.mask_work()
    assert work is not None
    assert work.step == 2
    assert server.scheduler.in_flight == 2, "the rest of the result is still to be taken"
    work.rows[0].guide.lent = True  # type: ignore[attr-defined]
    server.scheduler.apply(result(1, [token]), 0.0)  # calls no guide
    assert server.scheduler.in_flight == 1


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("automaton", "token", "sampling", "finish"),
    [
        (FREE, None, {"max_tokens": 1}, Finish.LENGTH),
        (Automaton(source="1 1 0"), None, {"max_tokens": 9}, Finish.STOP),
        (Automaton(source="1 100 1"), None, {"max_tokens": 9}, Finish.GRAMMAR),
        (FREE, -1, {"max_tokens": 9}, Finish.ERROR),
    ],
)
def test_a_choice_ends_the_same_whether_its_guide_was_early(
    automaton: Automaton, token: int | None, sampling: dict[str, object], finish: Finish, early: bool
) -> None:
    server = begun(automaton, **sampling)
    said = sorted(guide_of(server).allowed() - {EOS})[0] if token is None else token
    if early:
        server.scheduler.follow(result(1, [said]))
        work = server.scheduler.mask_work()
        assert work is None or work.rows == (), "nobody needs a mask behind the end"
    server.scheduler.apply(result(1, [said]), 0.0)
    seen = server.seen(1)
    assert seen.finish == finish
    assert len(seen.tokens) == (0 if finish in (Finish.ERROR, Finish.GRAMMAR) else 1)
    if token == -1:
        assert seen.error == NOT_FINITE


def test_a_guide_that_failed_ends_its_choice_before_anything_else_is_looked_at() -> None:
    """Under the mask of a failed automaton anything may be said, an ending token at the limit too."""
    server = begun(max_tokens=1, ignore_eos=False)
    guide = guide_of(server)
    guide.failed, guide.failure = True, "out of fuel"
    server.scheduler.apply(result(1, [EOS]), 0.0)
    seen = server.seen(1)
    assert (seen.finish, seen.tokens, seen.error) == (Finish.GRAMMAR, [], "out of fuel")


@pytest.mark.parametrize("after", [b"", (9).to_bytes(4, "little")])
def test_an_end_inside_a_structure_is_no_stop(after: bytes) -> None:
    """No mask allows it; should one all the same, the client learns that its grammar was not followed."""
    inside = next(seed for seed in range(99) if EOS not in FakeGuide(Automaton(source=f"{seed} 9 0")).allowed())
    server = begun(Automaton(source=f"{inside} 9 0", after=after), max_tokens=9, ignore_eos=False)
    server.scheduler.apply(result(1, [EOS]), 0.0)
    seen = server.seen(1)
    assert (seen.finish, seen.tokens, seen.error) == (Finish.GRAMMAR, [], BROKEN_OFF)


def test_a_result_of_another_epoch_moves_no_guide() -> None:
    server = begun(max_tokens=9)
    guide = guide_of(server)
    before = guide.allowed()
    server.scheduler.follow(result(1, [sorted(before)[0]], epoch=7))
    assert guide.allowed() == before
    assert server.scheduler.mask_work() is None


def test_what_a_guide_forces_is_known_before_its_masks_are_filled() -> None:
    """A plan that is made while masks are being made has drafts all the same."""
    drafted = 0
    for source in range(60):
        server = begun(Automaton(source=f"{source} 30 0"), max_tokens=30)
        token = sorted(guide_of(server).allowed() - {EOS})[0]
        server.scheduler.follow(result(1, [token]))
        work = server.scheduler.mask_work()
        assert work is not None
        for row in work.rows:
            row.guide.lent = True  # type: ignore[attr-defined]
        server.scheduler.apply(result(1, [token]), 0.0)
        plan = server.scheduler.plan(0.0)
        drafted += plan is not None and bool(plan.drafts)
    assert drafted > 1


def test_who_can_end_by_an_end_of_sequence() -> None:
    server = Server(ROOMY)
    server.submit(PROMPT, ignore_eos=True, max_tokens=4)
    server.submit(PROMPT, ignore_eos=False, max_tokens=4, min_tokens=2)
    ignoring, ending = server.scheduler._state.requests.values()
    assert not can_end(ignoring, 7)
    assert not can_end(ending, 4)
    assert can_end(ending, 5)
