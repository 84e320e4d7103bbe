"""What a result file says of its measurement."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

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
    assert found["machine"]["cpu"]
    assert found["versions"]["torch"]
    assert provenance.lacking(path) == []


def test_results_may_be_a_dict(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    report.write(path, "x", {"figures": [Found([2.0])]})
    found = json.loads(path.read_text())
    assert (found["commit"], found["figures"]) == (report.commit(), [{"rates": [2.0]}])


def test_every_benchmark_leaves_its_header_to_the_report() -> None:
    """Nothing else asks git or the processor, so that no result says less than another."""
    written = [path.name for path in (report.ROOT / "benchmarks").glob("*.py") if path.name != "report.py"
               if re.search(r"rev-parse|git.*describe|cpuinfo|import .*\b(commit|machine)\b",
                            path.read_text())]  # fmt: skip
    assert written == []


def test_uncommitted_changes_are_marked_and_results_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    files = [tmp_path / "benchmarks" / "results" / "a.json", tmp_path / "a.py"]
    for file in files:
        file.touch()
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    files[0].write_text("{}")
    clean = report.commit()
    files[1].write_text("1")
    assert len(clean) == 12
    assert report.commit() == clean + "+"
