"""One stage of a pipeline is killed under streams of all kinds: its group begins anew, and each stream ends with
exactly its own tokens. Two stages over gloo, the embedded model; alone, and with its draft on the last stage."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.chaos.groups import calm, disturbed, executors
from tests.e2e.chaos.leftovers import ended
from tests.e2e.chaos.streams import Answer
from tests.e2e.server import Server, serving

STAGES = ("--pipeline-parallel-size", "2", "--device", "cpu", "--max-num-seqs", "32")


DRAFTS = ("--speculative-config", '{"method": "draft_model", "model": "penstock-demo-draft"}')


@pytest.fixture(scope="module", params=[(), pytest.param(DRAFTS, marks=pytest.mark.long)], ids=["alone", "drafts"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("stages"), *STAGES, *request.param) as made:
        yield made
        ended(made)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Answer]:
    return calm(server)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_stage_costs_time_and_no_token(server: Server, undisturbed: list[Answer], stage: int) -> None:
    assert len(executors(server)) == 2
    disturbed(server, undisturbed, signal.SIGKILL, stage)
    server.logged(f"group_broken child=executor-{1 - stage}")  # the other's end is no failure of its own


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stopped_stage_is_found(server: Server, undisturbed: list[Answer], stage: int) -> None:
    disturbed(server, undisturbed, signal.SIGSTOP, stage)
