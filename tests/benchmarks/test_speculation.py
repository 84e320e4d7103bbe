"""The measurement of drafts: its lists, its figures, and a small one from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import speculation
from benchmarks.speculation import WAYS, Asked, figures, lists, main, measure, table


def asked(seconds: float, text: str = "a; b", accepted: int = 0) -> Asked:
    return Asked(text, seconds, tokens=20, accepted=accepted, rejected=1)


def test_lists_are_fixed_and_hold_no_word_twice() -> None:
    found = lists(4, 16, 6)
    assert found == lists(4, 16, 6) != lists(4, 16, 7)
    assert all(len(set(text.split("; "))) == 16 for text in found)


def test_figures_are_of_medians_and_compare_with_the_first_way() -> None:
    rows = figures({
        "plain": [[asked(2.0), asked(9.0), asked(1.0)], [asked(2.0)] * 3],
        "ngram": [[asked(0.5, accepted=8)] * 3, [asked(1.5, accepted=4)] * 3],
    })  # fmt: skip
    assert [(row.way, row.seconds, row.speedup) for row in rows] == [("plain", 4.0, 1.0), ("ngram", 2.0, 2.0)]
    assert (rows[1].requests, rows[1].tokens, rows[1].tokens_per_second) == (6, 40, 20.0)
    assert (rows[1].accepted, rows[1].rejected) == (36, 6)
    assert "2.00x" in table(rows)


def test_the_first_round_is_not_kept_and_each_way_asks_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, bool]] = []

    def ask(url: str, text: str, *, predicted: bool) -> Asked:
        calls.append((url, text, predicted))
        return asked(1.0, text)

    monkeypatch.setattr(speculation, "ask", ask)
    found = measure({False: "without", True: "with"}, ["a", "b"], rounds=2)
    assert {name: [len(answers) for answers in texts] for name, texts in found.items()} == {
        way.name: [2, 2] for way in WAYS
    }
    assert calls[:3] == [("without", "a", False), ("without", "a", True), ("with", "a", False)]
    assert len(calls) == 3 * 2 * 3


def test_another_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "ask", lambda url, text, *, predicted: asked(1.0, f"{text}{predicted}"))
    with pytest.raises(ValueError, match="changed the answer"):
        measure({False: "", True: ""}, ["a"], rounds=1)


def test_a_small_measurement(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    main(["--lists", "1", "--words", "6", "--rounds", "1", "--output", str(out)])  # how fast is the machine's matter
    report = json.loads(out.read_text())
    assert [row["way"] for row in report["figures"]] == [way.name for way in WAYS]
    plain, *drafted = report["figures"]
    assert plain["accepted"] == 0
    assert all(row["accepted"] > 0 and row["tokens"] == plain["tokens"] > 10 for row in drafted)
