"""What must not be left of a disturbed run: requests, blocks, descriptors and memory in a server that goes on, and
processes and files of one that has ended."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.server import LIMIT, Server, descendants
from tests.e2e.test_processes import wait_gone

KEPT = frozenset(("lock", "crashes"))  # what an ended server leaves in its run directory
CLOSING = 60.0  # seconds until connections of clients that are gone are closed
GROWTH, SLACK = 1.1, 24 << 20  # of a process's memory, in bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """What a process has."""

    descriptors: int
    resident: int  # bytes


def holdings(server: Server) -> dict[int, Holding]:
    """By pid, of all processes of a server that rests."""
    found = {}
    for pid in descendants(server.process.pid):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[pid] = Holding(len(os.listdir(f"/proc/{pid}/fd")), pages * resource.getpagesize())
    return found


def whole(health: dict[str, Any]) -> bool:
    """Nobody is in the engine, no block is held, and every process is there."""
    engine, tokenizers = health["engine"], health["parts"]["tokenizer"]
    quiet = engine is not None and engine["running"] == engine["waiting"] == 0
    back = quiet and engine["blocks_free"] + engine["blocks_idle"] == engine["blocks"]
    return bool(back and health["ready"] and tokenizers["connected"] == tokenizers["configured"])


def all_back(log: str) -> bool:
    """Whether the launcher knows that whoever has died is there again: from then on it finds one that hangs."""
    return log.rfind(" serving_again") >= max(log.rfind(" process_died "), log.rfind(" group_broken "))


def at_rest(server: Server) -> None:
    """Wait until no request is left, no block is held and every process is there again, by a heartbeat from now on."""
    deadline = time.monotonic() + LIMIT
    while not all_back(log := server.log.read_text()):
        assert time.monotonic() < deadline, log
        select.select([], [], [], 0.02)
    asked = time.time()
    server.until("/health", lambda health: whole(health) and health["engine"]["time"] > asked)
    server.until("/health", lambda health: health["capacity"]["unfinished_requests"] == 0)


def nothing_kept(server: Server, before: dict[int, Holding]) -> None:
    """Those who lived through it have no more than they had: descriptors, once connections have closed, and memory."""
    at_rest(server)
    deadline = time.monotonic() + CLOSING
    while more := [pid for pid, now in holdings(server).items() if beyond(now, before.get(pid, now))]:
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2:4] for pid in more}
        assert time.monotonic() < deadline, (words, before, holdings(server))
        select.select([], [], [], 0.1)


def beyond(now: Holding, had: Holding) -> bool:
    return now.descriptors > had.descriptors or now.resident > had.resident * GROWTH + SLACK


def ended(server: Server) -> None:
    """The server ends in order, and nothing of it is left."""
    pids = descendants(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(LIMIT) == 0
    wait_gone(pids)
    assert {path.name for path in server.run_dir.iterdir()} <= KEPT
