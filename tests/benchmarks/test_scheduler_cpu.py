"""The benchmark runs and measures what it says; its figures are not judged here, the machine may be busy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import scheduler_cpu


@pytest.mark.parametrize("load", ["steady", "aligned", "drafts"])
def test_every_step_is_measured(load: str) -> None:
    measured = scheduler_cpu.measure(8, 300, load)
    assert set(measured.microseconds) == {"plan", "apply", "plan+apply", "outputs"}
    assert all(0 < timing.median <= timing.p90 <= timing.p99 for timing in measured.microseconds.values())
    assert (measured.ended > 0) == (load != "aligned")
    assert (measured.reused_share > 0) == (load != "aligned")
    assert (measured.drafts > measured.accepted > 0) == (load == "drafts")


def test_the_result_is_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["scheduler_cpu", "--running", "4", "--steps", "20", "--out", str(out)])
    scheduler_cpu.main()
    report = json.loads(out.read_text())
    assert [row["running"] for row in report["measured"]] == [4, 4, 4]
    assert [row["load"] for row in report["measured"]] == ["steady", "aligned", "drafts"]
    assert report["depth"] == 2
