"""Lark grammars as rules, and grammars of JSON strings that hold a text."""

from __future__ import annotations

import json
import re

import pytest

from penstock.engine_core.grammar.ebnf import ROOT, written
from penstock.engine_core.grammar.lark import COMMON, pattern_rules, quoted_grammar, quoted_regex, read
from penstock.engine_core.grammar.patterns import PatternError
from penstock.engine_core.grammar.regexes import lark_regex
from penstock.protocol.errors import InvalidRequest
from tests.engine_core.grammar.vocabulary import accepts


def takes(source: str, text: str) -> bool:
    """Whether a grammar without recursion derives the text."""
    kind, pattern = written(read(source))
    assert kind == "regex"
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda match: re.escape(chr(int(match[1], 16))), pattern)
    return re.fullmatch(python, text) is not None


@pytest.mark.parametrize(
    ("source", "texts", "others"),
    [
        ('start: "a"~2..3', ("aa", "aaa"), ("a", "aaaa")), ('start: "a"{2}', ("aa",), ("aaa",)),
        ('start: "a"{,1} "b"', ("b", "ab"), ("aab",)), ('start: ("a" | "b")+', ("abba",), ("",)),
        ('start: a\n  | "b" // or this\na: "a" -> one', ("a", "b"), ("ab",)), ('?start: x\n!x: "a"', ("a",), ()),
        ('start: ROOT root\nROOT: "a"\nroot: "b"', ("ab",), ("a",)), ('start: A.\nA.2: "a"', (), ()),
        ('%import common.INT -> N\nstart: N "-" N', ("1-22",), ("-",)), ('start: "a".."c"', ("b",), ("d",)),
        ('start: "A"i', ("a", "A"), ("b",)), ('start: A B\nA: "a"\nB: "b"\n%ignore " "', ("ab", "a  b"), (" ab",)),
        ('%llguidance {}\nstart: "\\x61\\u0062"', ("ab",), ()),
    ],
)  # fmt: skip
def test_what_a_grammar_derives(source: str, texts: tuple[str, ...], others: tuple[str, ...]) -> None:
    if not texts:
        with pytest.raises(InvalidRequest):
            read(source)
    assert all(takes(source, text) for text in texts)
    assert not any(takes(source, text) for text in others)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("start: %json {}", 1), ("start: A\nA: /a/ & /b/", 2), ("start: <|im_end|>", 1), ("start: @other", 1),
        ("start: A\n%import common.NONE -> A", 2), ("start: /a/x", 1), ('start: "b".."a"', 1), ("start: A\nA: ~/a/", 2),
        ("start: (", 1), ('start: "a"\n\nstart: "b"', 3), ("start: " + "(" * 70, 1), ("start: *", 1), ('"a"', 1),
        ('start: "a"~3..2', 1), ('start: "a"{0,99999}', 1), ("start: /(/", 1), ('start: "\\q"', 1),
        ("%import other.X", 1),
        ('start: A\nA: "a".."bc"', 2),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_line(source: str, line: int) -> None:
    with pytest.raises(InvalidRequest, match=f"line {line}:") as caught:
        read(source)
    assert caught.value.code == "invalid_grammar"


def test_a_grammar_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read("start: A\n" + "// x\n" * 50_000)
    assert caught.value.code == "grammar_too_complex"


def test_the_start_rule_is_the_root() -> None:
    assert list(read('a: "a"\nstart: a')) == ["a", ROOT]


def test_the_library_can_be_read() -> None:
    for pattern in COMMON.values():
        pattern_rules(pattern)


@pytest.mark.parametrize("pattern", ["a(?=b)", "a^b", "(", r"\bword", "[a&&b]", "[[:alpha:]]", r"\p{Greek}+"])
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        pattern_rules(pattern)


# As Codex gives it to its models.
PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
SCRIPT = r"""
start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE

PRAGMA_LINE: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
SUMS = """
// OpenAI's own example
start: expr
expr: term (SP ADD SP term)* -> add
| term
term: factor (SP MUL SP factor)* -> mul
| factor
factor: INT | "(" expr ")"
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
ADDED = '*** Begin Patch\n*** Add File: a "b".py\n+print("\\n", \'ö\')\t# 😀\n*** End Patch'
UPDATED = "*** Begin Patch\n*** Update File: x\r\n@@ def f():\n-\ta\n+\\b\n c\n*** End of File\n*** End Patch\n"


def lark(source: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def same(one: str, quoted: str, text: str) -> bool:
    """Whether both take the text, which must agree."""
    plain = accepts(lark(one), text)
    assert accepts(lark(quoted), json.dumps(text, ensure_ascii=False)) == plain, text
    return plain


@pytest.mark.parametrize(
    ("source", "text", "good"),
    [
        (PATCH, ADDED, True), (PATCH, UPDATED, True), (PATCH, ADDED + "\n", True), (PATCH, ADDED[:-1], False),
        (PATCH, "*** Begin Patch\n*** End Patch", False), (PATCH, ADDED.replace("\n", "\r"), False),
        (SCRIPT, 'const r = await tools.exec_command({cmd: "ls\\n"});\n', True), (SCRIPT, "", False),
        (SCRIPT, "// @exec: {}\ntext(1)", True), (SCRIPT, "\x00\x1f\x7f", True),
        (SUMS, "1 + (2 * 3)", True), (SUMS, "1 + (2 * 3", False), (SUMS, "1+2", False),
        ('start: "a"i B\nB: "x".."z"', "Ay", True), ('start: "a"i B\nB: "x".."z"', "Aw", False),
        (r'start: "\"" /\w+/ "\"" | /[^\d"]/', '"é_1"', True), (r'start: /[^\d"]/', '"', False),
        (r'start: /[^\d"]/', "\\", True), (r'start: /[^\d"]/', "\n", True), (r"start: /\p{L}+/", "aé", True),
        (r"start: /\P{L}+/", '1"\\\n', True), (r"start: /\P{L}+/", "a", False), ("start: /.+/s", "a\nb", True),
        ("start: /(?s:a.)b.*/", "a\nbc", True), ("start: /(?s:a.)b.*/", "a\nb\n", False),
        ("start: start2 start\n| \nstart2: /a/", "aaa", True), ("start: /a/ ~ 2..3", "aaa", True),
        ("start: /a/{2,3}", "aaaa", False), ("start: A WS_INLINE\n%import common (WS_INLINE)\nA: /a/", "a\t", True),
        ("start: A B\nA: /a/\nB: /b/\n%ignore / +/", "a  b", True), ('start: "a" ["b"] "c"', "ac", True),
        ('start: A\nA: "a" "b"\n%ignore " "', "a b", False), ("%ignore / +/\nstart: /a/ B*\nB: /b/", "ab b", True),
        (r"start: /\S+/", "a\xa0", False), (r"start: /[^\S\n]/", "\t", True),
    ],
)  # fmt: skip
def test_a_lark_grammar_takes_the_same_texts_quoted(source: str, text: str, good: bool) -> None:
    assert same(source, quoted_grammar(source), text) is good


@pytest.mark.parametrize(
    ("pattern", "text", "good"),
    [
        (r"^(?P<month>January|March)\s+\d{1,2}(?:st|th)$", "March\n3th", True), ("^ab|c$", "ab", True),
        (r"[\x00-\x1f]*", "\x00\x07\x1f\n", True), (r'["\\]+', '"\\', True), (r"[a-z]+", "A", False),
        (r"(?i)abc", "aBC", True), (r"a/b", "a/b", True), (r"a.c", "a\rc", True), (r"a.c", "a\nc", False),
    ],
)  # fmt: skip
def test_a_pattern_takes_the_same_texts_quoted(pattern: str, text: str, good: bool) -> None:
    bare = pattern.removeprefix("^").removesuffix("$")
    assert same(f"start: /{lark_regex(bare)}/", quoted_regex(pattern), text) is good


def test_no_text_has_two_spellings() -> None:
    quoted = lark(quoted_regex(r"[\s\S]*"))
    assert accepts(quoted, r'"\n\u0001é"')
    for other in (r'"\u000a"', r'"\/"', r'"\u0041"', '"\n"', r'"\x"', '""""'):
        assert not accepts(quoted, other)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("start: %json {}", 1), ("start: A\nA: /a/ & /b/", 2), ("start: <|im_end|>", 1), ("start: @other", 1),
        ("start: A\n%import common.NONE -> A", 2), ("start: /a/x", 1), ('start: "b".."a"', 1), ("start: A\nA: ~/a/", 2),
    ],
)  # fmt: skip
def test_what_has_no_quoted_form_is_refused_with_its_line(source: str, line: int) -> None:
    with pytest.raises(InvalidRequest, match=f"line {line}") as caught:
        quoted_grammar(source)
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize("pattern", ["a(?=b)", "a^b", "(", r"\bword", "[a&&b]", "[[:alpha:]]", r"\p{Greek}+"])
def test_patterns_without_a_quoted_form_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="the pattern"):
        quoted_regex(pattern)
