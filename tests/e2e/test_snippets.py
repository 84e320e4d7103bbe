"""Every snippet of README, CONTRIBUTING and docs/ is run as it stands and prints what the page shows (snippets.py)."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.readme_figures import pages
from tests.e2e.server import LIMIT, Server
from tests.e2e.snippets import Block, Command, blocks, commands
from tests.rules.source import ROOT

DOCUMENTED = "http://127.0.0.1:8000"
PAGES = {path.relative_to(ROOT).as_posix(): blocks(path.read_text()) for path in (*pages(), ROOT / "CONTRIBUTING.md")}
RUN = {
    name: found for name, found in PAGES.items() if any(b.runs and b.language in ("python", "console") for b in found)
}
END = "\x1e"  # between the output of two blocks
FLAG = re.compile(r"--?[a-z][a-z0-9-]*")


def environment() -> dict[str, str]:
    """`penstock` and `python3` are those of the tests, which is what a reader has once they have installed it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100"}


def printed(folder: Path, *words: str) -> list[str]:
    """What each part of a program writes, standard error included where the shell prints it, too."""
    ran = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr}"
    return ran.stdout.split(END + "\n")[:-1]


def run_python(folder: Path, url: str, found: list[Block]) -> None:
    script = folder / "pasted.py"
    script.write_text(
        "".join(f"{block.text}\nprint({END!r}, flush=True)\n" for block in found).replace(DOCUMENTED, url)
    )
    outputs = printed(folder, sys.executable, "-W", "error::DeprecationWarning:__main__", str(script))
    for block, output in zip(found, outputs, strict=True):
        assert block.varies or output == (block.shown or "").replace(DOCUMENTED, url), f"line {block.line}"


def run_console(folder: Path, url: str, found: list[Block]) -> None:
    steps = [(command, block.varies) for block in found for command in commands(block)]
    script = folder / "pasted.sh"
    text = "".join(f"{command.text}\nprintf '{END}\\n'\n" for command, _ in steps).replace(DOCUMENTED, url)
    script.write_text("set -e; exec 2>&1\n" + text)
    for (command, varies), output in zip(steps, printed(folder, "bash", str(script)), strict=True):
        assert varies or output == command.shown.replace(DOCUMENTED, url), f"line {command.line}"


@pytest.mark.parametrize("page", RUN)
def test_snippets_print_what_the_page_shows(page: str, server: Server, tmp_path: Path) -> None:
    runs = {"python": run_python, "console": run_console}
    for language in dict.fromkeys(block.language for block in RUN[page] if block.runs):
        if language in runs:
            runs[language](tmp_path, server.url, [b for b in RUN[page] if b.runs and b.language == language])


@functools.cache
def options(command: str) -> frozenset[str]:
    """Every option that a command of penstock's knows."""
    words = [sys.executable, "-m", "penstock", *command.split(), "--help=all"]
    told = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    return frozenset(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", told))


def check_command(command: Command) -> None:
    """Its syntax is the shell's, and of penstock's commands every option exists."""
    subprocess.run(["bash", "-n", "-c", command.text], check=True, capture_output=True, timeout=LIMIT)
    for line in re.split(r"[|;&]+\s", command.text.replace("\\\n", " ")):
        words = shlex.split(line, comments=True)
        if words[:1] == ["curl"] and "-d" in words:
            assert any("application/json" in word for word in words), f"line {command.line}: a body of no content type"
        if "penstock" not in words[:1]:
            continue
        name = " ".join(words[1 : 3 if words[1] == "bench" else 2])
        told = {word.partition("=")[0] for word in words[2:] if FLAG.match(word)}
        assert told <= options(name), f"line {command.line}: {sorted(told - options(name))}"


def check_console(block: Block) -> None:
    for command in commands(block):
        check_command(command)


def check_python(block: Block) -> None:
    ast.parse(block.text)


def nothing(block: Block) -> None:
    assert block.why, "output of nothing that is run here"


CHECKS: Mapping[str, Callable[[Block], Any]] = {
    "console": check_console, "python": check_python, "text": nothing,
    "toml": lambda block: tomllib.loads(block.text), "json": lambda block: json.loads(block.text),
    "yaml": lambda block: list(yaml.safe_load_all(block.text)),
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_is_sound(page: str) -> None:
    for block in PAGES[page]:
        assert block.language in CHECKS, f"line {block.line}: a block of {block.language or 'no language'}"
        if not block.runs or block.language not in ("python", "console"):
            CHECKS[block.language](block)


@pytest.mark.parametrize("page", PAGES)
def test_it_says_what_to_install_before_it_imports_it(page: str) -> None:
    text = (ROOT / page).read_text()
    for package in ("openai", "anthropic"):
        start = re.search(rf"^(from|import) {package}\b.*$", text, re.MULTILINE)
        assert start is None or f"pip install {package}" in text[: start.end()]


def test_a_page_is_taken_apart() -> None:
    page = (
        "Words.\n\n```python\nprint(1)\n```\n\nit says\n\n```text\n1\n```\n\n<!-- not run: a GPU -->\n```console\n"
        "$ a \\\n    b\nout\n$ cat <<'EOF'\n$ no command\nEOF\n```\n"
    )
    code, shell = blocks(page)
    assert (code.line, code.text, code.shown, code.runs) == (3, "print(1)\n", "1\n", True)
    assert (shell.mark, shell.why, shell.runs) == ("not run", "a GPU", False)
    first, second = commands(shell)
    assert (first.text, first.shown, first.line) == ("a \\\n    b", "out\n", 15)
    assert (second.text, second.shown) == ("cat <<'EOF'\n$ no command\nEOF", "")


@pytest.mark.parametrize(
    "text", ["```python\nx = (\n```\n", "```console\n$ penstock serve --no-such-option\n```\n", "```toml\na =\n```\n",
             "```console\n$ curl http://127.0.0.1:8000/v1/completions -d '{}'\n```\n",
             "```console\n$ echo 'open\n```\n", "```json\n{\n```\n", "```\nwhat\n```\n"]
)  # fmt: skip
def test_a_block_that_cannot_be_right_is_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAGES, "page", blocks("<!-- not run: a GPU -->\n" + text))
    with pytest.raises((AssertionError, SyntaxError, ValueError, subprocess.CalledProcessError)):
        test_what_is_not_run_is_sound("page")


@pytest.mark.parametrize(
    "text", ["```python\nprint(1)\n```\n\n```text\n2\n```\n", "```python\nprint(1)\n```\n",
             "```console\n$ echo 1\n2\n```\n", "```console\n$ false\n```\n", "```python\nraise SystemExit(1)\n```\n"]
)  # fmt: skip
def test_a_block_that_prints_something_else_is_found(text: str, tmp_path: Path) -> None:
    (block,) = blocks(text)
    with pytest.raises(AssertionError):
        (run_python if block.language == "python" else run_console)(tmp_path, DOCUMENTED, [block])
