"""What every result file says of its measurement: command, commit, date, machine, versions and chip."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).absolute().parents[1]
VERSIONS = ("penstock", "torch", "triton", "transformers", "msgspec", "pyzmq", "uvloop", "uvicorn")
WRITTEN = (":(exclude)benchmarks/results", ":(exclude)README.md", ":(exclude)docs")


def commit() -> str:
    """The commit of this tree, with a plus if it was changed since; empty in an export.

    Files written from results count as no change, so that one measurement does not mark the next.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", ".", *WRITTEN)
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def machine() -> dict[str, Any]:
    """The machine that runs this process."""
    return {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)), "cpu": cpu_model()}  # fmt: skip


def cpu_model() -> str:
    """The processor's name, or the architecture where Linux does not give one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> dict[str, str]:
    """Installed releases of the packages that figures depend on."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def header(benchmark: str, words: Sequence[str] | None = None, known_commit: str = "") -> dict[str, Any]:
    """Where a measurement comes from, with the chip if torch is imported and has one. `words`: the command's arguments,
    by default this process's. `known_commit`: for a copy without git."""
    arguments = sys.argv[1:] if words is None else words
    torch = sys.modules.get("torch")
    chip = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else ""
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *arguments]),
        "commit": known_commit or commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
    } | ({"chip": chip} if chip else {})


def write(path: Path, benchmark: str, results: Mapping[str, Any] | msgspec.Struct, words: Sequence[str] | None = None,
          known_commit: str = "") -> None:  # fmt: skip
    """Write results as JSON below the `header` of their measurement."""
    report = header(benchmark, words, known_commit) | msgspec.to_builtins(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
