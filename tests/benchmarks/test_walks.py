"""The walks: figures of known calls, and both walks in full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.walks import Figures, Walk, main, place
from penstock.protocol import links


def test_only_files_of_the_product_count() -> None:
    assert place(links.__file__) == "protocol/links.py"
    assert place(__file__) == ""
    assert place(json.__file__) == ""


def test_a_change_of_file_is_a_call_in_another_file_than_the_one_before() -> None:
    walk = Walk()
    walk.calls = [("a", "f"), ("a", "g"), ("b", "h"), ("a", "f"), ("c", "i")]
    assert walk.functions == {"a": ["f", "g"], "b": ["h"], "c": ["i"]}
    assert walk.figures == Figures(3, 4, 3)
    assert walk.without(["b"]).figures == Figures(2, 3, 1)


def test_both_walks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "walks.json"
    assert main(["--output", str(output)]) == 0
    walks = json.loads(output.read_bytes())
    assert "parse_chat" in walks["chat"]["functions"]["services/openai/chat.py"]
    assert {"Runner.begin", "Runner.finish", "Runner.collect"} <= set(
        walks["step"]["functions"]["engine_core/execution/model_runner.py"]
    )
    assert walks["step"]["figures"]["files"] <= 20, "of a steady step, so that it can be read in one sitting"
    assert walks["step"]["figures"]["functions"] <= 80
    assert capsys.readouterr().out.startswith(f"chat: {walks['chat']['figures']['files']} files, ")
