"""The executor is killed, stopped, crashes and hangs under 32 streams: each ends with exactly its own tokens."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.services.supervisor.process import ExitCode
from tests.e2e.chaos.faulty import CRASH, HANG
from tests.e2e.chaos.leftovers import at_rest, ended, holdings, nothing_kept
from tests.e2e.chaos.streams import Answer, answers, bodies, marks
from tests.e2e.server import FAULTY, LIMIT, Server, serving

STREAMS = 32
LONG = 60  # tokens of a stream
ROOM = ("--max-num-seqs", "96")
DIED, HANGS = "process_died child=executor-0", "process_hangs child=executor-0"
GOAL = 8.0  # seconds of a pause that a client may see when the embedded model's executor is killed


def disturbed(server: Server, undisturbed: Sequence[Answer], numbers: Sequence[int], tokens: int, seed: int) -> float:
    """Send these signals to executors at random moments of a run of all streams; the longest pause of any of them."""
    total = sum(len(ids) for answer in undisturbed for ids in answer.tokens.values())
    deaths = server.log.read_text().count(DIED)
    struck: list[int] = []

    def disturb(number: int) -> None:
        struck.append(another(server, struck))
        os.kill(struck[-1], numbers[number])

    found = answers(server.url, bodies(STREAMS, tokens), marks(len(numbers), total, seed), disturb)
    for before, after in zip(undisturbed, found, strict=True):
        assert after.said == before.said
        assert after.error is None
        assert after.done == 1
    server.logged(DIED, deaths + len(numbers))  # which may be later: an engine is ahead of its clients
    at_rest(server)
    return max(answer.longest_pause for answer in found)


def another(server: Server, struck: Sequence[int]) -> int:
    """Pid of an executor that is none of these. Tokens that its predecessor made may be on their way for longer than
    the launcher needs to start it, so it is waited for."""
    deadline = time.monotonic() + LIMIT
    while (pid := server.children().get("executor")) is None or pid in struck:
        assert time.monotonic() < deadline, "nobody comes back"
        select.select([], [], [], 0.02)
    return pid


def test_killed_and_stopped_executors_cost_time_and_no_token(tmp_path: Path) -> None:
    with serving(tmp_path, *ROOM) as server:
        undisturbed = answers(server.url, bodies(STREAMS, 24))
        at_rest(server)
        before = holdings(server)
        killed = disturbed(server, undisturbed, (signal.SIGKILL, signal.SIGKILL), 24, 1)
        print(f"\nexecutor killed: the longest pause of a stream was {killed:.1f} s (goal {GOAL:.0f} s)")
        stopped = disturbed(server, undisturbed, (signal.SIGSTOP,), 24, 2)
        print(f"executor stopped: {stopped:.1f} s")
        log = server.log.read_text()
        assert (log.count(DIED), log.count(HANGS)) == (3, 1)
        nothing_kept(server, before)
        ended(server)


@pytest.fixture(scope="module")
def long_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    with serving(tmp_path_factory.mktemp("undisturbed"), *ROOM) as server:
        return answers(server.url, bodies(STREAMS, LONG))


@pytest.mark.long
@pytest.mark.parametrize("portion", range(5))
def test_twenty_kills(tmp_path: Path, long_undisturbed: list[Answer], portion: int) -> None:
    """Four for each server, two in a run of all streams: five deaths in a minute are the end of hope."""
    run_of_signals(tmp_path, long_undisturbed, [(signal.SIGKILL, signal.SIGKILL)] * 2, 10 + portion)


@pytest.mark.long
@pytest.mark.parametrize("portion", range(2))
def test_five_stops(tmp_path: Path, long_undisturbed: list[Answer], portion: int) -> None:
    run_of_signals(tmp_path, long_undisturbed, [(signal.SIGSTOP,)] * (3 if portion else 2), 20 + portion)


def run_of_signals(folder: Path, undisturbed: list[Answer], runs: Sequence[Sequence[int]], seed: int) -> None:
    """Runs of all streams with these signals to executors, on a server of their own, of which nothing is left."""
    with serving(folder, *ROOM) as server:
        assert [answer.said for answer in answers(server.url, bodies(STREAMS, LONG))] == [
            answer.said for answer in undisturbed
        ]
        at_rest(server)
        before = holdings(server)
        for number, signals in enumerate(runs):
            pause = disturbed(server, undisturbed, signals, LONG, 100 * seed + number)
            names = ", ".join(signal.Signals(each).name for each in signals)
            print(f"\n{names}: the longest pause of a stream was {pause:.1f} s (goal of a kill {GOAL:.0f} s)")
        nothing_kept(server, before)
        ended(server)


def post(server: Server, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The answer to a request that is not streamed, and its status."""
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def report(server: Server) -> dict[str, Any]:
    """The newest one that executors have left."""
    newest = max((server.run_dir / "crashes").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    found: dict[str, Any] = json.loads(newest.read_bytes())
    return found


def test_a_request_that_kills_executors_ends_alone_and_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, entry=FAULTY) as server:
        asked = bodies(16, 24)
        undisturbed = answers(server.url, asked)
        killer = {"prompt": [5, CRASH, 6], "max_tokens": 4, "stream": True}
        *found, killed = answers(server.url, [*asked, killer])
        assert [answer.said for answer in found] == [answer.said for answer in undisturbed]
        assert killed.error is not None
        assert "executor died 3 times" in killed.error["message"]
        at_rest(server)
        status, answer = post(server, {**killer, "stream": False})
        assert (status, answer["error"]["code"]) == (400, "condemned")
        left = report(server)
        assert (left["reason"], left["process"]) == ("crashed", "executor-0")
        assert "an injected fault" in left["trace"]
        assert '"token_ids"' not in json.dumps(left)
        assert server.log.read_text().count(DIED) == 3
        ended(server)


@pytest.mark.long
def test_a_step_that_hangs_ends_its_executor_and_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path, entry=FAULTY) as server:
        asked: list[dict[str, Any]] = bodies(16, 24)
        undisturbed = answers(server.url, asked)
        hangs = {"prompt": [5, HANG, 6], "max_tokens": 4, "stream": True}
        found: list[Answer] = answers(server.url, [*asked, hangs])
        assert [answer.said for answer in found[:-1]] == [answer.said for answer in undisturbed]
        assert found[-1].error is None
        assert report(server)["reason"] == "hung"
        assert "threading.Event().wait()" in report(server)["trace"]
        assert f"exit_code={ExitCode.HUNG}" in server.log.read_text()
        at_rest(server)
        ended(server)
