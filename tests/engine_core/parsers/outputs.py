"""Outputs as models write them, well and badly, and any way of cutting them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from penstock.engine_core.parsers.dialect import THINK, OutputParser, call_parser
from penstock.engine_core.parsers.formats import FORMS, CallFormat
from penstock.engine_core.parsers.harmony import HarmonyParser
from penstock.engine_core.parsers.reasoning import ReasoningParser
from penstock.engine_core.parsers.scanning import merged
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

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


def listed_in(opening: str, closing: str = "") -> Callable[[Sequence[Call]], str]:
    """A JSON list between these."""
    return lambda calls: opening + listed(calls).removeprefix("[TOOL_CALLS] ") + closing


def deepseek_v3(calls: Sequence[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def invokes(calls: Sequence[Call]) -> str:
    """MiniMax M2's."""
    written = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{written}</minimax:tool_call>"


def dsml(calls: Sequence[Call]) -> str:
    """DeepSeek V3.2's."""

    def parameter(key: str, value: object) -> str:
        told = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{told}">{plain(value)}</｜DSML｜parameter>\n'

    written = "".join(
        f'<｜DSML｜invoke name="{name}">\n{"".join(parameter(*each) for each in arguments.items())}</｜DSML｜invoke>\n'
        for name, arguments in calls
    )
    return f"<｜DSML｜function_calls>\n{written}</｜DSML｜function_calls>"


def seed(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{plain(value)}</parameter>\n" for key, value in arguments.items())
        + "</function>\n</seed:tool_call>"
        for name, arguments in calls
    )


def noted(opening: str, closing: str, quote: str) -> Callable[[Sequence[Call]], str]:
    """Gemma's notation between these, strings between two of the mark."""

    def value(of: object) -> str:
        match of:
            case str():
                return quote + of + quote
            case dict():
                return "{" + ",".join(f"{key}:{value(each)}" for key, each in of.items()) + "}"
            case list():
                return f"[{','.join(map(value, of))}]"
            case _:
                return json.dumps(of)

    return lambda calls: "".join(f"{opening}call:{name}{value(arguments)}{closing}" for name, arguments in calls)


def lines(calls: Sequence[Call]) -> str:
    """OLMo 3's."""
    written = "\n".join(f"{name}({keywords(arguments)})" for name, arguments in calls)
    return f"<function_calls>\n{written}\n</function_calls>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"
        for name, arguments in calls
    )


def harmony_of_templates(calls: Sequence[Call]) -> str:
    """The recipient stands before the channel there."""
    return "<|call|><|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}" for name, arguments in calls
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
    (CallFormat.DEEPSEEK_V3, "fenced"): deepseek_v3,
    (CallFormat.DEEPSEEK_V31, "named"): deepseek_v31,
    (CallFormat.DEEPSEEK_V32, "dsml"): dsml,
    (CallFormat.KIMI_K2, "named"): kimi,
    (CallFormat.MINIMAX_M2, "invokes"): invokes,
    (CallFormat.SEED_OSS, "elements"): seed,
    (CallFormat.GEMMA4, "noted"): noted("<|tool_call>", "<tool_call|>", '<|"|>'),
    (CallFormat.FUNCTIONGEMMA, "noted"): noted("<start_function_call>", "<end_function_call>", "<escape>"),
    (CallFormat.GRANITE, "listed"): listed_in("<|tool_call|>"),
    (CallFormat.GRANITE, "spaced"): listed_in("<tool_call> "),
    (CallFormat.PHI4, "listed"): listed_in("<|tool_call|>", "<|/tool_call|>"),
    (CallFormat.PHI4_MINI, "listed"): listed_in("functools"),
    (CallFormat.HUNYUAN, "listed"): listed_in("<tool_calls>", "</tool_calls>"),
    (CallFormat.OLMO3, "lines"): lines,
    (CallFormat.LFM2, "list"): lambda calls: f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>",
    (CallFormat.HARMONY, "channel"): harmony,
    (CallFormat.HARMONY, "recipient"): harmony_of_templates,
}
# Whose calls stand at the beginning of the output or nowhere.
ALONE = frozenset((CallFormat.LLAMA, CallFormat.PYTHONIC))
MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ',
    '{"name": "f", "parameters": ', '{"arguments": {}, "name": "f"}', '"name"', "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", "[f(", "f(a=1)", "<|python_start|>", "<|python_end|>", "{", "}", "]", ")", "; ", ", ", "\n\n",
    " ", '"', "\\", "'", "<function=f>", "</function>", "<parameter=a>\n", "\n</parameter>", "<arg_key>a</arg_key>",
    "<arg_value>", "</arg_value>",
)  # fmt: skip
SOUPS = st.lists(st.sampled_from(MARKS) | TEXTS, max_size=14).map("".join)


def soups(calls: CallFormat | None) -> st.SearchStrategy[str]:
    """What a model of this format may write, in any order."""
    if calls is None:
        return SOUPS
    ((form, write), *_) = [(form, write) for (of, form), write in WRITERS.items() if of is calls]
    del form
    call = write([("f", {"a": "x", "b": [1]})])
    parts = re.split(r"(?<=[>\]}｜])|(?=[<\[{])|(?<=\w)(?=\()", call)
    own = [*FORMS[calls].marks, *filter(None, parts), call]
    return st.lists(st.sampled_from(own) | st.sampled_from(MARKS) | TEXTS, max_size=14).map("".join)


def parser(calls: CallFormat | None, *, reasoning: bool = True, inside: bool = False) -> OutputParser:
    if calls is CallFormat.HARMONY:
        return OutputParser(None, HarmonyParser(NAMES, reasons=reasoning, inside=inside))
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
