"""A template tells how its model writes calls and reasoning; options say it where it does not."""

from __future__ import annotations

import typing

import msgspec
import pytest

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.parsers.dialect import (
    BRACKETS,
    REASONING,
    THINK,
    Parsing,
    call_parser,
    read_dialect,
    told_calls,
    told_reasoning,
)
from penstock.engine_core.parsers.formats import FORMS, CallFormat
from penstock.engine_core.text.template import read_template
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.option import Option
from tests.engine_core.tokenizer.vocabularies import vocabulary

TEMPLATES = {
    "qwen": '<tool_call>\n{"name": "\' + call.name + \'", "arguments": ',
    "qwen_coder": "<tool_call>\n<function=' + call.name + '>",
    "glm": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "mistral": "{{ bos_token }}[AVAILABLE_TOOLS]...[TOOL_CALLS]",
    "llama": '<|start_header_id|>... respond in the format {"name": function name, "parameters": dictionary}',
    "llama4": "<|header_start|> put it in the format of [func_name1(params_name1=params_value1), func_name2()]",
    "plain": "{% for message in messages %}{{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("qwen", CallFormat.HERMES), ("qwen_coder", CallFormat.QWEN3_CODER), ("glm", CallFormat.GLM45),
     ("mistral", CallFormat.MISTRAL), ("llama", CallFormat.LLAMA),
     ("llama4", CallFormat.PYTHONIC), ("plain", None)],
)  # fmt: skip
def test_the_template_tells_the_format_of_calls(name: str, expected: CallFormat | None) -> None:
    assert told_calls(TEMPLATES[name]) is expected


def test_the_template_tells_the_markers() -> None:
    assert told_reasoning("x </think> y") == THINK
    assert told_reasoning("[THINK]x[/THINK]") == BRACKETS
    assert told_reasoning("none") is None


def test_options_override_the_template() -> None:
    found = read_dialect(TEMPLATES["qwen"], vocabulary("byte_level"), "mistral", "deepseek_r1")
    assert (found.calls, found.listed, found.reasoning, found.begins_inside) == (CallFormat.MISTRAL, True, THINK, True)
    assert found.closing is None
    nothing = read_dialect(TEMPLATES["qwen"] + "</think>", vocabulary("byte_level"), "none", "none")
    assert (nothing.calls, nothing.reasoning) == (None, None)


def test_the_embedded_model() -> None:
    found = read_vocabulary(demo_folder())
    dialect = read_dialect(read_template(demo_folder(), found.names).source, found)
    assert (dialect.calls, dialect.reasoning, dialect.begins_inside) == (CallFormat.HERMES, THINK, False)
    assert dialect.closing == 4091
    assert dialect.call_marks == frozenset()  # they are no special tokens, so nothing skips them


def test_special_tokens_that_parsers_must_see() -> None:
    found = vocabulary("byte_level")
    special = next(iter(found.special))
    named = msgspec.structs.replace(THINK, opening=found.token(special))
    assert named.opening
    assert read_dialect("", found, "hermes").call_marks <= found.special


@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_the_options_name_what_there_is(field: str) -> None:
    hint = typing.get_type_hints(TokenizerConfig, include_extras=True)[field]
    option = next(part for part in typing.get_args(hint) if isinstance(part, Option))
    known = {each.value for each in CallFormat} if field == "tool_call_parser" else set(REASONING)
    assert set(option.choices) == known | {"auto", "none"}


def test_every_format_has_a_parser_and_marks() -> None:
    for calls in CallFormat:
        assert call_parser(calls, frozenset()).flush() == []
        assert FORMS[calls].marks
    made = Parsing(reasoning=THINK, calls=CallFormat.HERMES).parser()
    assert not made.plain
    assert Parsing().parser().plain


def test_calls_that_no_grammar_has_seen_are_none_of_a_function_that_is_held_to_one() -> None:
    text = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    for held, called in ((frozenset[str](), True), (frozenset(("f",)), False)):
        made = Parsing(calls=CallFormat.QWEN3_CODER, names=frozenset(("f", "g")), held=held).parser()
        pieces = [*made.push(text), *made.flush()]
        assert made.called == called
        assert called or "".join(piece.text for piece in pieces) == text
