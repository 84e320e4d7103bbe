"""A heartbeat is told at its pace to who asked for it, and to nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.heartbeat import Heartbeat
from services.notify import NoticeSocket


def beats(folder: Path, **environ: str) -> list[float]:
    """Seconds at which somebody heard it, of ten seconds in steps of a half."""
    listener = NoticeSocket(folder / "notify.sock")
    heartbeat = Heartbeat({"NOTIFY_SOCKET": str(listener.path), **environ})
    heard = []
    for half in range(20):
        heartbeat.tick(1000.0 + half / 2)
        heard += [half / 2 for notice in listener.receive() if notice.fields == {"WATCHDOG": "1"}]
    listener.close()
    return heard


def test_it_beats_four_times_in_the_interval(tmp_path: Path) -> None:
    assert beats(tmp_path, WATCHDOG_USEC="8000000") == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert beats(tmp_path, WATCHDOG_USEC="4000000", WATCHDOG_PID=str(os.getpid())) == [float(n) for n in range(10)]


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
