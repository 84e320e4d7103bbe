"""The command measures a loop whose outputs follow the schema, and prints every part."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import mask_cpu
from penstock.engine_core.grammar.masks import MaskStore
from penstock.engine_core.grammar.sources import source_of
from penstock.protocol.messages import Automaton, Grammar
from tests.engine_core.grammar.vocabulary import tokens


@pytest.mark.parametrize("says", mask_cpu.SAYS)
def test_every_part_is_measured_and_nothing_stays_wrapped(says: str) -> None:
    source = source_of(Grammar(kind="json_schema", source=json.dumps(mask_cpu.SCHEMA)), tokens()).text
    fill, load = MaskStore._fill, mask_cpu.Load(4, 2, says, 12, 0.0016)
    measured = mask_cpu.measure(tokens(), Automaton(source=source), load, 1)
    assert MaskStore._fill is fill
    assert measured.load == load
    assert measured.tokens <= measured.entries <= 4.2 + measured.drafts  # a row whose masks take long sits steps out
    assert set(measured.microseconds) == {*mask_cpu.WHOLE, "encode", *mask_cpu.PARTS}
    for name in ("apply", "follow", "plan", "encode", "turn", "process"):
        assert measured.microseconds[name].least <= measured.microseconds[name].p99 > 0, name


def test_the_command_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ["mask_cpu", "--shape", "smoke", "--loads", "2+1", "--steps", "3", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    mask_cpu.main()
    loads = [each["load"] for each in json.loads(out.read_bytes())["measured"]]
    assert [(load["rows"], load["free"], load["says"]) for load in loads] == [(2, 1, says) for says in mask_cpu.SAYS]
    assert "path" in capsys.readouterr().out


def test_two_trees_are_measured_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The least of the rounds counts."""
    trees: dict[str, str] = {"before": "9.0", "after": "5.0"}

    def command(words: list[str], *, cwd: Path, **_: object) -> None:
        name = "before" if cwd == tmp_path else "after"
        load = {"rows": 2, "free": 0, "says": "text"}
        times = {"median": float(trees[name]), "mean": 9.0, "p99": 9.0, "least": 9.0}
        parts = dict.fromkeys((*mask_cpu.WHOLE, *mask_cpu.PARTS), times)
        found = {"commit": name, "measured": [{"load": load, "microseconds": parts}]}
        Path(words[-1]).write_text(json.dumps(found))
        trees[name] = "7.0"

    monkeypatch.setattr(mask_cpu, "subprocess", SimpleNamespace(run=command, DEVNULL=None))
    out = tmp_path / "out.json"
    words = ["mask_cpu", "--against", str(tmp_path), "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    mask_cpu.main()
    found = json.loads(out.read_bytes())
    medians = {name: each[0]["microseconds"]["turn"]["median"] for name, each in found["trees"].items()}
    assert medians == {"before": 7.0, "after": 5.0}
    assert str(tmp_path) not in found["command"]
    assert "turn     median       7.0       5.0" in capsys.readouterr().out
