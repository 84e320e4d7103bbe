"""The measurement of drafts: its texts, its figures, and a small one from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import speculation
from benchmarks.speculation import ASK, SERVERS, WAYS, Asked, Way, figures, lists, main, measure, questions, table
from penstock.protocol.speculation import read_speculative


def asked(seconds: float, text: str = "a; b", accepted: int = 0) -> Asked:
    return Asked(text, seconds, tokens=20, accepted=accepted, rejected=1)


def test_lists_are_fixed_and_hold_no_word_twice() -> None:
    found = lists(4, 16, 6)
    assert found == lists(4, 16, 6) != lists(4, 16, 7)
    assert all(len(set(text.split("; "))) == 16 for text in found)


def test_questions_are_fixed_and_many() -> None:
    found = questions(12)
    assert found == questions(12)
    assert len(set(found)) == 12


def test_servers_are_started_with_options_that_they_read() -> None:
    assert set(SERVERS) == {way.server for way in WAYS}
    for name, option in SERVERS.items():
        assert read_speculative(option).method == ("none" if name == "plain" else name)


def test_figures_are_of_medians_and_compare_with_the_first_way_of_a_load() -> None:
    rows = figures({
        ("copy", "plain"): [[asked(2.0), asked(9.0), asked(1.0)], [asked(2.0)] * 3],
        ("copy", "ngram"): [[asked(0.5, accepted=8)] * 3, [asked(1.5, accepted=4)] * 3],
        ("chat", "plain"): [[asked(1.0)] * 3],
        ("chat", "ngram"): [[asked(4.0, text="else")] * 3],
    })  # fmt: skip
    assert [(row.load, row.way, row.seconds, row.speedup) for row in rows] == [
        ("copy", "plain", 4.0, 1.0), ("copy", "ngram", 2.0, 2.0),
        ("chat", "plain", 1.0, 1.0), ("chat", "ngram", 4.0, 0.25),
    ]  # fmt: skip
    assert (rows[1].requests, rows[1].tokens, rows[1].tokens_per_second) == (6, 40, 20.0)
    assert (rows[1].accepted, rows[1].rejected, rows[1].acceptance) == (36, 6, round(36 / 42, 4))
    assert [row.differing for row in rows] == [0, 0, 0, 3]
    assert "2.00x" in table(rows)


def test_the_first_round_is_not_kept_and_each_way_asks_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, str]] = []

    def ask(url: str, text: str, *, predicted: str = "") -> Asked:
        calls.append((url, text, predicted))
        return asked(1.0, text)

    monkeypatch.setattr(speculation, "ask", ask)
    ways = Way("plain", "without"), Way("prediction", "without", True, ("copy",)), Way("ngram", "with")
    found = measure({"without": "0", "with": "1"}, ways, {"copy": ["a", "b"], "chat": ["c"]}, rounds=2)
    assert {key: [len(answers) for answers in texts] for key, texts in found.items()} == {
        ("copy", "plain"): [2, 2], ("copy", "prediction"): [2, 2], ("copy", "ngram"): [2, 2],
        ("chat", "plain"): [2], ("chat", "ngram"): [2],
    }  # fmt: skip
    assert calls[:3] == [("0", ASK + "a", ""), ("0", ASK + "a", "a"), ("1", ASK + "a", "")]
    assert calls[6:8] == [("0", "c", ""), ("1", "c", "")]
    assert len(calls) == 8 * 3


@pytest.mark.parametrize(
    "method", ["draft_model", *(pytest.param(method, marks=pytest.mark.long) for method in ("ngram", "eagle"))]
)
def test_a_small_measurement(method: str, tmp_path: Path) -> None:
    """How fast it is, is the machine's matter."""
    out = tmp_path / "result.json"
    main(["--ways", method, "--lists", "1", "--words", "6", "--questions", "1", "--rounds", "1", "--output", str(out)])
    report = json.loads(out.read_text())
    found = {(row["load"], row["way"]): row for row in report["figures"]}
    assert set(found) == {(load, way) for load in ("copy", "chat") for way in ("plain", method)}
    plain, drafted = found["copy", "plain"], found["copy", method]
    assert plain["accepted"] == 0
    assert drafted["accepted"] > 0 or method != "ngram"  # a model's drafts are tried, and may not pay on this machine
    assert drafted["tokens"] == plain["tokens"] > 10
    assert all(row["differing"] == 0 for row in report["figures"])
