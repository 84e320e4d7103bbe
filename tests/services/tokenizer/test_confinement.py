"""What runs in a child process stays within its limits, and tells only its answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.services.tokenizer.confinement import MEMORY_CODES, TIME_CODES, environment, forked, in_child

PLENTY = 1 << 30


def spin() -> bytes:
    while True:
        pass


def hoard() -> bytes:
    return bytes(PLENTY)[:1]


def die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def test_the_answer_comes_back_whole() -> None:
    body = os.urandom(1 << 20)
    assert in_child(lambda: body, 5.0, PLENTY) == (body, os.EX_OK)


def test_limits_end_the_child() -> None:
    assert in_child(spin, 0.05, PLENTY)[1] in TIME_CODES
    assert in_child(hoard, 5.0, 64 << 20)[1] in MEMORY_CODES
    assert in_child(die, 5.0, PLENTY)[1] in MEMORY_CODES


def test_a_child_is_ready_before_its_job_and_its_limits_are_the_jobs() -> None:
    """What it takes to get ready counts for neither; nor does the answer wait for the child's end."""
    held: list[bytes] = []

    def prepare() -> None:
        held.append(bytes(PLENTY >> 2))
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass

    child = forked(lambda job: job + str(len(held)).encode() + bytes(16 << 20)[:1], 0.1, 32 << 20, prepare)
    assert child.ask(b"job ") == b"job 1\0"
    assert child.end() == os.EX_OK
    late = forked(lambda _: spin(), 0.1, PLENTY, prepare)
    assert (late.ask(b""), late.end() in TIME_CODES) == (b"", True)


def test_a_child_that_goes_on_behind_its_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda _: signal.pause())
    child = forked(lambda job: job, 5.0, PLENTY)
    assert child.ask(b"a") == b"a"
    assert child.end(kill=True) == -signal.SIGKILL


def test_a_child_that_has_ended_before_its_job_says_nothing() -> None:
    child = forked(lambda job: job, 5.0, PLENTY, die)
    assert (child.ask(bytes(4 << 20)), child.end()) == (b"", -signal.SIGKILL)


@pytest.mark.parametrize(
    "work",
    [
        lambda: Path("/etc/hostname").read_bytes(),
        lambda: str(socket.socket()).encode(),
        lambda: subprocess.check_output([sys.executable, "-c", "pass"]),
    ],
    ids=["file", "socket", "process"],
)
def test_it_reaches_nothing(work: object) -> None:
    assert callable(work)
    assert in_child(work, 5.0, PLENTY) == (b"", os.EX_SOFTWARE)


def test_a_worker_gets_no_secrets() -> None:
    given = {"PATH": "p", "PENSTOCK_API_KEY": "k", "HF_TOKEN": "t", "TZ": "UTC"}
    assert environment(given) == {"PATH": "p", "TZ": "UTC"}
