"""Each form of calls: what a template of it looks like, and what outputs in its spelling are read as. The spellings are
those of the published chat templates."""

from __future__ import annotations

import json

import pytest

from penstock.engine_core.parsers.dialect import (
    ANALYSIS,
    ANSWER,
    GEMMA,
    PROSE,
    RESPONSE,
    SEED,
    THINK,
    Markers,
    OutputParser,
    call_parser,
    told_calls,
    told_reasoning,
)
from penstock.engine_core.parsers.formats import FORMS, CallFormat
from tests.engine_core.parsers.outputs import NAMES, WRITERS, calls_of, content_of, cut, parsed, parser

D = "｜DSML｜"
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"

# Of each template the lines that write calls, shortened.
TEMPLATES: dict[CallFormat, tuple[str, ...]] = {
    CallFormat.HARMONY: (
        "{{- '<|start|>assistant to=' }}{{- 'functions.' + tool_call.name + '<|channel|>commentary json<|message|>' }}",
    ),
    CallFormat.DEEPSEEK_V32: (
        '<{{ dsml_token }}function_calls>{%- set dsml_token = "｜DSML｜" -%}<{{ dsml_token }}invoke name="{{ name }}">',
    ),
    CallFormat.DEEPSEEK_V3: (
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'",
    ),
    CallFormat.DEEPSEEK_V31: ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments",),
    CallFormat.KIMI_K2: (
        "<|tool_calls_section_begin|>{%- for call in message['tool_calls'] -%}<|tool_call_begin|>{{ call['id'] }}",
        "{{ '<|im_system|>tool_declare<|im_middle|>' -}}{{- tools | tojson -}}",
    ),
    CallFormat.MINIMAX_M2: ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=",),
    CallFormat.GEMMA4: ("{{- '<|tool_call>call:' + function['name'] + '{' -}}",),
    CallFormat.FUNCTIONGEMMA: ("'<start_function_call>call:' + function['name'] + '{'",),
    CallFormat.SEED_OSS: ("<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",),
    CallFormat.GLM45: ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",),
    CallFormat.QWEN3_CODER: ("<tool_call>\n<function=' + call.name + '>",),
    CallFormat.HERMES: ('<tool_call>\n{"name": "\' + call.name + \'", "arguments": ',),
    CallFormat.HUNYUAN: ("<tool_calls>[{\"name\": \"func_name1\", \"arguments\": {}},...]</tool_calls>",),
    CallFormat.OLMO3: ("{{- \"<|im_start|>assistant\\n<function_calls>\\n\" }}",),
    CallFormat.PHI4_MINI: ("prefix function calls with functools marker (no closing marker required)",),
    CallFormat.PHI4: ("{{- '<|tool_call|>' + (tool_call['function'] | tojson) + '<|/tool_call|>' -}}",),
    CallFormat.GRANITE: ("respond only with <|tool_call|> followed by a JSON list of tools used",),
    CallFormat.MISTRAL: ("{{ bos_token }}[AVAILABLE_TOOLS]...[TOOL_CALLS]",),
    CallFormat.LFM2: (
        '"List of tools: <|tool_list_start|>["', '"List of tools: ["', "{%- if '<|tool_call_start|>' in content -%}"
    ),
    CallFormat.PYTHONIC: (
        "<|header_start|> put it in the format of [func_name1(params_name1=params_value1), func_name2()]",
        "Example Format: [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    ),
    CallFormat.LLAMA: ('<|start_header_id|>... the format {"name": function name, "parameters": dictionary}',),
}  # fmt: skip


def test_every_form_is_here() -> None:
    assert set(TEMPLATES) == set(FORMS) == set(CallFormat)
    assert {calls for calls, _ in WRITERS} == set(CallFormat)


@pytest.mark.parametrize("calls", TEMPLATES)
def test_the_template_tells_the_form(calls: CallFormat) -> None:
    for template in TEMPLATES[calls]:
        assert told_calls(template) is calls
    assert told_calls("{% for message in messages %}{{ message.content }}{% endfor %}") is None


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        (TEMPLATES[CallFormat.HARMONY][0], ANALYSIS), ("'<|channel>thought\\n<channel|>'", GEMMA),
        ("your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'", PROSE),
        ("your thoughts between <think></think> and your response between <response></response>", RESPONSE),
        ("'<think>\\n\\n</think>\\n' '<answer>\\n' '\\n</answer>'", ANSWER), ("'</seed:think>'", SEED),
        ("format it as <tool_calls>[...]</tool_calls> '<think>\\n\\n</think>\\n'", ANSWER),
        ("{{'<｜Assistant｜>'}}{%- if not thinking -%}{{'</think>'}}", THINK), ("<think>{{rc}}</think>", THINK),
    ],
)  # fmt: skip
def test_the_template_tells_the_reasoning(template: str, markers: Markers) -> None:
    assert told_reasoning(template) == markers


F = ("f", '{"a": 1}')
G = ("g", "{}")
READ: dict[CallFormat, list[tuple[str, str, list[tuple[str, str]]]]] = {
    CallFormat.DEEPSEEK_V3: [
        (
            f'So.\n\n{V3}function<｜tool▁sep｜>f\n```json\n{{"a": 1}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "So.",
            [F],
        ),
        (f'{V3}function<｜tool▁sep｜>f\n```json\n{{"a": 1}}\n```<｜tool▁call▁end｜>', "", [F]),
        (f'{V3}function<｜tool▁sep｜>f\n```json\n{{"a": 1}}', "", [F]),
        (f'{V3}function<｜tool▁sep｜>function\n```json\n{{"a": 1}}\n```', "", [("function", F[1])]),
        (f"{V3}function<｜tool▁sep｜>f\n```json\n", f"{V3}function<｜tool▁sep｜>f\n```json\n", []),
        (f"{V3}<｜tool▁sep｜>{{}}", f"{V3}<｜tool▁sep｜>{{}}", []),
        ("```json\n{}\n```", "```json\n{}\n```", []),
    ],
    CallFormat.DEEPSEEK_V31: [
        (
            f'{V3}f<｜tool▁sep｜>{{"a": 1}}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            "",
            [F, G],
        ),
        (f'{V3}function<｜tool▁sep｜>{{"a": 1}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [("function", F[1])]),
        ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>\nDone.', "\nDone.", [F]),
    ],
    CallFormat.DEEPSEEK_V32: [
        (
            f'Hm.\n\n<{D}function_calls>\n<{D}invoke name="f">\n'
            f'<{D}parameter name="a" string="false">1</{D}parameter>\n'
            f'<{D}parameter name="b" string="true">1 < 2\n"x"</{D}parameter>\n</{D}invoke>\n'
            f'<{D}invoke name="g">\n</{D}invoke>\n'
            f"</{D}function_calls>",
            "Hm.",
            [("f", '{"a":1,"b":"1 < 2\\n\\"x\\""}'), G],
        ),
        (f'<{D}function_calls>\n<{D}invoke name="g">\n</{D}invoke>\n', "", [G]),
        (f'<{D}function_calls>\n<{D}invoke name="g">\n', f'<{D}function_calls>\n<{D}invoke name="g">\n', []),
    ],
    CallFormat.KIMI_K2: [
        (
            f'I look.{KIMI}functions.f:0<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
            "<|tool_call_begin|>functions.g:1"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "I look.",
            [F, G],
        ),
        ('<|tool_call_begin|>f<|tool_call_argument_begin|> {"a": 1}<|tool_call_end|>', "", [F]),
        (f"{KIMI}two words<|tool_call_argument_begin|>{{}}", f"{KIMI}two words<|tool_call_argument_begin|>{{}}", []),
        (f'{KIMI}!{KIMI}functions.f:0<|tool_call_argument_begin|>{{"a": 1}}', f"{KIMI}!", [F]),
        (KIMI[:-4], KIMI[:-4], []),
    ],
    CallFormat.MINIMAX_M2: [
        (
            'Hm.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
            '<parameter name="b">["x"]</parameter>\n'
            '</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
            "Hm.",
            [("f", '{"a":1,"b":["x"]}'), G],
        ),
        (
            '<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter> y</parameter></invoke>'
            "</minimax:tool_call>",
            "",
            [("f", '{"a":"x</parameter> y"}')],
        ),
        ('<minimax:tool_call><invoke name="g"></invoke></minimax:tool_', "", [G]),
        ("<minimax:tool_call>hello</minimax:tool_call>", "<minimax:tool_call>hello</minimax:tool_call>", []),
    ],
    CallFormat.SEED_OSS: [
        (
            "<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n<parameter=b>two\nlines</parameter>\n</function>\n"
            "</seed:tool_call>",
            "",
            [("f", '{"a":1,"b":"two\\nlines"}')],
        ),
    ],
    CallFormat.GEMMA4: [
        (
            '<|tool_call>call:f{a:1,b:<|"|>x, "y"}\n<|"|>,'
            'c:[<|"|>é<|"|>,-2.5,null],d:{e:true,f-g:<|"|><|"|>}}<tool_call|>'
            "<|tool_call>call:g{}<tool_call|>",
            "",
            [("f", '{"a":1,"b":"x, \\"y\\"}\\n","c":["é",-2.5,null],"d":{"e":true,"f-g":""}}'), G],
        ),
        ('<|tool_call>call:f{true:<|"|>x<|"|>,<|"|>a b<|"|>:"c"}<tool_call|>', "", [("f", '{"true":"x","a b":"c"}')]),
        ("<|tool_call>call:g{}", "", [G]),
        ("<|tool_call>call:f{a:Rome}<tool_call|>", "<|tool_call>call:f{a:Rome}<tool_call|>", []),
        ("<|tool_call>call:f{a:1 2}<tool_call|>", "<|tool_call>call:f{a:1 2}<tool_call|>", []),
        ('<|tool_call>call:f{a:<|"|>x}<tool_call|>', '<|tool_call>call:f{a:<|"|>x}<tool_call|>', []),
        ("<|tool_call>f{}<tool_call|>", "<|tool_call>f{}<tool_call|>", []),
    ],
    CallFormat.FUNCTIONGEMMA: [
        ("<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>", "", [("f", '{"a":"x"}')]),
    ],
    CallFormat.GRANITE: [
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F, G]),
        ('<|tool_call|> {"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a":1}')]),
        ('<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', "", [F]),
        ("<|tool_call|>[]", "<|tool_call|>[]", []),
    ],
    CallFormat.PHI4: [
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', "", [F]),
        ('<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>!', "!", [F]),
    ],
    CallFormat.PHI4_MINI: [
        ('functools[{"name": "f", "arguments": {"a": 1}}]', "", [F]),
        ("import functools\n\n@functools.cache", "import functools\n\n@functools.cache", []),
        ("functools[0]", "functools[0]", []),
        ("a func", "a func", []),
    ],
    CallFormat.HUNYUAN: [('<tool_calls>\n[{"name": "f", "arguments": {"a": 1}}]\n</tool_calls>', "", [F])],
    CallFormat.OLMO3: [
        (
            "I look.\n<function_calls>\nf(a=1, b='it\\'s', c=[true, null], d={'e': \"(\"})\ng()\n</function_calls>",
            "I look.",
            [("f", '{"a":1,"b":"it\'s","c":[true,null],"d":{"e":"("}}'), G],
        ),
        ("<function_calls>\ng()", "", [G]),
        ("<function_calls>\nf(x)\n</function_calls>", "<function_calls>\nf(x)\n</function_calls>", []),
        ("<function_calls></function_calls>", "<function_calls></function_calls>", []),
        ("<function_calls>g() and</function_calls>", "<function_calls>g() and</function_calls>", []),
    ],
    CallFormat.LFM2: [
        ("<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>I look.", "I look.", [("f", '{"a":1}'), G]),
        ("So. <|tool_call_start|>[g()]<|tool_call_end|>", "So.", [G]),
        ("<|tool_call_start|>[g()]", "", [G]),
        ("<|tool_call_start|>g()<|tool_call_end|>", "<|tool_call_start|>g()<|tool_call_end|>", []),
        ("<|tool_call_start|>[f(x)]<|tool_call_end|>", "<|tool_call_start|>[f(x)]<|tool_call_end|>", []),
        ("[g()]", "[g()]", []),
    ],
}


@pytest.mark.parametrize(("calls", "number"), [(calls, number) for calls in READ for number in range(len(READ[calls]))])
def test_outputs(calls: CallFormat, number: int) -> None:
    text, content, found = READ[calls][number]
    for cuts in ([text], list(text), cut(text, [7, 13, 40, 61])):
        pieces = parsed(parser(calls), cuts)
        assert (content_of(pieces), calls_of(pieces)) == (content, found)


@pytest.mark.parametrize("calls", [CallFormat.MINIMAX_M2, CallFormat.SEED_OSS])
def test_the_schema_tells_strings(calls: CallFormat) -> None:
    kinds = {"f": {"a": frozenset(("string",)), "b": frozenset(("integer", "null"))}}
    ((write),) = [write for (of, _), write in WRITERS.items() if of is calls]
    machine = OutputParser(None, call_parser(calls, NAMES, kinds))
    ((_, arguments),) = calls_of(parsed(machine, [write([("f", {"a": "5", "b": 5, "c": 5})])]))
    assert json.loads(arguments) == {"a": "5", "b": 5, "c": 5}


def test_a_name_behind_a_marker_ends_where_another_marker_begins() -> None:
    section = "<|tool_calls_section_begin|>"
    text = section * 3 + f'{KIMI}functions.f:0<|tool_call_argument_begin|>{{"a": 1}}'
    pieces = parsed(parser(CallFormat.KIMI_K2), list(text))
    assert (content_of(pieces), calls_of(pieces)) == (section * 3, [F])
