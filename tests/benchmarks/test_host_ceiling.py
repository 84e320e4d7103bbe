"""The host's cost by role: one small run with every process, and its text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.host_ceiling import ROLES, Load, main, ready, text
from penstock.services.bench.serve import summarize
from penstock.services.bench.workload import Record
from penstock.services.supervisor.sd_notify import NoticeSocket


def load(**microseconds: float) -> Load:
    records = [Record(0, 0, start=0.0, first=0.1, last=1.1, end=1.1, events=11, tokens=11, gaps=bytes(80))]
    return Load(name="two streams", step_ms=5.0, summary=summarize(records), processes={"api": 1, "tokenizer": 1},
                microseconds=microseconds, client_microseconds=14.0)  # fmt: skip


def test_the_text_says_where_a_process_would_be_full() -> None:
    lines = text(load(api=20.0, tokenizer=0.0, scheduler=4.0)).splitlines()
    assert "100.00 ms" in lines[0]
    assert lines[1].split() == ["api", "20.00", "µs", "a", "token", "50,000", "tok/s", "in", "one", "process"]
    assert lines[2].split() == ["tokenizer", "0.00", "µs", "a", "token"]
    assert len(lines) == 5


def test_processes_that_do_not_get_ready_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.host_ceiling.START_LIMIT", 0.0)
    notices = NoticeSocket(tmp_path / "s")
    with pytest.raises(TimeoutError):
        ready(notices, {1})
    assert ready(notices, set()) == ""
    notices.close()


def test_a_run_with_every_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "host.json"
    words = ["--shape", "smoke", "--concurrency", "4", "--tokens", "6", "--step", "1", "--apis", "2", "--alone", "3"]
    assert main([*words, "--vocab", "4000", "--output", str(output)]) == 0
    record = json.loads(output.read_bytes())
    streams, alone = record["loads"]
    assert (streams["name"], streams["processes"]) == ("4 streams", {"api": 2, "tokenizer": 1})
    assert streams["summary"]["output_tokens"] == 24
    assert alone["summary"]["completed"] == 3
    assert set(streams["microseconds"]) == set(ROLES)
    assert "time to first token" in capsys.readouterr().out
