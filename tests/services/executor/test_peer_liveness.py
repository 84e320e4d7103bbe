"""An end is heard at once, whatever else a process does; what follows depends on who was told to end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.services.executor import peer_liveness as module
from penstock.services.executor.peer_liveness import PeerLiveness, keep_alive
from penstock.services.supervisor.process import ExitCode

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 30.0  # that anything may take


class Told:
    """A `Stop` that a test gives."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.asked = False

    def fileno(self) -> int:
        return self.reader

    def tell(self) -> None:
        self.asked = True
        os.write(self.writer, b"x")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def stop() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def watched(
    liveness: PeerLiveness, stop: Told, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Thread, threading.Event, list]:
    left: list[ExitCode] = []
    monkeypatch.setattr(module, "leave", left.append)
    done = threading.Event()
    thread = threading.Thread(target=liveness.watch, args=(stop, done))
    thread.start()
    return thread, done, left


def test_the_end_of_another_member_ends_the_process(monkeypatch: pytest.MonkeyPatch, stop: Told, pair) -> None:
    ours, theirs = pair
    thread, _, left = watched(PeerLiveness([ours]), stop, monkeypatch)
    theirs.close()
    thread.join(SECONDS)
    assert left == [ExitCode.GROUP]


def test_one_that_is_told_to_end_ends_by_itself(monkeypatch: pytest.MonkeyPatch, stop: Told, pair) -> None:
    monkeypatch.setattr(module, "DRAIN_SECONDS", SECONDS)
    ours, theirs = pair
    stop.tell()
    thread, done, left = watched(PeerLiveness([ours]), stop, monkeypatch)
    theirs.close()
    done.set()
    thread.join(SECONDS)
    assert left == []


def test_unless_it_waits_for_the_others(monkeypatch: pytest.MonkeyPatch, stop: Told, pair) -> None:
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.05)
    ours, theirs = pair
    stop.tell()
    thread, _, left = watched(PeerLiveness([ours]), stop, monkeypatch)
    theirs.close()
    thread.join(SECONDS)
    assert left == [ExitCode.ORDERLY]


def test_one_that_has_done_all_watches_nothing(monkeypatch: pytest.MonkeyPatch, stop: Told, pair) -> None:
    thread, done, left = watched(PeerLiveness([pair[0]]), stop, monkeypatch)
    done.set()
    thread.join(SECONDS)
    assert left == []


@pytest.mark.parametrize("code", [ExitCode.GROUP, ExitCode.ORDERLY])
def test_leaving_needs_no_thread_that_turns(code: ExitCode) -> None:
    """The main thread of this process waits for ever in native code."""
    text = (
        "import signal, threading, time\n"
        "from penstock.services.executor.peer_liveness import leave\n"
        "from penstock.services.supervisor.process import ExitCode\n"
        f"threading.Thread(target=leave, args=(ExitCode({int(code)}),)).start()\n"
        "threading.Event().wait()"
    )
    ended = subprocess.run([sys.executable, "-c", text], cwd=ROOT, timeout=SECONDS, check=False)
    assert ended.returncode == code


def test_the_end_of_a_killed_process_is_heard(pair) -> None:
    ours, theirs = pair
    held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], pass_fds=[theirs.fileno()])
    theirs.close()
    liveness = PeerLiveness([ours])
    assert not liveness.broken(0.0)
    held.send_signal(signal.SIGKILL)
    assert liveness.broken(SECONDS)
    held.wait()


def test_the_address_is_the_one_by_which_the_others_reach_this_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        assert PeerLiveness([link]).address == "127.0.0.1"


def test_the_end_of_a_host_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        keep_alive(link)
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (link.getsockopt(socket.IPPROTO_TCP, option) for option, _ in module.KEEPALIVE)
        assert idle + interval * count <= 11


@pytest.mark.parametrize("discard", [False, True])
def test_a_member_that_sleeps_takes_the_others_along(
    monkeypatch: pytest.MonkeyPatch, stop: Told, pair, *, discard: bool
) -> None:
    ours, theirs = pair
    liveness = PeerLiveness([ours])
    thread, _, left = watched(liveness, stop, monkeypatch)
    other = PeerLiveness([theirs])
    other.say_sleep(discard=discard)
    other.close()
    thread.join(SECONDS)
    assert (liveness.asleep, liveness.discards) == (True, discard)
    assert left == []
    liveness.say_sleep(discard=discard)  # to one that has gone
