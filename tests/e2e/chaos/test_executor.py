"""The executor is killed, stopped, crashes and hangs under 64 streams: each ends with exactly its own tokens."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.process import ExitCode
from tests.e2e.chaos import faulty
from tests.e2e.chaos.faulty import CRASH, HANG
from tests.e2e.chaos.streams import Answer, answers, bodies, marks
from tests.e2e.server import Server, descendants, serving
from tests.e2e.test_processes import wait_gone

STREAMS = 64
GOAL = 8.0  # seconds of a pause that a client may see when the embedded model's executor is killed


def disturbed(server: Server, count: int, tokens: int, numbers: Sequence[int], seed: int) -> list[float]:
    """Send these signals to executors at random moments of a run of all streams; the longest pause of each stream."""
    asked = bodies(STREAMS, tokens)
    undisturbed = answers(server.url, asked)
    total = sum(len(ids) for answer in undisturbed for ids in answer.tokens.values())

    def disturb(number: int) -> None:
        os.kill(server.children()["executor"], numbers[number])

    found = answers(server.url, asked, marks(count, total, seed), disturb)
    for before, after in zip(undisturbed, found, strict=True):
        assert after.said == before.said
        assert after.error is None
        assert after.done == 1
    rested(server)
    return [answer.longest_pause for answer in found]


def rested(server: Server) -> None:
    """Nobody is left in the engine, and no block is."""
    server.healthy()
    engine = server.until("/health", lambda health: health["engine"]["running"] == 0)["engine"]
    assert engine["waiting"] == 0
    assert engine["blocks_free"] + engine["blocks_idle"] == engine["blocks"]


def ended(server: Server) -> None:
    """The server ends in order, and nothing of it is left."""
    pids = descendants(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    wait_gone(pids)
    assert not list(server.run_dir.glob("*.sock"))


def test_killed_and_stopped_executors_cost_time_and_no_token(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-num-seqs", "96") as server:
        pauses = disturbed(server, 2, 24, (signal.SIGKILL, signal.SIGKILL), 1)
        print(f"\nexecutor killed: the longest pause of a stream was {max(pauses):.1f} s (goal {GOAL:.0f} s)")
        stopped = disturbed(server, 1, 12, (signal.SIGSTOP,), 2)
        print(f"executor stopped: {max(stopped):.1f} s")
        log = server.log.read_text()
        assert log.count("process_died process=executor-0") == 3
        assert log.count("process_hangs process=executor-0") == 1
        ended(server)


@pytest.mark.long
def test_twenty_kills(tmp_path: Path) -> None:
    """In groups of three, because five deaths in a minute are the end of hope."""
    with serving(tmp_path, "--max-num-seqs", "96") as server:
        pauses = []
        for group in range(7):
            count = 3 if group < 6 else 2
            pauses += disturbed(server, count, 60, (signal.SIGKILL,) * count, 10 + group)
        print(f"\n20 kills: the longest pause of a stream was {max(pauses):.1f} s (goal {GOAL:.0f} s)")
        assert max(pauses) < GOAL
        ended(server)


@pytest.mark.long
def test_five_stops(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-num-seqs", "96") as server:
        pauses = [pause for seed in range(5) for pause in disturbed(server, 1, 40, (signal.SIGSTOP,), 20 + seed)]
        print(f"\n5 stops: the longest pause of a stream was {max(pauses):.1f} s")
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


def test_a_request_that_kills_executors_ends_alone_and_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FAULT_MARK", str(tmp_path / "hung"))
    with serving(tmp_path, entry=Path(faulty.__file__)) as server:
        asked = bodies(16, 24)
        undisturbed = answers(server.url, asked)
        killer = {"prompt": [5, CRASH, 6], "max_tokens": 4, "stream": True}
        *found, killed = answers(server.url, [*asked, killer])
        assert [answer.said for answer in found] == [answer.said for answer in undisturbed]
        assert killed.error is not None
        assert "executor died 3 times" in killed.error["message"]
        rested(server)
        status, answer = post(server, {**killer, "stream": False})
        assert (status, answer["error"]["code"]) == (400, "condemned")
        left = report(server)
        assert (left["reason"], left["process"]) == ("crashed", "executor-0")
        assert "an injected fault" in left["trace"]
        assert '"token_ids"' not in json.dumps(left)
        assert server.log.read_text().count("process_died process=executor-0") == 3
        ended(server)


@pytest.mark.long
def test_a_step_that_hangs_ends_its_executor_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FAULT_MARK", str(tmp_path / "hung"))
    with serving(tmp_path, entry=Path(faulty.__file__)) as server:
        asked: list[dict[str, Any]] = bodies(16, 24)
        undisturbed = answers(server.url, asked)
        hangs = {"prompt": [5, HANG, 6], "max_tokens": 4, "stream": True}
        found: list[Answer] = answers(server.url, [*asked, hangs])
        assert [answer.said for answer in found[:-1]] == [answer.said for answer in undisturbed]
        assert found[-1].error is None
        assert report(server)["reason"] == "hung"
        assert "threading.Event().wait()" in report(server)["trace"]
        assert f"exit_code={ExitCode.HUNG}" in server.log.read_text()
        rested(server)
        ended(server)
