"""What is left of an engine: processes by their command lines, and its run directory."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

LIMIT = 120.0  # seconds; a loaded machine needs some of them


def engine_processes(run_dir: str) -> list[int]:
    """Living processes that were started with this run directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"--run-dir={run_dir}".encode() in words:
            found.append(int(path.parent.name))
    return found


def engine_process(run_dir: str, command: str) -> int:
    """The one process of an engine that runs this command."""
    (found,) = [
        pid
        for pid in engine_processes(run_dir)
        if command.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    return found


def dead(run_dir: str) -> None:
    """Wait until no process of an engine is left; an assertion fails when one stays."""
    deadline = time.monotonic() + LIMIT
    while left := engine_processes(run_dir):
        assert time.monotonic() < deadline, left
        select.select([], [], [], 0.02)


def gone(run_dir: str) -> None:
    """The same, and of its run directory."""
    dead(run_dir)
    deadline = time.monotonic() + LIMIT
    while os.path.exists(run_dir):
        assert time.monotonic() < deadline, run_dir
        select.select([], [], [], 0.02)
