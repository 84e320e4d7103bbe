"""What every result file says of its measurement: the command, the commit, the time and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

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
