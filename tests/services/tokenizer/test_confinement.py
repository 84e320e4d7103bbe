"""What runs in a child process stays within its limits, and tells only its answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services.tokenizer.confinement import MEMORY_CODES, TIME_CODES, environment, in_child

PLENTY = 1 << 30


def spin() -> bytes:
    while True:
        pass


def hoard() -> bytes:
    return bytes(PLENTY)


def die() -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def test_the_answer_comes_back_whole() -> None:
    body = os.urandom(1 << 20)
    assert in_child(lambda: body, 5.0, PLENTY) == (body, os.EX_OK)


def test_limits_end_the_child() -> None:
    assert in_child(spin, 0.05, PLENTY)[1] in TIME_CODES
    assert in_child(hoard, 5.0, 64 << 20)[1] in MEMORY_CODES
    assert in_child(die, 5.0, PLENTY)[1] in MEMORY_CODES


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
