"""A heartbeat is told at its pace to who asked for it, and to nobody else."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from penstock.services.supervisor.sd_notify import Heartbeat, NoticeSocket, notify, send_heartbeats


def beats(folder: Path, **environ: str) -> list[float]:
    """Seconds at which somebody heard it, of ten seconds in steps of a half."""
    listener = NoticeSocket(folder / "notify.sock")
    heartbeat = Heartbeat({"NOTIFY_SOCKET": str(listener.path), **environ})
    heard = []
    for half in range(20):
        heartbeat.tick(1000.0 + half / 2)
        heard += [half / 2 for notice in listener.receive() if notice.fields["WATCHDOG"] == "1"]
    listener.close()
    return heard


def test_it_beats_four_times_in_the_interval(tmp_path: Path) -> None:
    assert beats(tmp_path, WATCHDOG_USEC="8000000") == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert beats(tmp_path, WATCHDOG_USEC="4000000", WATCHDOG_PID=str(os.getpid())) == [float(n) for n in range(10)]


def test_who_beats_is_waited_for(tmp_path: Path) -> None:
    """A process that waits for others before it is ready: systemd's limit of a start moves on with each beat."""
    listener = NoticeSocket(tmp_path / "notify.sock")
    Heartbeat({"NOTIFY_SOCKET": str(listener.path), "WATCHDOG_USEC": "8000000"}).tick(1.0)
    assert [notice.fields["EXTEND_TIMEOUT_USEC"] for notice in listener.receive()] == ["16000000"]
    listener.close()


def test_what_a_late_supervisor_has_lost_comes_with_the_next_beat(tmp_path: Path) -> None:
    listener = NoticeSocket(tmp_path / "notify.sock")
    environ = {"NOTIFY_SOCKET": str(listener.path), "WATCHDOG_USEC": "8000000"}
    heartbeat = Heartbeat(environ)
    while notify("WATCHDOG=1", environ=environ):
        pass  # the kernel keeps no more of them
    heartbeat.tell("X_PENSTOCK_URL=http://here")
    for _ in range(2):
        heartbeat.tell("READY=1", "STATUS=serving")
    assert not any(notice.ready for notice in listener.receive())
    heartbeat.tick(1000.0)
    (notice,) = listener.receive()
    beat = {"WATCHDOG": "1", "EXTEND_TIMEOUT_USEC": "16000000"}
    assert notice.fields == beat | {"X_PENSTOCK_URL": "http://here", "READY": "1"}
    listener.close()


def test_what_is_told_comes_at_once_with_all_before_it_and_a_status_once(tmp_path: Path) -> None:
    listener = NoticeSocket(tmp_path / "notify.sock")
    heartbeat = Heartbeat({"NOTIFY_SOCKET": str(listener.path)})  # nobody asked for beats
    heartbeat.tell("X_PENSTOCK_URL=http://here", "STATUS=waiting")
    heartbeat.tell("READY=1", "STATUS=serving")
    heartbeat.tick(1000.0)
    assert [notice.fields for notice in listener.receive()] == [
        {"X_PENSTOCK_URL": "http://here", "STATUS": "waiting"},
        {"X_PENSTOCK_URL": "http://here", "READY": "1", "STATUS": "serving"},
    ]
    listener.close()


def test_who_is_ready_is_watched_from_then_on(tmp_path: Path) -> None:
    """A process may hang between its readiness and the first look at the clock."""
    listener = NoticeSocket(tmp_path / "notify.sock")
    heartbeat = Heartbeat({"NOTIFY_SOCKET": str(listener.path), "WATCHDOG_USEC": "8000000"})
    heartbeat.tell("X_PENSTOCK_URL=http://here")
    heartbeat.tell("READY=1", "STATUS=serving")
    assert [notice.fields.get("WATCHDOG") for notice in listener.receive()] == [None, "1"]
    listener.close()


async def test_a_loop_beats_as_long_as_it_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = NoticeSocket(tmp_path / "notify.sock")
    heartbeat = Heartbeat({"NOTIFY_SOCKET": str(listener.path), "WATCHDOG_USEC": "40000"})
    beats = asyncio.create_task(send_heartbeats(heartbeat))
    heard = 0
    async with asyncio.timeout(60):
        while heard < 3:
            heard += len(listener.receive())
            await asyncio.sleep(0.005)
    beats.cancel()
    listener.close()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": ""},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "8000000", "WATCHDOG_PID": "1"},
    ],
)
def test_nobody_asked(tmp_path: Path, environ: dict[str, str]) -> None:
    assert beats(tmp_path, **environ) == []


def test_it_beats_with_no_descriptor_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever falls silent is killed, which would make a shortage of descriptors the end of a process."""
    listener = NoticeSocket(tmp_path / "notify.sock")
    environ = {"NOTIFY_SOCKET": str(listener.path), "WATCHDOG_USEC": "8000000"}
    heartbeat = Heartbeat(environ)
    monkeypatch.setattr(socket, "socket", exhausted)
    heartbeat.tick(1.0)
    assert [notice.fields["WATCHDOG"] for notice in listener.receive()] == ["1"]
    assert not notify("READY=1", environ=environ), "what is told once is lost, and nothing is raised"
    heartbeat.tell("READY=1")
    heartbeat.tick(3.0)
    assert [notice.ready for notice in listener.receive()] == [True], "what holds for good comes with the next beat"
    monkeypatch.undo()
    listener.close()


def exhausted(*_: object) -> socket.socket:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
