"""The command measures a loop whose outputs follow the schema, and prints every part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import mask_cpu
from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.sources import source_of
from penstock.protocol.messages import Automaton, Grammar
from tests.engine_core.grammar.vocabulary import tokens


def test_every_part_is_measured_and_nothing_stays_wrapped() -> None:
    source = source_of(Grammar(kind="json_schema", source=json.dumps(mask_cpu.SCHEMA)), tokens()).text
    advance = Guide.advance
    measured = mask_cpu.measure(tokens(), Automaton(source=source), 4, 12, 1)
    assert Guide.advance is advance
    assert (measured.rows, measured.steps) == (4, 12)
    assert measured.drafts < measured.entries < 4.2 + measured.drafts  # a row whose masks take long sits steps out
    assert set(measured.microseconds) == set(mask_cpu.COLUMNS)
    for name in ("apply", "advance", "fill", "plan", "encode", "turn", "process", "path"):
        assert measured.microseconds[name].least <= measured.microseconds[name].p99 > 0, name


def test_the_command_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["mask_cpu", "--shape", "smoke", "--rows", "2", "--steps", "3", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", words)
    mask_cpu.main()
    assert json.loads((tmp_path / "out.json").read_bytes())["measured"][0]["rows"] == 2
    assert "path" in capsys.readouterr().out
