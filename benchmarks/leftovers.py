"""What must not be left of faults: requests and blocks in a server that goes on, memory in those who lived through it;
processes, files and memory of a device behind one that has ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.samples import Sample

from benchmarks.blows import ROLES
from benchmarks.samples import scrape, total
from benchmarks.server import Server
from benchmarks.soak import below

REST_LIMIT = 60.0  # seconds until everything is back
END_LIMIT = 30.0  # seconds until nothing of an ended server is left
LOOK = 0.05  # seconds between looks
GROWTH, SLACK = 1.1, 24.0  # of a process's memory while others die, and MiB
DEVICE_SLACK = 64.0  # MiB
KEPT = frozenset(("lock", "crashes"))  # what an ended server leaves in a run directory that it was given


def soon(done: Callable[[], bool], limit: float) -> bool:
    """Whether something comes true within so many seconds."""
    deadline = time.monotonic() + limit
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK)
    return True


def rests(url: str, asked: float) -> bool:
    """Whether nobody is in the engine, no block is held, every process is there, and no account of blocks was wrong."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            health = json.load(answer)
        found = scrape(url)
    except OSError:
        return False
    return whole(health, asked) and settled(found)


def whole(health: Mapping[str, Any], asked: float) -> bool:
    engine, tokenizers = health["engine"], health["parts"]["tokenizer"]
    if engine is None or engine["time"] <= asked:
        return False
    quiet = engine["running"] == engine["waiting"] == health["capacity"]["unfinished_requests"] == 0
    back = engine["blocks_free"] + engine["blocks_idle"] == engine["blocks"]
    return bool(health["ready"] and quiet and back and tokenizers["connected"] == tokenizers["configured"])


def settled(samples: Sequence[Sample]) -> bool:
    """The same by the metrics of all processes."""
    there = all(
        total(samples, "processes", role=role) == total(samples, "configured_processes", role=role) for role in ROLES
    )
    free, idle, unfinished, faults = (
        total(samples, name)
        for name in ("engine_blocks_free", "engine_blocks_idle", "unfinished_requests", "engine_block_faults_total")
    )
    return there and free + idle == total(samples, "engine_blocks") > 0 and unfinished == faults == 0


def processes(launcher: int, role: str) -> list[int]:
    """Pids of a role's processes, by their numbers. One that died a moment ago is waited for."""

    def found() -> list[int]:
        words = [(command(pid)[:4], pid) for pid in below(launcher)]  # python, entry, role, --index=N
        return [pid for each, pid in sorted(words) if role.encode() in each]

    soon(lambda: bool(found()), REST_LIMIT)
    return found()


def command(pid: int) -> list[bytes]:
    """The words that a process was started with; none once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def device_memory() -> float | None:
    """MiB of the first GPU's memory that anybody has; None where there is no GPU."""
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    ask = ["nvidia-smi", f"--id={number}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(ask, capture_output=True, text=True, check=True, timeout=20).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def grown(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Processes that lived through it and have much more memory than they had, in words."""
    return [
        f"{name} with {now[name]:.0f} MiB in place of {had:.0f}"
        for name, had in before.items()
        if name in now and now[name] > had * GROWTH + SLACK
    ]


def remains(server: Server, pids: Sequence[int], run_dir: Path, before: float | None) -> list[str]:
    """What is left of a server that has ended, in words."""
    found = [] if server.code == 0 else [f"an exit with {server.code}"]
    if not soon(lambda: not any(map(command, pids)), END_LIMIT):
        found += [f"process {pid}" for pid in pids if command(pid)]
    found += [f"file {path.name}" for path in run_dir.iterdir() if path.name not in KEPT]
    if before is not None and not soon(lambda: (device_memory() or 0.0) <= before + DEVICE_SLACK, END_LIMIT):
        found.append(f"{(device_memory() or 0.0) - before:.0f} MiB of the device's memory")
    return found
