"""The benchmark of weight updates, small on a CPU: its figures are there, and no stream was lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import weight_updates


@pytest.mark.long
def test_every_way_is_measured_and_streams_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert weight_updates.main(["--smoke", "--output", str(out), "--commit", "0"]) == 0
    found = json.loads(out.read_text())
    assert [update["way"] for update in found["updates"]] == ["disk", "shm"]
    assert [update["versions"] for update in found["updates"]] == [["1"], ["2"]]
    assert found["wake"]["first_token"] > 0
