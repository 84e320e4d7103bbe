"""A server on two hosts, which are network namespaces: api, tokenizer, scheduler and the first executor on one, the
second executor on the other. Whatever the other host or the wire does, each stream ends with exactly its own tokens.

Two ranks, or two stages, over gloo, the embedded model.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from penstock.services.commands.client import Client
from penstock.services.commands.top import processes, snapshot
from penstock.services.links.curve import new_keys, write_keys
from tests.e2e.canary import ask, ask_all, prompts
from tests.e2e.chaos.groups import STREAMS, TOKENS, calm, executors
from tests.e2e.chaos.leftovers import KEPT, at_rest, ended
from tests.e2e.chaos.streams import Answer, answers, bodies, marks
from tests.e2e.hosts import FIRST, TwoHosts, serving_from_two, shared, two_hosts, working
from tests.e2e.server import LIMIT
from tests.e2e.test_processes import wait_gone

RANKS = ("--tensor-parallel-size", "2")
STAGES = ("--pipeline-parallel-size", "2")
FEW = 6  # prompts of the canary where time is short


@pytest.fixture(scope="module", params=[RANKS, pytest.param(STAGES, marks=pytest.mark.long)], ids=["ranks", "stages"])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with serving_from_two(tmp_path_factory.mktemp("hosts"), *request.param) as made:
        yield made
        ended(made.server)
        pids = [made.worker.process.pid, *made.worker.executors()]
        assert made.worker.end() == 0, "it waits for the next life of its group, and is told to end"
        wait_gone(pids)
        assert {path.name for path in made.worker.run_dir.iterdir()} <= KEPT


@pytest.fixture(scope="module")
def undisturbed(two: TwoHosts) -> list[Answer]:
    return calm(two.server)


def through(two: TwoHosts, undisturbed: list[Answer], disturb: Callable[[], None]) -> None:
    """Something happens in the midst of all streams."""
    total = sum(len(ids) for answer in undisturbed for ids in answer.tokens.values())
    found = answers(two.server.url, bodies(STREAMS, TOKENS), marks(1, total, 1), lambda _: disturb())
    assert [answer.said for answer in found] == [answer.said for answer in undisturbed]
    at_rest(two.server)
    print(f"\nthe longest pause {max(answer.longest_pause for answer in found):.1f} s")


def said(log: Path) -> int:
    """Bytes of a log until now."""
    return len(log.read_bytes())


def wait_said(log: Path, since: int, *events: str) -> None:
    """Until a line with one of these has come."""
    done = threading.Event()
    for _ in range(2400):
        text = log.read_bytes()[since:].decode(errors="replace")
        if any(event in text for event in events):
            return
        done.wait(0.05)
    raise TimeoutError(f"none of {events} in {log}:\n{log.read_text()}")


async def test_answers_are_those_of_one_executor(two: TwoHosts) -> None:
    some = prompts()[:FEW]
    async with httpx.AsyncClient(base_url=two.server.url, timeout=300) as client:
        found = await asyncio.gather(*(ask(client, prompt) for prompt in some))
    assert [answer.text for answer in found] == [prompt["answer"] for prompt in some]
    health = two.server.get("/health")
    assert health["engine"]["device"] == "2 x cpu"
    assert len(executors(two.server)) == len(two.worker.executors()) == 1


@pytest.mark.long
async def test_all_forty_are(two: TwoHosts) -> None:
    assert [answer.text for answer in await ask_all(two.server.url)] == [prompt["answer"] for prompt in prompts()]


def test_each_host_tells_what_it_has(two: TwoHosts) -> None:
    here, there = two.server.log.read_text(), two.worker.log.read_text()
    assert "Penstock listens on" in here
    assert "2 x cpu" in here
    assert "Penstock serves a part here" in there
    assert "here         executor:1" in there
    assert "elsewhere    api,tokenizer,scheduler,executor" in there


def test_one_scrape_has_the_processes_of_both_hosts(two: TwoHosts) -> None:
    """So `penstock top` has them as well."""
    deadline, found = time.monotonic() + LIMIT, set[str]()
    wanted = {"api-0", "tokenizer-0", "scheduler-0", "executor-0", "executor-1"}
    client = Client(two.server.url)
    while found != wanted:
        assert time.monotonic() < deadline, found
        found = {row[0] for row in processes(*[snapshot(client)] * 2)}
        select.select([], [], [], 0.05)


def test_a_killed_executor_of_the_other_host_costs_time_and_no_token(two: TwoHosts, undisturbed: list[Answer]) -> None:
    through(two, undisturbed, lambda: os.kill(two.worker.executors()[0], signal.SIGKILL))
    assert "process_died child=executor-1" in two.worker.log.read_text()
    assert "group_broken child=executor-0" in two.server.log.read_text(), "no failure of its own"


@pytest.mark.long
def test_a_killed_executor_of_this_host_does_neither(two: TwoHosts, undisturbed: list[Answer]) -> None:
    through(two, undisturbed, lambda: os.kill(executors(two.server)[0], signal.SIGKILL))
    assert "group_broken child=executor-1" in two.worker.log.read_text()


@pytest.mark.long
def test_a_killed_scheduler_does_neither(two: TwoHosts, undisturbed: list[Answer]) -> None:
    through(two, undisturbed, lambda: os.kill(two.server.children()["scheduler"], signal.SIGKILL))


def cut_until(two: TwoHosts, wait: Callable[[], None]) -> None:
    """Cut the wire, and mend it when `wait` returns."""

    def mend() -> None:
        try:
            wait()
        finally:
            two.hosts.mend()

    two.hosts.cut()
    threading.Thread(target=mend).start()


@pytest.mark.long
def test_a_cut_that_the_scheduler_notices_costs_time_and_no_token(two: TwoHosts, undisturbed: list[Answer]) -> None:
    """It is mended at that moment: the group's own connections may stand still, but its members are out of step."""
    since = said(two.server.log)
    through(two, undisturbed, lambda: cut_until(two, lambda: wait_said(two.server.log, since, "executor_left")))


@pytest.mark.long
def test_a_cut_that_all_notice_does_neither(two: TwoHosts, undisturbed: list[Answer]) -> None:
    here, there = said(two.server.log), said(two.worker.log)
    ends = "group_broken", "step_hangs", "process_died"

    def noticed() -> None:
        wait_said(two.server.log, here, "executor_left")
        wait_said(two.server.log, here, *ends)
        wait_said(two.worker.log, there, *ends)

    through(two, undisturbed, lambda: cut_until(two, noticed))


@pytest.mark.long
def test_a_short_cut_is_noticed_by_nobody(two: TwoHosts, undisturbed: list[Answer]) -> None:
    before = executors(two.server), two.worker.executors()
    through(two, undisturbed, lambda: cut_until(two, lambda: threading.Event().wait(1.5)))
    assert (executors(two.server), two.worker.executors()) == before


@pytest.mark.long
def test_both_hosts_may_be_told_to_end_at_once(tmp_path: Path) -> None:
    """What runs is finished on both: the executor elsewhere waits for the scheduler to drain."""
    with serving_from_two(tmp_path, *RANKS) as two:
        undisturbed = calm(two.server)
        total = sum(len(ids) for answer in undisturbed for ids in answer.tokens.values())

        def end(_: int) -> None:
            two.worker.process.terminate()
            two.server.process.terminate()

        found = answers(two.server.url, bodies(STREAMS, TOKENS), [total // 3], end)
        assert [answer.said for answer in found] == [answer.said for answer in undisturbed]
        assert (two.server.process.wait(60), two.worker.process.wait(60)) == (0, 0)


@pytest.mark.long
def test_other_keys_on_the_other_host_are_refused_with_what_to_mend(tmp_path: Path) -> None:
    keys, others = tmp_path / "keys", tmp_path / "others"
    write_keys(keys, new_keys())
    write_keys(others, new_keys())
    with two_hosts() as hosts, working(hosts, tmp_path / "a", *RANKS, *shared(keys), parts=FIRST, host=0) as first:
        with working(hosts, tmp_path / "b", *RANKS, *shared(others)) as wrong:
            assert wrong.process.wait(120) == 5
            assert "give all hosts the same file as --link-keys" in wrong.log.read_text()
        first.logged("has other link keys than executor 1")
        with working(hosts, tmp_path / "c", *RANKS, *shared(keys)) as right:
            first.ready()
            right.ready()
            assert (first.end(), right.end()) == (0, 0)
