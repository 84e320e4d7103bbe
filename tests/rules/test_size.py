"""Design 9, rules 6, 8 and 14: a file is one idea, a function fits a screen, public things say what they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.rules.source import ROOT, Function, Source, none, parse, product, sources

FILE_LINES = 500
FUNCTION_LINES = 80  # the docstring is not counted
PLAIN_LINES = 8  # a body of at most so many lines explains itself


def first_line(node: Function | ast.ClassDef) -> int:
    """Line after the docstring, or of the first statement."""
    head = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        return (head.end_lineno or head.lineno) + 1
    return head.lineno


def body_lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - first_line(node) + 1


def signature_lines(node: Function) -> int:
    return node.body[0].lineno - node.lineno


def long_files(source: Source) -> Iterator[str]:
    count = len(source.text.splitlines())
    if count > FILE_LINES:
        yield f"{source.path}: {count} lines"


def long_functions(source: Source) -> Iterator[str]:
    for node in source.functions():
        count = body_lines(node) + signature_lines(node)
        if count > FUNCTION_LINES:
            yield f"{source.at(node)} {node.name}: {count} lines"


def public(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """Public functions and classes, and the public methods of public classes."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def undocumented(source: Source) -> Iterator[str]:
    if source.text.strip() and ast.get_docstring(source.tree) is None:
        yield f"{source.path}: the module has no docstring"
    if source.top == "services":
        return
    for node in public(source.tree.body):
        if body_lines(node) > PLAIN_LINES and ast.get_docstring(node) is None:
            yield f"{source.at(node)} {node.name} is public and has no docstring"


def test_a_file_is_one_idea() -> None:
    none(found for source in (*product(), *sources("benchmarks")) for found in long_files(source))


def test_a_function_fits_a_screen() -> None:
    none(found for source in (*product(), *sources("benchmarks")) for found in long_functions(source))


def test_public_things_say_what_they_are() -> None:
    none(found for source in product() for found in undocumented(source))


def test_long_things_are_found() -> None:
    assert len(list(long_files(parse("x = 1\n" * 501)))) == 1
    assert len(list(long_functions(parse("def f():\n" + " x = 1\n" * 80 + "def g():\n" + " x = 1\n" * 79)))) == 1
    documented = "def f():\n '''" + "a\n" * 30 + " '''\n" + " x = 1\n" * 60
    assert list(long_functions(parse(documented))) == []


def test_undocumented_things_are_found() -> None:
    body = "  x = 1\n" * 9
    text = f"'''doc'''\ndef f():\n{body}def _g():\n{body}class C:\n '''doc'''\n def m(self):\n{body}def h():\n  x = 1\n"
    assert [line.split()[1] for line in undocumented(parse(text))] == ["f", "m"]
    assert len(list(undocumented(parse("x = 1")))) == 1


def test_the_root_is_this_repository() -> None:
    assert (ROOT / "pyproject.toml").is_file()
