"""Outputs as models write them, well and badly, and any way of cutting them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from penstock.engine_core.parsers.dialect import THINK, CallFormat, OutputParser, call_parser
from penstock.engine_core.parsers.reasoning import ReasoningParser
from penstock.engine_core.parsers.scanning import merged
from penstock.protocol.messages import Piece, PieceKind

NAMES = frozenset(("f", "get_weather", "a.b-c"))
TEXTS = st.text(st.sampled_from("ab {}[]()<>\"'\\\n,:;=/|_tol"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab\"'\\\n{}[]é<", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text("abc", min_size=1, max_size=4), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)
Call = tuple[str, dict[str, object]]


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def listed(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(f'{name}({keywords(arguments)})' for name, arguments in calls)}]"


def elements(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def bare(calls: Sequence[Call]) -> str:
    return elements(calls).replace("<tool_call>\n", "").replace("\n</tool_call>", "")


def pairs(calls: Sequence[Call]) -> str:
    def pair(key: str, value: object) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"

    return "\n".join(
        f"<tool_call>{name}\n{''.join(pair(*each) for each in arguments.items())}</tool_call>"
        for name, arguments in calls
    )


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def keywords(arguments: dict[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


WRITERS: dict[tuple[CallFormat, str], Callable[[Sequence[Call]], str]] = {
    (CallFormat.HERMES, "marked"): hermes,
    (CallFormat.LLAMA, "json"): llama,
    (CallFormat.MISTRAL, "named"): mistral,
    (CallFormat.MISTRAL, "listed"): listed,
    (CallFormat.PYTHONIC, "list"): pythonic,
    (CallFormat.QWEN3_CODER, "elements"): elements,
    (CallFormat.QWEN3_CODER, "bare"): bare,
    (CallFormat.GLM45, "pairs"): pairs,
}
MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ',
    '{"name": "f", "parameters": ', '{"arguments": {}, "name": "f"}', '"name"', "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", "[f(", "f(a=1)", "<|python_start|>", "<|python_end|>", "{", "}", "]", ")", "; ", ", ", "\n\n",
    " ", '"', "\\", "'", "<function=f>", "</function>", "<parameter=a>\n", "\n</parameter>", "<arg_key>a</arg_key>",
    "<arg_value>", "</arg_value>",
)  # fmt: skip
SOUPS = st.lists(st.sampled_from(MARKS) | TEXTS, max_size=14).map("".join)


def parser(calls: CallFormat | None, *, reasoning: bool = True, inside: bool = False) -> OutputParser:
    return OutputParser(
        ReasoningParser(THINK, inside=inside) if reasoning else None,
        call_parser(calls, NAMES) if calls is not None else None,
    )


def parsed(machine: OutputParser, cuts: Sequence[str]) -> tuple[Piece, ...]:
    """All that comes of a text in these cuts."""
    pieces: list[Piece] = []
    for cut in cuts:
        pieces += machine.push(cut)
    return merged([*pieces, *machine.flush()])


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


def content_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == PieceKind.CONTENT)


def reasoning_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == PieceKind.REASONING)


def calls_of(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind == PieceKind.CALL:
            found.append((piece.text, ""))
        elif piece.kind == PieceKind.ARGUMENTS:
            found[-1] = (found[-1][0], found[-1][1] + piece.text)
    return found
