"""How long what ended was: prompts and outputs of choices, once each."""

from __future__ import annotations

from penstock.engine_core.histogram import HistogramStatistics
from penstock.engine_core.scheduling.statistics import TOKENS, SequenceStatistics
from penstock.protocol.messages import Pooling
from tests.sim.server import Server


def lengths(server: Server) -> SequenceStatistics:
    return server.scheduler.statistics().sequences


def seen(statistics: HistogramStatistics) -> tuple[int, float]:
    """How many, and their sum."""
    return sum(statistics.counts), statistics.total


def run(server: Server, steps: int = 12) -> None:
    """So many steps, planned and applied a second after another."""
    for second in range(steps):
        plan = server.scheduler.plan(float(second))
        if plan is None:
            return
        for result in server.executor.run(plan):
            server.scheduler.apply(result, second + 0.5)
            server.executor.applied(result.step)


def test_each_choice_counts_when_it_ends() -> None:
    server = Server()
    server.submit([3, 4, 5], max_tokens=3)
    server.submit([6, 7], max_tokens=2, n=2)
    assert (seen(lengths(server).prompt_tokens), seen(lengths(server).output_tokens)) == ((0, 0.0), (0, 0.0))
    run(server)
    found = lengths(server)
    assert (seen(found.prompt_tokens), seen(found.output_tokens)) == ((3, 7.0), (3, 7.0))


def test_the_aborted_say_nothing() -> None:
    server = Server()
    number = server.submit([3, 4], max_tokens=9)
    run(server, 2)
    server.scheduler.abort(number)
    assert (seen(lengths(server).prompt_tokens), seen(lengths(server).output_tokens)) == ((0, 0.0), (0, 0.0))


def test_a_vector_has_a_prompt_alone() -> None:
    server = Server()
    server.submit([3, 4, 5, 6], max_tokens=1, pooling=Pooling(kind="last"))
    run(server)
    assert (seen(lengths(server).prompt_tokens), seen(lengths(server).output_tokens)) == ((1, 4.0), (0, 0.0))


def test_bounds_reach_from_a_token_to_the_longest_context() -> None:
    assert TOKENS[0] == 1
    assert TOKENS[-1] == 1_000_000
    assert list(TOKENS) == sorted(TOKENS)
