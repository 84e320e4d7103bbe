"""Calls with an element for each argument."""

from __future__ import annotations

import json

import pytest

from penstock.engine_core.parsers.dialect import OutputParser
from penstock.engine_core.parsers.formats import FORMS, CallFormat
from penstock.engine_core.parsers.tagged import MOST_HELD, TaggedParser, Tags
from penstock.protocol.messages import PieceKind
from tests.engine_core.parsers.outputs import calls_of, content_of, cut, parsed, parser

QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
BARE = QWEN.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
QWEN_TAGS, GLM_TAGS = FORMS[CallFormat.QWEN3_CODER].reader, FORMS[CallFormat.GLM45].reader
assert isinstance(QWEN_TAGS, Tags)
assert isinstance(GLM_TAGS, Tags)
F = ("f", '{"a":1}')
CODE = 'def f(x):\n    return "<b>" if x < 3 else None\n'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (QWEN, "", [F]), (f"Let me see.\n{QWEN}", "Let me see.", [F]), (f"{QWEN}\n{QWEN}\n", "", [F, F]),
        (f"{QWEN}\nDone.", "\nDone.", [F]), ("<tool_call><function=g></function></tool_call>", "", [("g", "{}")]),
        (QWEN.removesuffix("</tool_call>"), "", [F]), (QWEN.removesuffix("call>"), "", [F]),
        (QWEN.removesuffix("\n</function>\n</tool_call>"), QWEN.removesuffix("\n</function>\n</tool_call>"), []),
        (QWEN.replace("</function>\n", ""), QWEN.replace("</function>\n", ""), []),
        (QWEN.replace("</parameter>", ""), "", [F]),
        (BARE, "", [F]), (f"Let me see.\n\n{BARE}\n</tool_call>", "Let me see.", [F]), (f"{BARE}\n{BARE}", "", [F, F]),
        (f"{BARE}</tool_call>{QWEN}\n{BARE}\nDone.", "\nDone.", [F, F, F]), (f"{BARE}\n</tool", "", [F]),
        (f"{BARE}\n</tools>", "\n</tools>", [F]), (BARE.replace("=f", "=g"), BARE.replace("=f", "=g"), []),
        (f"Write <function=f> {QWEN}!", "Write <function=f>!", [F]), ("<function=", "<function=", []),
        (f"Write <function= or <function=x> {QWEN}", "Write <function= or <function=x>", [F]),
        (BARE[:-1], BARE[:-1], []), ("<function=" + "f" * 300 + ">", "<function=" + "f" * 300 + ">", []),
        ("<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>", []), ("a <tool_ b", "a <tool_ b", []),
        ("tail\n\n", "tail\n\n", []), ("x\n<tool_call>", "x\n<tool_call>", []),
        (f"<tool_call>\n</tool_call>{QWEN}", "<tool_call>\n</tool_call>", [F]),
    ],
)  # fmt: skip
def test_elements(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([text], list(text), cut(text, [7, 13, 40, 61])):
        pieces = parsed(parser(CallFormat.QWEN3_CODER), cuts)
        assert (content_of(pieces), calls_of(pieces)) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (GLM, "", [F]), (f"So.\n{GLM}\n{GLM}", "So.", [F, F]), ("<tool_call>g\n</tool_call>", "", [("g", "{}")]),
        ("<tool_call>g</tool_call>", "", [("g", "{}")]),
        (GLM.replace("</arg_value>", ""), GLM.replace("</arg_value>", ""), []),
        ("<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
        (GLM[:-1], GLM[:-1], []), ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ],
)  # fmt: skip
def test_pairs(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([text], list(text), cut(text, [7, 13, 40, 61])):
        pieces = parsed(parser(CallFormat.GLM45), cuts)
        assert (content_of(pieces), calls_of(pieces)) == (content, calls)


def test_strings_stand_as_they_are_and_the_schema_tells_them() -> None:
    kinds = {"write": {"path": frozenset(("string",)), "code": frozenset(("string",)), "mode": frozenset(("integer",))}}
    qwen = (
        f"<tool_call>\n<function=write>\n<parameter=path>\n5\n</parameter>\n<parameter=code>\n{CODE}\n</parameter>\n"
        "<parameter=mode>\n420\n</parameter>\n</function>\n</tool_call>"
    )
    glm = (
        f"<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>5</arg_value>\n<arg_key>code</arg_key>\n"
        f"<arg_value>{CODE}</arg_value>\n<arg_key>mode</arg_key>\n<arg_value>420</arg_value>\n</tool_call>"
    )
    for text, tags in ((qwen, QWEN_TAGS), (glm, GLM_TAGS)):
        pieces = parsed(OutputParser(None, TaggedParser(tags, kinds)), list(text))
        ((name, arguments),) = calls_of(pieces)
        assert name == "write"
        assert json.loads(arguments) == {"path": "5", "code": CODE, "mode": 420}


def test_a_value_may_hold_what_looks_like_an_element() -> None:
    value = "a</parameter> b<parameter=x> c"
    text = f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call>"
    ((_, arguments),) = calls_of(parsed(parser(CallFormat.QWEN3_CODER), list(text)))
    assert json.loads(arguments) == {"a": value}


def test_parameters_without_ends() -> None:
    text = "<function=f>\n<parameter=a>\n1\n<parameter=b>\nx < y\n</function>\n</tool_call>"
    assert calls_of(parsed(parser(CallFormat.QWEN3_CODER), list(text))) == [("f", '{"a":1,"b":"x < y"}')]


def test_a_call_that_the_end_of_the_output_completes_is_one() -> None:
    machine = parser(CallFormat.QWEN3_CODER)
    assert calls_of(parsed(machine, [QWEN.removesuffix("</tool_call>")])) == [F]
    assert machine.complete


def test_a_call_goes_out_whole_and_one_without_end_is_text() -> None:
    machine = TaggedParser(QWEN_TAGS, {})
    assert [piece.kind for piece in machine.push("Hi " + QWEN[:-1])] == [PieceKind.CONTENT]
    assert not machine.open
    assert [piece.kind for piece in machine.push(">")] == [PieceKind.CALL, PieceKind.ARGUMENTS]
    endless = "<tool_call>" + "x" * (MOST_HELD + 100) + QWEN
    for cuts in ([endless], [endless[at : at + 1000] for at in range(0, len(endless), 1000)]):
        pieces = parsed(parser(CallFormat.QWEN3_CODER), cuts)
        assert content_of(pieces) == endless.removesuffix(QWEN)
        assert calls_of(pieces) == [F]
