"""One rank of a group is killed or stopped under streams of all kinds: the group begins anew, and each stream ends with
exactly its own tokens. Two ranks over gloo, the embedded model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.chaos.groups import STREAMS, TOKENS, calm, disturbed, executors
from tests.e2e.chaos.leftovers import ended
from tests.e2e.chaos.streams import Answer, answers, bodies, marks
from tests.e2e.server import Server, serving

RANKS = ("--tensor-parallel-size", "2", "--device", "cpu", "--max-num-seqs", "32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("group"), *RANKS) as made:
        yield made
        ended(made)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Answer]:
    return calm(server)


def test_both_ranks_are_shown(server: Server) -> None:
    server.logged("2 x cpu")
    assert len(executors(server)) == 2


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_killed_rank_costs_time_and_no_token(server: Server, undisturbed: list[Answer], rank: int) -> None:
    disturbed(server, undisturbed, signal.SIGKILL, rank)
    server.logged(f"group_broken child=executor-{1 - rank}")  # the other's end is no failure of its own


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 0])
def test_a_stopped_rank_is_found(server: Server, undisturbed: list[Answer], rank: int) -> None:
    disturbed(server, undisturbed, signal.SIGSTOP, rank)


@pytest.mark.long
def test_a_lost_scheduler_finds_the_group_in_step(server: Server, undisturbed: list[Answer]) -> None:
    before = executors(server)
    total = sum(len(ids) for answer in undisturbed for ids in answer.tokens.values())
    found = answers(
        server.url, bodies(STREAMS, TOKENS), marks(1, total, 2),
        lambda _: os.kill(server.children()["scheduler"], signal.SIGKILL),
    )  # fmt: skip
    assert [answer.said for answer in found] == [answer.said for answer in undisturbed]
    assert executors(server) == before
