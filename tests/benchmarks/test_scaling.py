"""What more GPUs are worth: what is asked for, the table, and one small go over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import rows, scaling
from benchmarks.rows import ALL, Record
from benchmarks.scaling import CASES, SERVED, cell, gain, main, options_of, parser, read, sized, table, verdict
from benchmarks.shapes import EIGHT, HALF_SEVENTY, SMOKE
from penstock.engine_core.models.sharding import shared_evenly
from penstock.engine_core.models.spec import read_spec

LATENCY = next(row for row in ALL if row.name == "lat_bs1")
THROUGHPUT = next(row for row in ALL if row.name == "bs64")


def record(row: str, value: float | None, share: float | None = None, model: str = "8b-tp1") -> Record:
    found = next(known for known in ALL if known.name == row)
    return Record(row=row, model=model, figure=found.figure, unit="", value=value, share_of_limit=share)


def test_every_case_can_be_served(tmp_path: Path) -> None:
    known = {row.name for row in ALL}
    assert set(SERVED) <= known
    for case in CASES.values():
        spec = read_spec(scaling.h200.make_folder(case.shape, tmp_path))
        assert all(shared_evenly(spec, size) for size in case.sizes)
        assert set(case.rows) <= known


def test_what_a_size_is_told(tmp_path: Path) -> None:
    given = parser().parse_args(["--output", str(tmp_path), "--server-args=--enforce-eager", "--rows", "bs8,bs64"])
    found = options_of(CASES["8b"], 4, given)
    assert found.server_args == "--tensor-parallel-size 4 --enforce-eager"
    assert found.rows == "bs8,bs64"
    assert found.skip_start
    assert not found.smoke
    assert sized(EIGHT, 4).name == "8b-tp4"


def test_stages_are_asked_for_by_their_option(tmp_path: Path) -> None:
    given = parser().parse_args(["--output", str(tmp_path)])
    assert options_of(CASES["70b-stages"], 4, given).server_args == "--pipeline-parallel-size 4 "
    assert {size for name, case in CASES.items() if name.endswith("-stages") for size in case.sizes} == {2, 4}


def test_gains_are_of_times_and_of_rates() -> None:
    assert gain(LATENCY, record("lat_bs1", 8.0), record("lat_bs1", 4.0)) == 2.0
    assert gain(THROUGHPUT, record("bs64", 100.0), record("bs64", 150.0)) == 1.5
    assert gain(LATENCY, None, record("lat_bs1", 4.0)) is None
    assert gain(LATENCY, record("lat_bs1", None), record("lat_bs1", 4.0)) is None


def test_the_table_has_shares_and_gains() -> None:
    one, two = record("lat_bs1", 4.2, 0.85), record("lat_bs1", 2.6, 0.7)
    found = {("8b", 1, "lat_bs1"): one, ("8b", 2, "lat_bs1"): two, ("8b", 2, "bs64"): record("bs64", None)}
    lines = table(found).splitlines()
    assert lines[0] == "| Shape | Row | figure | 1 GPU | 2 GPUs |"
    assert "4.20, 85 % | 2.60, 70 %, 1.62 times |" in lines[2]
    assert lines[3].endswith("|  | failed |")
    assert lines[-1].endswith("not measured")
    assert cell(LATENCY, one, None) == ""


@pytest.mark.parametrize(("value", "word"), [(5.0, "met"), (7.0, "missed")])
def test_the_goal_is_judged(value: float, word: str) -> None:
    name = HALF_SEVENTY.name
    found = {(name, 1, "lat_bs1"): record("lat_bs1", 10.0), (name, 2, "lat_bs1"): record("lat_bs1", value)}
    assert verdict(found).endswith(word)


def test_records_are_found_again(tmp_path: Path) -> None:
    rows.write(tmp_path, record("bs8", 5.0, model=sized(EIGHT, 2).name))
    assert set(read(tmp_path)) == {("8b", 2, "bs8")}


@pytest.mark.parametrize("words", [["--models", "9b"], ["--rows", "bs9"]])
def test_an_unknown_word_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "is not allowed" in capsys.readouterr().err


def test_the_table_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table", "--output", str(tmp_path)]) == 0
    assert "not measured" in capsys.readouterr().out


@pytest.mark.long
def test_a_small_go_over_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--smoke", "--rows", "lat_bs1,bs8", "--clients", "1", "--output", str(tmp_path)]
    assert main(words) == 0
    assert set(read(tmp_path)) == {(SMOKE.name, size, row) for size in (1, 2) for row in ("lat_bs1", "bs8")}
    assert "times" in capsys.readouterr().out
