"""Rows whose masks are late sit out: on a virtual clock, no other row's step goes any later."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.protocol.messages import Automaton, Finish, Sampling
from penstock.protocol.steps import choice_seed
from tests.sim.grammar import FakeGuide
from tests.sim.model import EOS, Nature, rollout
from tests.sim.timed import FORWARD, WORLD, TimedServer

PROMPT = [3, 4, 5, 6, 7]
FREE = 4  # rows without a grammar
LONG = 40
NEAR = 4  # tokens from the limit on, drafts may have planned all that are left
SLOW = [Automaton(source=f"{seed} 100 0 {share}") for seed, share in ((1, 10), (2, 5), (3, 10))]  # in ten are new
QUICK = [Automaton(source=f"{seed} 1000 0 0") for seed in (1, 2, 3)]


def truth(number: int, automaton: Automaton, tokens: int) -> tuple[list[int], Finish]:
    given = Sampling(max_tokens=tokens, ignore_eos=True, eos_token_ids=(EOS,), seed=number)
    return rollout(PROMPT, given, choice_seed(number, 0), Nature(), 10**6, FakeGuide(automaton))


def served(
    automata: list[Automaton], mask: float, link: float = 0.0, depth: int = 2, tokens: int = LONG, **world: object
) -> TimedServer:
    """Rows with these automata beside free ones. Masks take so many steps, and so do their messages."""
    server = TimedServer(mask * FORWARD, link * FORWARD, replace(WORLD, **world))  # type: ignore[arg-type]
    for _ in range(FREE):
        server.submit(PROMPT, max_tokens=tokens)
    for automaton in automata:
        server.submit(PROMPT, max_tokens=tokens, automaton=automaton)
    server.run_timed(depth)
    for number, automaton in enumerate(automata, FREE + 1):
        assert (server.seen(number).tokens, server.seen(number).finish) == truth(number, automaton, tokens)
    return server


def gaps(stamps: list[float]) -> list[int]:
    """Steps between tokens."""
    return [round((later - sooner) / FORWARD) for sooner, later in itertools.pairwise(stamps)]


@pytest.mark.parametrize(
    "world",
    [
        {},
        {"budget": 9},  # prompts in chunks
        {"prefix_caching": False},
        {"speculation": SpeculationOptions(method="ngram")},
        {"speculation": SpeculationOptions(method="draft_model", num_speculative_tokens=3), "skill": 1.0},
    ],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mask", [0.3, 2.3, 5.3])
def test_free_rows_steps_go_at_the_same_times_beside_slow_masks(mask: float, depth: int, world: dict) -> None:
    alone, beside = served([], 0.0, depth=depth, **world), served(SLOW, mask, depth=depth, **world)
    last = max(beside.stamps[number][-1] for number in range(1, FREE + 1))
    for number in range(1, FREE + 1):
        assert beside.seen(number).tokens == alone.seen(number).tokens
        if not world:
            assert beside.stamps[number] == alone.stamps[number]
    ends = [end for end in beside.steps if end < last + FORWARD / 2]
    assert ends == pytest.approx([FORWARD * number for number in range(1, len(ends) + 1)])
    assert alone.steps[: len(ends)] == pytest.approx(ends[: len(alone.steps)])


def test_a_row_that_sits_out_is_back_behind_its_mask() -> None:
    """Each mask takes 5.3 steps; three rows have one thread."""
    beside = served(SLOW, 5.3)
    for number in range(FREE + 1, FREE + 4):
        assert max(gaps(beside.stamps[number])) <= 3 * 6 + 2


@pytest.mark.parametrize("seconds", [0.002, 0.02])
def test_a_row_whose_masks_are_there_again_is_in_every_step_again(seconds: float) -> None:
    """Each is there, and the one that was not took so long: less than a quarter of a step, or more."""
    server = TimedServer(5.3 * FORWARD)
    server.submit(PROMPT, max_tokens=LONG)
    slow = server.submit(PROMPT, max_tokens=LONG, automaton=QUICK[0], speculate=False)
    for sequence in server.scheduler._state.requests[slow].sequences.values():
        assert sequence.guide is not None
        sequence.guide.seconds = seconds
    server.run_timed()
    found = gaps(server.stamps[slow][:-NEAR])
    assert (2 in found) == (seconds > 0.0025)
    assert max(found[12:]) == 1


def test_rows_alone_wait_for_their_masks_in_every_step() -> None:
    """Nobody gains where all sit out."""
    server = TimedServer(0.3 * FORWARD)
    for automaton in SLOW:
        server.submit(PROMPT, max_tokens=LONG, automaton=automaton)
    server.run_timed()
    for number in (1, 2, 3):
        assert max(gaps(server.stamps[number][:-NEAR])) == 1


def test_masks_that_are_known_and_come_in_time_cost_no_row_a_step() -> None:
    beside = served(QUICK, 5.3, link=0.5)
    assert {max(gaps(stamps[:-NEAR])) for stamps in beside.stamps.values()} == {1}
