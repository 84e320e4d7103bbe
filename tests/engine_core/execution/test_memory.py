"""What a CPU has available, with and without a control group's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_core.execution.memory import available_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         300 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [(None, None, 600 << 10), ("max", "5", 600 << 10), ("500000", "100000", 400_000), ("10", "20", 0)],
)
def test_available(tmp_path: Path, limit: str | None, current: str | None, expected: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    if limit is not None and current is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(current + "\n")
    assert available_memory(meminfo, tmp_path) == expected


def test_this_machine_has_memory() -> None:
    assert available_memory() > 1 << 20
