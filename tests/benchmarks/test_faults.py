"""Faults under open streams: what is asked for, what the log says of a blow, and one small go with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import blows, faults
from benchmarks.blows import KILL, ROLES, Blow
from benchmarks.faults import Deaths, bodies, loaded, main, parser, said, settings
from benchmarks.server import Server

LOG = """\
2026-11-22T03:00:00.000Z info executor-0 loaded device=cpu dtype=float32 blocks=100 tokens=1600 seconds=1.5
2026-11-22T03:00:10.250Z error launcher process_died child=executor-0 pid=7 signal=SIGKILL last=""
2026-11-22T03:00:12.000Z info executor-0 loaded device=cpu dtype=float32 blocks=99 tokens=1584 seconds=1.25
2026-11-22T03:00:12.500Z info launcher serving_again
"""
FELL = 1795316410.0  # seconds of 03:00:10


@pytest.fixture
def server(tmp_path: Path) -> Server:
    (tmp_path / "log").write_text(LOG)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return Server(process, "", 0.0, tmp_path / "log")


def test_the_embedded_model_gets_every_blow() -> None:
    (setting,) = settings(parser().parse_args(["--kills", "3", "--server-args", "--cpu-threads 1"]), None)
    assert (setting.exact, setting.goal, setting.streams) == (True, 8.0, 64)
    assert setting.plan == blows.plan(3, 1)
    assert setting.arguments[-2:] == ("--cpu-threads", "1")


def test_the_large_shape_is_served_with_and_without_invariance(tmp_path: Path) -> None:
    invariant, fast = settings(parser().parse_args(["--h200"]), tmp_path)
    assert "--batch-invariant" in invariant.arguments
    assert invariant.exact
    assert "--batch-invariant" not in fast.arguments
    assert not fast.exact
    assert fast.plan == (Blow("executor", KILL), Blow("scheduler", KILL))
    (alone,) = settings(parser().parse_args(["--h200", "--servers", "8b", "--roles", "api,executor"]), tmp_path)
    assert (alone.name, alone.plan) == ("8b", (Blow("executor", KILL),))


def test_requests_are_greedy_or_have_a_seed_and_words_of_their_own() -> None:
    (setting,) = settings(parser().parse_args(["--tokens", "7"]), None)
    found = [json.loads(body) for body in bodies(setting)]
    assert found == [json.loads(body) for body in bodies(setting)]
    assert len({tuple(body["prompt"]) for body in found}) == 64
    assert all(body["temperature"] == 0 or body["seed"] == number for number, body in enumerate(found))
    assert all(body["max_tokens"] == 7 and max(body["prompt"]) < setting.vocab for body in found)


def test_deaths_of_a_process_are_never_too_many_and_put_its_start_off() -> None:
    deaths, one = Deaths(), ("executor", 0)
    assert [deaths.add(one, each) for each in (0.0, 10.0, 20.0)] == [0.0, 0.5, 1.0]
    assert deaths.wait(one, 25.0) == 0.0
    assert deaths.add(one, 30.0) == 2.0
    assert deaths.wait(one, 45.0) == 15.0
    assert deaths.wait(("executor", 1), 45.0) == 0.0
    assert deaths.wait(one, 60.0) == 0.0
    assert deaths.add(one, 75.0) == 1.0  # after those at 20 and 30 seconds


def test_what_the_log_says_of_a_blow(server: Server) -> None:
    assert said(server, "process_died child=executor-", [FELL]) == pytest.approx(0.25, abs=1e-3)
    assert said(server, "serving_again", [FELL]) == pytest.approx(2.5, abs=1e-3)
    assert said(server, "serving_again", [FELL + 60]) is None
    assert said(server, "serving_again", []) is None
    assert loaded(server) == (1.25, 99)


def test_an_unknown_role_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--roles", "api,launcher"]) == 2
    assert "'launcher' is not allowed" in capsys.readouterr().err


def test_the_table_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = blows.Report(
        name="8b", title="8B", exact=True, goal=None, tokens=9, seconds=1.0, start=1.0, load=1.0, left=("file x",)
    )
    blows.write(tmp_path / "f.json", [report])
    assert main(["--table", "--output", str(tmp_path / "f.json")]) == 1
    assert "8B: file x is left" in capsys.readouterr().out


@pytest.mark.long
def test_a_small_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How long a client waits is the machine's; that nothing is lost, and nothing left, is not."""
    main(["--smoke", "--output", str(tmp_path / "faults.json")])
    (report,) = blows.read(tmp_path / "faults.json")
    assert [strike.blow.role for strike in report.strikes] == ["", *ROLES]
    for strike in report.strikes:
        assert report.kept(strike), strike
        assert strike.rested is not None
        assert (strike.died is None) == (strike.blow == blows.NOBODY)
    assert report.strikes[1].load is not None
    assert (report.ended, report.left) == (True, ())
    assert report.environment["chip"] == "cpu"
    assert "| executor, kill -9 | 1 | 4 of 4 |" in capsys.readouterr().out
    assert faults.RESULTS.is_dir()
