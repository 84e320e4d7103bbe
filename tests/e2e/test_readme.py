"""The README's Python, run as it stands against a server, prints what a reader expects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.readme_figures import pages
from tests.e2e.server import LIMIT, Server, serving
from tests.rules.source import ROOT

DOCUMENTED = "http://127.0.0.1:8000"
TEXT = "\n".join(path.read_text() for path in pages())
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
CLIENT = SNIPPETS[0]  # the others use its client


def printed(folder: Path, url: str, *snippets: str) -> list[str]:
    """What the snippets print, line by line, against the server at `url`."""
    script = folder / "pasted.py"
    script.write_text("\n".join(snippets).replace(DOCUMENTED, url))
    ran = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def snippet(mark: str) -> str:
    (found,) = (one for one in SNIPPETS if mark in one)
    return found


def connected() -> str:
    """The client alone, without the tale that the first snippet streams."""
    return CLIENT[: CLIENT.index("for chunk")]


def test_every_snippet_is_run_here() -> None:
    marks = ("for chunk", "responses.create", "tool_calls", "json_schema", "prediction=", "LLM(")
    assert [sum(mark in one for one in SNIPPETS) for mark in marks] == [1] * len(SNIPPETS)


def test_it_says_what_to_install_before_it_imports_it() -> None:
    for package in ("openai", "anthropic"):
        start = re.search(rf"^(from|import) {package}\b.*$", TEXT, re.MULTILINE)
        assert start is not None
        assert f"pip install {package}" in TEXT[: start.end()]


def test_a_tale_streams(server: Server, tmp_path: Path) -> None:
    lines = printed(tmp_path, server.url, snippet("for chunk"))
    assert len(" ".join(lines).split()) > 20


def test_responses_remember_and_messages_add(server: Server, tmp_path: Path) -> None:
    lines = printed(tmp_path, server.url, connected(), snippet("responses.create"))
    assert lines[1:] == ["Your dog is called Rex.", "128 + 457 = 585."]


def test_the_weather_is_asked_for_and_told(server: Server, tmp_path: Path) -> None:
    shown = "\nprint(call.function.name, call.function.arguments)\n"
    told, called = printed(tmp_path, server.url, connected(), snippet("tool_calls"), shown)
    assert called == 'get_weather {"city": "Rome"}'
    assert all(word in told for word in ("21", "sunny", "Rome"))


def test_the_structured_output_is_the_one_that_is_shown(server: Server, tmp_path: Path) -> None:
    text = snippet("json_schema")
    (line,) = printed(tmp_path, server.url, connected(), text)
    (shown,) = re.findall(r"# (\{.*\})$", text, re.MULTILINE)
    assert line == shown == "{'name': 'Tom', 'age': 5}"


def test_a_prediction_comes_true(tmp_path: Path) -> None:
    """Of a server that sends every draft, however busy the machine is: by default steps that don't pay have none."""
    with serving(tmp_path, "--speculative-config", '{"method": "none", "adaptive": false}') as server:
        (line,) = printed(tmp_path, server.url, connected(), snippet("prediction="))
    words, _, accepted = line.rpartition(" ")
    assert words == "river, lamp, 42, violin, maple, 7, button"
    assert int(accepted) > 5


@pytest.mark.parametrize("text", [snippet("LLM(")])
def test_the_engine_without_http(tmp_path: Path, text: str) -> None:
    lines = printed(tmp_path, DOCUMENTED, text)
    assert lines[-1] == "128 + 457 = 585."
