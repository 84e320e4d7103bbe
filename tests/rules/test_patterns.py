r"""No regular expression ends with `$` where it means the end: Python's `$` also matches before a last line break.

So a name that is checked by it may end with one. `\Z` and `fullmatch` mean the end and nothing else. `$` stays for the
ends of lines, with MULTILINE. Patterns for other engines, such as the grammars', are not Python's and not meant.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.rules.source import Source, none, parse, product

TAKERS = frozenset(
    f"re.{name}" for name in ("compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")
)
LINES = frozenset(("re.M", "re.MULTILINE"))
PLAIN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # escapes and sets, in which `$` is itself
LINEWISE = re.compile(r"\(\?[aiLsux]*m[aiLmsux]*\)")


def loose_ends(source: Source) -> Iterator[str]:
    texts = {
        target.id: node.value
        for node in source.nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in source.nodes:
        if not isinstance(call, ast.Call) or source.resolve(call.func) not in TAKERS:
            continue
        words = [*call.args, *[word.value for word in call.keywords]]
        parts = [part for word in words for part in ast.walk(word) if isinstance(part, ast.expr)]
        if LINES.intersection(map(source.resolve, parts)):
            continue
        pattern = next((word.value for word in call.keywords if word.arg == "pattern"), words[0] if words else None)
        for text in spelled(pattern, texts):
            if "$" in PLAIN.sub("", text) and not LINEWISE.match(text):
                yield f"{source.at(call)} {text!r}"


def spelled(pattern: ast.expr | None, texts: dict[str, ast.expr]) -> Iterator[str]:
    """Every literal that the pattern is put together from, those with a name in this file included."""
    for node in ast.walk(pattern) if pattern is not None else ():
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield node.value
            elif isinstance(node.value, bytes):
                yield node.value.decode("latin-1")
        elif isinstance(node, ast.Name) and isinstance(texts.get(node.id), ast.Constant | ast.JoinedStr | ast.BinOp):
            yield from spelled(texts[node.id], {})


def test_patterns_end_where_their_texts_do() -> None:
    none(found for source in product() for found in loose_ends(source))


@pytest.mark.parametrize(
    "text",
    [
        "import re\nA = re.compile(r'a+$')", "import re\nA = re.compile(rb'[$]a$')", "import re\nre.match('a$', b)",
        "from re import search\nsearch('(a|$)', b)", "import re as r\nE = 'a$'\nr.sub(f'{b}{E}', c, d)",
        "import re\nre.compile(pattern='^a$', flags=re.DOTALL)", "import re\nre.compile('a' + '$')",
    ],
)  # fmt: skip
def test_a_loose_end_is_found(text: str) -> None:
    assert len(list(loose_ends(parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile(r'a\\$')", "import re\nre.compile('[a$]b')", "import re\nre.compile(r'a\\Z')",
        "import re\nre.compile('a$', re.MULTILINE)", "import re\nre.compile('(?m)a$')", "f('a$')",
        "import re\nre.compile('[]$]')", "import re\nre.sub('a', '$', b)",
    ],
)  # fmt: skip
def test_other_dollars_are_not(text: str) -> None:
    assert list(loose_ends(parse(text))) == []


def test_what_the_rule_is_for() -> None:
    assert re.match("a+$", "aa\n")
    assert not re.match(r"a+\Z", "aa\n")
