"""Tokens a second on a modelled device: every request gets its tokens, and both trees are compared burst by burst."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks import mask_pace


def test_both_bursts_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(mask_pace, "BURSTS", (16, 24))
    words = ["mask_pace", "--shape", "smoke", "--loads", "0+2", "9+3", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    mask_pace.main()
    found = [msgspec.convert(each, mask_pace.Burst) for each in json.loads(out.read_bytes())["bursts"]]
    assert [(each.load, each.number) for each in found] == [("0+2", 0), ("0+2", 1), ("9+3", 0), ("9+3", 1)]
    assert [sorted(each.step_ms) for each in found] == [["free"]] * 2 + [["constrained", "free"]] * 2
    for each in found:
        assert each.tokens_per_second > 0
        assert each.first_ms > mask_pace.STEP * 1e3
        assert min(each.step_ms.values()) > mask_pace.STEP * 1e3


def test_of_several_rounds_the_middle_counts_and_of_the_hosts_time_the_least() -> None:
    rounds = [mask_pace.Burst("1+0", "text", 0, 10.0 * n, 1.0 * n, 2.0 * n, {"constrained": 3.0 * n}, 0.0, 0.0)
              for n in (3, 1, 2)]  # fmt: skip
    found = mask_pace.middle(tuple(rounds))
    assert (found.tokens_per_second, found.host_us, found.first_ms) == (20.0, 1.0, 4.0)
    assert found.step_ms == {"constrained": 6.0}
