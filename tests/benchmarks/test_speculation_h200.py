"""Drafts at a set acceptance: loads, counters, the table, goals; and a small run where servers draft."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.samples import read_samples
from benchmarks.shapes import EIGHT
from benchmarks.speculation_h200 import (
    BATCHES,
    Figures,
    Report,
    counters,
    load,
    main,
    missed,
    read,
    speculative,
    table,
)
from penstock.protocol.speculation import read_speculative


def report(rate: float | None, *times: float) -> Report:
    figures = tuple(
        Figures(batch=batch, tpot_ms=time, output_tokens_per_second=1000 / time, drafts=10, accepted=4)
        for batch, time in zip((1, 8), times, strict=True)
    )
    return Report(rate=rate, model="8b", drafts=4, figures=figures, start_seconds=9.5)


def test_every_server_gets_the_same_loads() -> None:
    for batch in BATCHES:
        workload = load(batch, EIGHT, smoke=False)
        assert workload == load(batch, EIGHT, smoke=False)
        assert (workload.concurrency, workload.requests % batch) == (batch, 0)


def test_the_option_is_what_a_server_reads() -> None:
    found = read_speculative(speculative(Path("draft"), 0.8))
    assert (found.method, found.num_speculative_tokens, found.synthetic_acceptance) == ("draft_model", 4, 0.8)


def test_counters_of_the_metrics() -> None:
    text = (
        "# TYPE penstock_engine_drafts_total counter\npenstock_engine_drafts_total 3.0\n"
        'penstock_engine_draft_tokens_total{engine="0"} 12.0\npenstock_engine_draft_tokens_total{engine="1"} 1.0\n'
        "penstock_engine_accepted_tokens_total 7.0\n"
        'penstock_engine_accepted_tokens_by_position_total{position="0"} 9.0\n'
    )
    assert counters(read_samples(text)) == {"drafts": 3, "draft_tokens": 13, "accepted_tokens": 7}


def test_the_table_is_against_the_server_without_drafts() -> None:
    lines = table([report(None, 4.0, 4.4), report(0.8, 1.6, 2.2)]).splitlines()
    assert [line.split()[:4] for line in lines[3:]] == [["0.8", "1", "1.600", "2.50x"], ["0.8", "8", "2.200", "2.00x"]]
    assert lines[3].endswith("0.400")
    assert "-" in table([report(0.8, 1.6, 2.2)])


def test_goals() -> None:
    assert missed([report(None, 4.0, 4.4), report(0.0, 4.1, 4.5), report(0.8, 1.8, 4.4)]) == []
    told = missed([report(None, 4.0, 4.4), report(0.0, 4.2, 4.4), report(0.8, 2.0, 1.0)])
    assert told == [
        "batch 1: rate 0.0 costs 5.0 %, at most 3 % are allowed",
        "batch 1: rate 0.8 is 2.00 times as fast, 2.2 are asked for",
    ]


def test_reports_are_read_in_order(tmp_path: Path) -> None:
    for one in (report(1.0, 1, 1), report(None, 4, 4), report(0.5, 2, 2)):
        (tmp_path / f"{one.name}.json").write_bytes(msgspec.json.encode(one))
    assert [one.rate for one in read(tmp_path)] == [None, 0.5, 1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["off.json", "rate_0.5.json", "rate_1.0.json"]


@pytest.mark.long
def test_a_small_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How fast the machine is, is no matter of this test."""
    main(["--smoke", "--rates", "off,1.0", "--batches", "1,2", "--output", str(tmp_path)])
    assert "accepted" in capsys.readouterr().out
    off, kept = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("off", "rate_1.0"))
    assert [one["batch"] for one in off["figures"]] == [1, 2]
    assert all(one["switched_off_tpot_ms"] is None and one["drafts"] == 0 for one in off["figures"])
    assert all(one["accepted"] == one["drafts"] for one in kept["figures"])
    assert any(one["drafts"] for one in kept["figures"]), "whether drafts pay at a batch is measured, here as anywhere"
