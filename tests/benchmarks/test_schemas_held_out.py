"""A corpus of three schemas, made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.schemas_held_out import judged, main

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CASES = {
    "good": {"schema": NUMBER, "tests": [{"data": {"n": 1}, "valid": True}, {"data": {"n": "1"}, "valid": False}]},
    "wrong": {"schema": NUMBER, "tests": [{"data": {"n": 1}, "valid": False}, {"data": {"n": "1"}, "valid": True}]},
    "lenient": {"schema": {"not": {"required": ["a"]}}, "tests": [{"data": {"b": 1}, "valid": True}]},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, case in CASES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(case))
    return tmp_path


def test_the_counts_are_those_of_the_corpus(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "result.json"
    main([str(folder), "--jobs", "1", "--output", str(out)])
    found = json.loads(out.read_bytes())
    assert (found["schemas"], found["lenient"]) == (3, 3)
    assert (found["with_wrong_accepts"], found["with_refused_valid_instances"], found["narrower_lenient"]) == (1, 1, 0)
    assert str(folder) not in out.read_text()
    assert "good" not in capsys.readouterr().out


def test_what_is_wrong_is_told_by_name(folder: Path) -> None:
    found = judged(folder / "wrong.json")
    assert (found.name, found.strict, found.wrong_accepts, found.wrong_refusals) == ("wrong.json", "", 1, 1)
