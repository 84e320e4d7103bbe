"""Design 9, rules 4 and 5: no broad `except`, outside the places that section 7 names; no errors without a meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.rules.source import Source, none, parse, product

BROAD = frozenset(("Exception", "BaseException", "builtins.Exception", "builtins.BaseException"))
GUARD = re.compile(r"#.*\bguard: design 7\b")
MAIN = re.compile(r"services/(\w+/main|openai/api_server)\.py$")


def kinds(node: ast.expr | None) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node] if node else []


def broad_excepts(source: Source) -> Iterator[str]:
    """`except` that takes everything, without the comment `# guard: design 7` on its line or the line above."""
    if MAIN.match(source.path):
        return
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or any(source.resolve(kind) in BROAD for kind in kinds(node.type))
        elif isinstance(node, ast.Call) and source.resolve(node.func) == "contextlib.suppress":
            broad = any(source.resolve(kind) in BROAD for kind in node.args)
        else:
            continue
        said = source.comments.get(node.lineno, "") + source.comments.get(node.lineno - 1, "")
        if broad and not GUARD.search(said):
            yield f"{source.at(node)} a broad except"


def silent_excepts(source: Source) -> Iterator[str]:
    """`except SomeError: pass` without a comment that gives the reason."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
            last = node.body[-1].end_lineno or node.lineno
            if not any(line in source.comments for line in range(node.lineno - 1, last + 1)):
                yield f"{source.at(node)} an error vanishes without a reason; say it, or use contextlib.suppress"


def nameless_errors(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if source.resolve(called) in (*BROAD, "NotImplementedError"):
                yield f"{source.at(node)} raises {source.resolve(called)}"


def test_no_except_is_broad() -> None:
    none(found for source in product() for found in broad_excepts(source))


def test_no_error_vanishes() -> None:
    none(found for source in product() for found in silent_excepts(source))


def test_every_error_has_a_meaning() -> None:
    none(found for source in product() for found in nameless_errors(source))


@pytest.mark.parametrize(
    "text",
    [
        "try: f()\nexcept: g()", "try: f()\nexcept Exception as e: g()",
        "try: f()\nexcept (OSError, BaseException): g()", "import contextlib\nwith contextlib.suppress(Exception): f()",
    ],
)  # fmt: skip
def test_a_broad_except_is_found(text: str) -> None:
    assert len(list(broad_excepts(parse(text)))) == 1
    assert list(broad_excepts(parse(text, "services/openai/api_server.py"))) == []


def test_a_guard_is_allowed_where_it_says_so() -> None:
    assert list(broad_excepts(parse("try: f()\nexcept Exception:  # guard: design 7, ends this request\n g()"))) == []
    assert list(broad_excepts(parse("try: f()\n# guard: design 7\nexcept Exception:\n g()"))) == []
    assert len(list(broad_excepts(parse("try: f()\nexcept Exception:  # whatever\n g()")))) == 1


def test_vanishing_and_nameless_errors_are_found() -> None:
    assert len(list(silent_excepts(parse("try: f()\nexcept OSError:\n pass")))) == 1
    assert list(silent_excepts(parse("try: f()\nexcept OSError:\n pass  # the peer was gone already"))) == []
    assert len(list(nameless_errors(parse("raise Exception('no')\nraise NotImplementedError")))) == 2
