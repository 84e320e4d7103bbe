"""The api processes' entries for one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.protocol.config import Config
from penstock.protocol.links import Role
from penstock.services.client.engine_client import PipelineStatistics
from penstock.services.metrics.exposition import Scrape
from penstock.services.metrics.requests import Traffic
from penstock.services.metrics.shared_files import STALE, Entry, Ledger
from tests.services.metrics.figures import census, every


def entry(index: int, tokens: int, time: float = 0.0) -> Entry:
    traffic = Traffic()
    traffic.answered("/v1/completions", 200, 3, tokens, 0.5)
    traffic.timings.first_token.observe(0.004)
    return Entry.of(index, traffic, PipelineStatistics(index, 2, 5, 1, 0, 0, 0), every(Role.API, index, time))


def test_each_process_reads_what_the_others_wrote(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path, index, 3) for index in range(3)]
    assert ledgers[0].others(0.0) == []
    ledgers[1].write(entry(1, 10))
    ledgers[2].write(entry(2, 20))
    assert ledgers[0].others(0.0) == [entry(1, 10), entry(2, 20)]
    assert ledgers[1].others(0.0) == [entry(2, 20)]
    ledgers[2].write(entry(2, 25))
    assert ledgers[0].others(0.0) == [entry(1, 10), entry(2, 25)]
    ledgers[1].close()
    assert ledgers[0].others(0.0) == [entry(2, 25)]
    assert [path.name for path in tmp_path.iterdir()] == ["api-2.entry"]


def test_who_writes_no_more_is_not_counted(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path, index, 2) for index in range(2)]
    ledgers[1].write(entry(1, 10, time=100.0))
    assert ledgers[0].others(100.0 + STALE) == [entry(1, 10, time=100.0)]
    assert ledgers[0].others(100.1 + STALE) == []
    ledgers[1].write(entry(1, 11, time=110.0))
    assert ledgers[0].others(110.0) == [entry(1, 11, time=110.0)]


def test_one_process_alone_writes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0, 1)
    ledger.write(entry(0, 1))
    assert ledger.others(0.0) == []
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_costs_figures_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledgers = [Ledger(tmp_path, index, 2) for index in range(2)]
    (tmp_path / "api-1.entry.new").mkdir()
    for _ in range(3):
        ledgers[1].write(entry(1, 10))
    assert ledgers[0].others(0.0) == []
    (tmp_path / "api-1.entry.new").rmdir()
    ledgers[1].write(entry(1, 11))
    assert ledgers[0].others(0.0) == [entry(1, 11)]
    (tmp_path / "api-1.entry.new").mkdir()
    ledgers[1].write(entry(1, 12))
    assert [record.getMessage() for record in caplog.records] == ["no_entry"] * 2
    ledgers[1].close()
    assert ledgers[0].others(0.0) == []


def test_what_is_no_entry_is_passed_over(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0, 3)
    (tmp_path / "api-1.entry").write_bytes(b"\xc1")
    (tmp_path / "api-2.entry").write_bytes(b"\x91\x01")
    assert ledger.others(0.0) == []


def test_a_scrape_keeps_the_processes_apart() -> None:
    text = Scrape(Config(), [entry(0, 1), entry(1, 10)], census().processes, "m").text().decode()
    lines = text.splitlines()
    assert 'penstock_completion_tokens_total{api="0"} 1.0' in lines
    assert 'penstock_completion_tokens_total{api="1"} 10.0' in lines
    assert 'penstock_unfinished_requests{api="1"} 1.0' in lines
    assert 'penstock_time_to_first_token_seconds_count{api="1"} 1.0' in lines
    assert 'penstock_requests_total{api="0",endpoint="/v1/completions",status="200"} 1.0' in lines
    assert 'penstock_process_cpu_seconds_total{index="1",role="api"} 0.0' in lines
    assert 'penstock_processes{role="api"} 2.0' in lines
    families = [line for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))  # each family once, whatever the number of processes
    assert Scrape(Config(), [entry(0, 1)], (), "m").text().decode().count("penstock_engine") == 0
