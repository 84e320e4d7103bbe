"""What every result file says of its measurement: the command, the commit, the time and the machine."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).absolute().parents[1]
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
    """The machine of the measurement, as far as this side knows it."""
    return {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0))}  # fmt: skip


def header(benchmark: str, words: Sequence[str] | None = None, known_commit: str = "") -> dict[str, Any]:
    """The command, commit, date and machine of a measurement that ends now, and its chip if torch has one. `words` are
    the command's arguments, by default this process's; `known_commit` is for a copy without git."""
    arguments = sys.argv[1:] if words is None else words
    found = {
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *arguments]),
        "commit": known_commit or commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
    }
    torch = sys.modules.get("torch")
    return found | ({"chip": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {})


def write(path: Path, benchmark: str, results: Mapping[str, Any] | msgspec.Struct, words: Sequence[str] | None = None,
          known_commit: str = "") -> None:  # fmt: skip
    """Write results as JSON below the `header` of their measurement."""
    report = header(benchmark, words, known_commit) | msgspec.to_builtins(results)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
