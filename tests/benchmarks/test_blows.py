"""Blows and what became of streams: the order of blows, goals, what was missed, the table, the file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.blows import BLOWS, KILL, NOBODY, STOP, Blow, Report, Strike, missed, plan, read, table, write

KILLED = Strike(
    blow=Blow("executor", KILL), mark=100, streams=64, same=64, as_long=64, pause=6.0, longest_pause=6.5,
    died=0.01, whole=5.0, load=4.0, blocks=99, rested=0.4,
)  # fmt: skip
REPORT = Report(
    name="8b", title="8B", exact=True, goal=None, tokens=24576, seconds=4.0, start=6.4, load=4.2, strikes=(KILLED,)
)


def strike(**change: Any) -> Strike:
    return msgspec.structs.replace(KILLED, **change)


def test_blows_come_in_rounds() -> None:
    found = plan(2, 1)
    assert Counter(found) == {blow: 2 if blow.signal == KILL else 1 for blow in BLOWS}
    assert found[: len(BLOWS)] == BLOWS
    assert plan(1, 1, ["tokenizer"]) == (Blow("tokenizer", KILL), Blow("tokenizer", STOP))
    assert not any(blow == Blow("api", STOP) for blow in plan(3, 3))
    assert plan(0, 2, ["api"]) == ()


def test_what_a_client_may_see_nothing_for() -> None:
    assert REPORT.allowed(KILLED) == pytest.approx(7.0)
    assert REPORT.allowed(strike(load=None)) == pytest.approx(7.2)
    assert REPORT.allowed(strike(blow=Blow("executor", STOP))) == pytest.approx(17.0)
    assert msgspec.structs.replace(REPORT, goal=8.0).allowed(KILLED) == 8.0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"same": 63, "error": "ended"}, ["of 64 streams 63 the same, 64 as long ended"]),
        ({"blow": Blow("api", KILL), "own": 30, "same": 34}, []),
        ({"rested": None}, ["not every block and process came back"]),
        ({"longest_pause": 7.5}, ["a pause of 7.5 s, 7.0 are allowed"]),
    ],
)
def test_what_is_not_as_it_has_to_be(change: dict[str, Any], told: list[str]) -> None:
    report = msgspec.structs.replace(REPORT, strikes=(strike(**change),))
    found = missed([report])
    assert [words.partition(" tokens: ")[2] for words in found] == told
    assert report.met(report.strikes[0]) == (not told)


def test_a_server_whose_sums_depend_on_the_step_owes_as_many_tokens() -> None:
    report = msgspec.structs.replace(REPORT, exact=False, strikes=(strike(same=10),))
    assert missed([report]) == []
    assert "| 10 of 64, 64 as long |" in table([report])
    assert len(missed([msgspec.structs.replace(report, strikes=(strike(as_long=63),))])) == 1


def test_what_is_left_is_told() -> None:
    assert missed([msgspec.structs.replace(REPORT, left=("file x.sock",))]) == ["8B: file x.sock is left"]


def test_a_line_of_the_table_is_of_the_worst_strike() -> None:
    slow = strike(longest_pause=7.45, load=4.5, died=0.02, pause=7.0)
    report = msgspec.structs.replace(REPORT, strikes=(strike(blow=NOBODY, mark=0, load=None, died=None), KILLED, slow))
    lines = table([report]).splitlines()
    assert lines[2].startswith("| *8B* |")
    assert lines[3].startswith("| nobody | 1 | 64 of 64 |")
    assert lines[4] == "| executor, kill -9 | 2 | 128 of 128 | 0.02 s | 4.5 s | 6.5 s | **7.5 s** | ≤ 7.5 s |"
    over = msgspec.structs.replace(report, strikes=(KILLED, strike(longest_pause=7.5)))
    assert table([over]).splitlines()[3].endswith("| 6.0 s | 7.5 s | ≤ 7.0 s |")
    assert len({line.count("|") for line in lines}) == 1


def test_reports_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "faults.json"
    write(file, [REPORT, msgspec.structs.replace(REPORT, name="other")])
    assert read(file) == [REPORT, msgspec.structs.replace(REPORT, name="other")]
