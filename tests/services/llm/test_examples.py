"""Every file of examples/ runs as it stands and prints what it is there to show; the notebook what its cells hold."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import LLM

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ASYNC = "async_stream.py"  # tests/services/llm/test_async_llm.py runs it
PRINTS = {
    "offline.py": ("'Once upon a time': 4 prompt tokens", "length, log-probability -"),
    "chat.py": ('get_weather({"city": "Paris"}) -> ', "21 degrees"),
    "structured.py": ("{'name': 'Tom', 'age': 5}\nyes\n128 + 457 = 585.\n",),
    "embeddings.py": ("3 vectors of 320 numbers\n1.00 a cat\n",),
}


class Shared:
    """An engine in place of the one that an example would start, and would end."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


@pytest.fixture(autouse=True)
def shared(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock, "LLM", lambda: Shared(llm))


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PRINTS, ASYNC}
    assert [path.name for path in EXAMPLES.glob("*.ipynb")] == ["notebook.ipynb"]


@pytest.mark.parametrize("name", PRINTS)
def test_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert [words for words in PRINTS[name] if words not in printed] == [], printed


def test_the_notebook_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert capsys.readouterr().out == shown, cell["id"]
