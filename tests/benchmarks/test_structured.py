"""A sample of the validation of structured output, whose full run is in benchmarks/results, and its judges."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import regex

from benchmarks import structured
from benchmarks.structured_cases import GRAMMARS, REGEXES, Case, cases, schema_case
from penstock.protocol.messages import Grammar


def test_a_sample_of_the_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    words = ["structured", "--parts", "40", "--only", "0", "--seeds", "1", "--max-tokens", "60", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    structured.main()
    report = json.loads(out.read_text())
    assert report["wrong"] == []
    assert report["generations"] >= 20
    assert report["finished"] > 0
    assert set(report["runs"]) == {"embedded", "random"}


def test_there_are_as_many_cases_as_promised() -> None:
    kinds = [case.grammar.kind for case in cases()]
    assert kinds.count("json_schema") >= 300
    assert kinds.count("regex") == len(REGEXES) == 60
    assert kinds.count("grammar") == len(GRAMMARS) == 20


def test_judges_find_what_is_wrong() -> None:
    schema = schema_case("x", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert schema.wrong('{"a": 1}') == ""
    assert schema.wrong('{"a": "1"}')
    assert schema.wrong("{")
    pattern = Case("y", Grammar(kind="regex", source="a+"), regex.compile("a+"))
    assert pattern.wrong("aa") == ""
    assert pattern.wrong("ab")
    balanced = next(case for case in cases() if case.name == "grammar/0")
    assert balanced.wrong("((x))") == ""
    assert balanced.wrong("((x)")
