"""The go over every row: what is asked for, what is recorded, and one small go with real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import h200, rows
from benchmarks.h200 import ROW_LIMIT, Run, main, parser, per_token, prepared, recorded
from benchmarks.rows import ALL, WORKLOADS
from benchmarks.server import Server
from benchmarks.shapes import EIGHT, SMOKE, make_folder
from penstock.engine_core.models.spec import read_spec
from penstock.services.bench.serve import Result, summarize
from penstock.services.bench.workload import Record, Workload


def run(tmp_path: Path, *arguments: str) -> Run:
    return Run(parser().parse_args([*arguments, "--output", str(tmp_path / "results")]))


def result(workload: Workload) -> Result:
    sent = [Record(0, 0, start=0.0, first=0.1, last=1.1, end=1.1, events=11, tokens=11, prompt_tokens=4)]
    return Result(workload=workload, summary=summarize(sent), variants={}, processes=1, client_cpu_seconds=0.1)


def test_what_is_asked_for(tmp_path: Path) -> None:
    plain = [row.name for row in run(tmp_path).wanted()]
    assert plain[:2] == ["start_cold", "start_warm"]
    assert "decode_c256" in plain
    assert "free_c64" not in plain
    assert {row.name for row in run(tmp_path, "--features").wanted()} == {row.name for row in ALL}
    assert [row.name for row in run(tmp_path, "--rows", "json_c1,bs8").wanted()] == ["bs8", "json_c1"]


@pytest.mark.parametrize("words", [["--models", "70b"], ["--rows", "bs8,bs9"]])
def test_an_unknown_word_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "is not allowed" in capsys.readouterr().err


def test_loads_use_the_models_ids_and_a_short_wide_warm_up() -> None:
    for workload in WORKLOADS.values():
        found = prepared(workload, EIGHT, smoke=False)
        assert found.vocab == 96192
        assert found.warmup <= found.concurrency
        assert found.warmup_output == 64
        assert (found.input, found.output, found.requests) == (workload.input, workload.output, workload.requests)
        small = prepared(workload, SMOKE, smoke=True)
        assert small.requests * (small.prefix + small.input[1] + small.output[1]) < 200
    assert prepared(WORKLOADS["decode_c256"], EIGHT, smoke=False).warmup == 256
    assert prepared(WORKLOADS["thr_c256"], EIGHT, smoke=False).warmup == 64


def test_a_row_that_failed_has_no_value() -> None:
    row = next(row for row in ALL if row.name == "bs8")
    workload = WORKLOADS["bs8"]
    good = recorded(row, EIGHT, workload, result(workload), "")
    assert good.value == pytest.approx(100.0)
    assert good.output_tokens_per_second == pytest.approx(10.0)
    bad = recorded(row, EIGHT, workload, result(workload), "1 × disconnected")
    assert (bad.value, bad.error) == (None, "1 × disconnected")
    assert bad.client is not None
    assert recorded(row, EIGHT, workload, None, "late").client is None


def test_a_server_that_dies_fails_its_row_and_ends_the_model(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "log").write_text("it broke")
    go = run(tmp_path, "--smoke", "--clients", "1")
    wanted = [row for row in ALL if row.name in ("bs8", "bs64")]
    spec = read_spec(make_folder(SMOKE, tmp_path))
    with pytest.raises(TimeoutError, match="the server has ended"):
        go.load(SMOKE, spec, wanted, Server(gone, "http://127.0.0.1:1", 0.0, tmp_path / "log"), "NVIDIA H200")
    (record,) = rows.read(tmp_path / "results").values()  # the second row was not tried
    assert (record.row, record.value, record.met) == ("bs8", None, None)
    assert "no connection" in record.error
    assert record.limit is not None
    assert go.failed == 1


def test_host_time_is_told_by_token() -> None:
    workload = Workload(warmup=3, warmup_output=3, output=(11, 11))
    found = per_token({"api": 0.02}, workload, result(workload))
    assert found["host_microseconds_per_token"] == {"api": 1000.0}  # 11 tokens and 9 of the warm-up
    assert per_token({"api": 0.02}, workload, None) == {"cpu_seconds": {"api": 0.02}}


def test_a_row_has_a_limit_of_time() -> None:
    assert ROW_LIMIT < 120


def test_the_table_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = next(row for row in ALL if row.name == "bs8")
    record = recorded(row, EIGHT, WORKLOADS["bs8"], result(WORKLOADS["bs8"]), "")
    rows.write(tmp_path, msgspec.structs.replace(record, met=False))
    assert main(["--table", "--output", str(tmp_path)]) == 0
    assert "| bs8 | ms per token | 100 | ≤ 4.45 | 5.09 |  |" in capsys.readouterr().out


def test_a_go_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = "start_warm,lat_bs1,bs8,sample_c64"
    assert main(["--smoke", "--rows", wanted, "--output", str(tmp_path), "--clients", "1"]) == 0
    found = rows.read(tmp_path)
    assert set(found) == {("smoke", name) for name in wanted.split(",")}
    for record in found.values():
        assert record.error == ""
        assert record.value is not None
        assert record.value >= 0  # on a busy machine a request's tokens may come in one piece
        assert record.environment["chip"] == "cpu"
        assert record.environment["versions"]["torch"]
    served = found["smoke", "bs8"]
    assert served.client is not None
    assert served.client.output_tokens == 4 * h200.SMOKE_TOKENS
    assert served.client.ttft_ms is not None
    assert set(served.cpu_seconds) >= {"api", "tokenizer", "scheduler", "executor"}
    assert served.share_of_limit is None  # nobody has measured this chip
    assert "sample_c64" in capsys.readouterr().out
