from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import in_turns, report


@pytest.mark.parametrize(("row", "old", "new", "expected"), [
    ("lat_bs1", [4.0, 4.0, 9.0], [3.0, 3.0, 3.0], 25.0),  # milliseconds: less is better
    ("bs64", [100.0, 100.0], [99.0, 99.0], -1.0),  # tokens a second
])  # fmt: skip
def test_better_is_told_from_medians(row: str, old: list[float], new: list[float], expected: float) -> None:
    assert in_turns.better(in_turns.ROWS[row], old, new) == expected


@pytest.mark.long
def test_a_tree_against_itself(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    words = [str(report.ROOT), "--old-commit", "same", "--smoke", "--models", "smoke", "--rows", "lat_bs1", "--turns",
             "2", "--output", str(output)]  # fmt: skip
    assert in_turns.main(words) == 0
    (found,) = json.loads(output.read_bytes())["rows"]
    assert len(found["old"]) == len(found["new"]) == 2
    assert found["unit"] == "ms per token"
