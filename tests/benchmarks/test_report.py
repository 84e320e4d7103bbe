"""What a result file says of its measurement."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import msgspec

from benchmarks import provenance, report


class Found(msgspec.Struct):
    """A benchmark's results."""

    rates: list[float]


def test_results_stand_below_their_command_commit_and_date(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    report.write(path, "soak", Found([1.5]), ["--seconds", "3", "a b"], known_commit="abc")
    found = json.loads(path.read_text())
    assert found["command"] == "python -m benchmarks.soak --seconds 3 'a b'"
    assert (found["commit"], found["rates"]) == ("abc", [1.5])
    assert datetime.date.fromisoformat(found["date"])
    assert found["machine"]["cores"] > 0
    assert provenance.lacking(path) == []


def test_results_may_be_a_dict(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    report.write(path, "x", {"figures": [Found([2.0])]})
    found = json.loads(path.read_text())
    assert (found["commit"], found["figures"]) == (report.commit(), [{"rates": [2.0]}])
