"""Executors that sleep: what they give back, that a request wakes them, and that no request is lost whatever dies."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chaos.groups import executors
from tests.e2e.chaos.leftovers import ended
from tests.e2e.server import FAULTY, LIMIT, Server, serving
from tests.e2e.test_weights import operate, options, write_folder

IDLE = ("--idle-timeout", "1", "--device", "cpu", "--keep-weights")
SLEEPS, WAKES = "scheduler-0 sleeping", "scheduler-0 waking"
BODY = {"prompt": "The water", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
MIB = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, *IDLE, entry=FAULTY) as made:
        yield made
        ended(made)


def asked(server: Server, **more: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(BODY | more).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    return choice


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def sleeps(server: Server) -> None:
    """Wait until all executors sleep."""
    server.until("/health", lambda found: found["engine"]["asleep"])


def process(server: Server, role: str = "executor") -> int:
    """Its pid. An executor's command line is empty while it changes its image."""
    while (pid := server.children().get(role)) is None:
        select.select([], [], [], 0.02)
    return pid


def ranks(server: Server) -> list[int]:
    """Pids of a group of two, as `process`."""
    while len(found := executors(server)) < 2:
        select.select([], [], [], 0.02)
    return found


def awake(server: Server) -> int:
    """Bytes of an executor that has the model. It may fall asleep at any time: then once more."""
    while True:
        before = server.log.read_text().count(SLEEPS)
        asked(server)
        held = resident(process(server))
        if server.log.read_text().count(SLEEPS) == before:
            return held


def test_memory_is_given_back_and_a_request_wakes_it(server: Server) -> None:
    said, pid, held = asked(server), process(server), awake(server)
    sleeps(server)
    server.logged("executor-0 asleep", server.log.read_text().count(SLEEPS))
    asleep = resident(pid)
    assert asleep < held
    assert server.get("/health")["ready"]
    assert server.get("/health/ready") == {"status": "ok"}
    began = time.monotonic()
    assert asked(server) == said
    print(f"\nasleep {asleep / MIB:.0f} MiB were {held / MIB:.0f}; woken in {time.monotonic() - began:.1f} s")
    assert process(server) == pid, "its supervisor has seen nothing"
    with ThreadPoolExecutor(1) as pool:
        with server.slow():
            running = pool.submit(asked, server, max_tokens=100)
            server.until("/health", lambda found: not found["engine"]["sleeping"])
        running.result()


def struck(server: Server, words: str, strike: Callable[[], None]) -> None:
    """Send a request to a server that sleeps, and strike once these words have been logged once more."""
    sleeps(server)
    before = server.log.read_text().count(words)
    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.append(asked(server)))
    client.start()
    server.logged(words, before + 1)
    strike()
    client.join(LIMIT)
    server.healthy()
    assert answers[0] == asked(server)


def kill(server: Server, *roles: str) -> None:
    for role in roles:
        os.kill(process(server, role), signal.SIGKILL)


@pytest.mark.parametrize(
    "roles",
    [
        ("executor",),
        pytest.param(("scheduler",), marks=pytest.mark.long),
        pytest.param(("tokenizer",), marks=pytest.mark.long),
        pytest.param(("scheduler", "executor"), marks=pytest.mark.long),
    ],
)
def test_whoever_is_killed_while_it_wakes(server: Server, roles: tuple[str, ...]) -> None:
    struck(server, WAKES, lambda: kill(server, *roles))


@pytest.mark.long
@pytest.mark.parametrize("roles", [("executor",), ("scheduler",), ("scheduler", "executor"), ("api",)])
def test_whoever_is_killed_while_it_sleeps(server: Server, roles: tuple[str, ...]) -> None:
    said = asked(server)
    sleeps(server)
    kill(server, *roles)
    server.logged("serving_again")
    server.healthy()
    assert asked(server) == said


@pytest.mark.long
@pytest.mark.parametrize("role", ["executor", "scheduler"])
def test_whoever_is_killed_while_it_falls_asleep(server: Server, role: str) -> None:
    said = asked(server)
    server.logged(SLEEPS)
    kill(server, role)
    server.logged("serving_again")
    server.healthy()
    assert asked(server) == said


@pytest.mark.long
def test_one_that_is_stopped_while_it_sleeps_is_found(server: Server) -> None:
    said = asked(server)
    sleeps(server)
    os.kill(server.children()["executor"], signal.SIGSTOP)
    server.logged("process_hangs child=executor-0")
    server.healthy()
    assert asked(server) == said


def test_the_operator_has_it_sleep_and_wake_with_the_weights_of_an_update(tmp_path: Path) -> None:
    write_folder(tmp_path / "weights" / "new")
    with serving(tmp_path, *options(tmp_path)) as server:
        before = asked(server)
        operate(server, "/update_weights_from_disk", {"model_path": "new"})
        said = asked(server)
        assert said != before
        assert operate(server, "/is_sleeping", method="GET") == {"is_sleeping": False}
        assert operate(server, "/sleep?level=1") == ""
        assert operate(server, "/is_sleeping", method="GET") == {"is_sleeping": True}
        assert operate(server, "/wake_up") == ""
        assert operate(server, "/is_sleeping", method="GET") == {"is_sleeping": False}
        assert asked(server) == said
        ended(server)


def test_both_members_of_a_group_sleep_and_wake_with_the_weights_that_they_kept(tmp_path: Path) -> None:
    words = ("--tensor-parallel-size", "2", "--max-num-seqs", "8")
    with serving(tmp_path, *IDLE, *words) as server:
        said, pids = asked(server), ranks(server)
        sleeps(server)
        restored = [f"executor-{rank} weights_restored" for rank in range(2)]
        before = [server.log.read_text().count(words) for words in restored]
        assert asked(server) == said
        assert ranks(server) == pids
        for words, count in zip(restored, before, strict=True):
            server.logged(words, count + 1)
        log = server.log.read_text()
        assert "group_broken" not in log
        assert [log.count(words) for words in restored] == [count + 1 for count in before]
        ended(server)


def test_weights_stay_in_the_hosts_memory(tmp_path: Path) -> None:
    write_folder(tmp_path / "weights" / "new")
    with serving(tmp_path, *options(tmp_path), "--keep-weights") as server:
        first = asked(server)
        assert "memfd:penstock-weights" in Path(f"/proc/{process(server)}/maps").read_text(), "its memory is reserved"
        assert not server.get("/health")["engine"]["kept_weight_bytes"]
        operate(server, "/sleep")
        server.until("/health", lambda found: found["engine"]["kept_weight_bytes"] > MIB)
        assert asked(server) == first
        server.logged("executor-0 weights_restored")

        operate(server, "/update_weights_from_disk", {"model_path": "new", "weight_version": "7"})
        said = asked(server)
        assert said != first
        operate(server, "/sleep?level=1")
        assert asked(server) == said
        server.logged("executor-0 weights_restored", 2)
        assert server.log.read_text().count("weights_written") == 1, "the update is what was kept"
        assert operate(server, "/get_weight_version", method="GET") == {"weight_version": "7"}

        operate(server, "/sleep")
        assert server.log.read_text().count("weights_kept") == 2, "they have not changed"
        operate(server, "/sleep?level=2")
        server.until("/health", lambda found: found["engine"]["asleep"] and not found["engine"]["kept_weight_bytes"])
        assert asked(server) == said
        server.logged("weights_written", 2)
        assert server.log.read_text().count("weights_written") == 2, "the update is read again"
        ended(server)
