"""The forms of calls that models were taught, as data: what a template gives them away by, what reads them, and how a
grammar writes them."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec

from penstock.engine_core.parsers import harmony, llama, pythonic
from penstock.engine_core.parsers.framed import Frame
from penstock.engine_core.parsers.notations import notation, read_lines, read_list, read_quoted
from penstock.engine_core.parsers.tagged import Elements, Tags, read_elements


class CallFormat(enum.Enum):
    """How calls are written; the values are the names of `--tool-call-parser`."""

    HERMES = "hermes"
    LLAMA = "llama3_json"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    QWEN3_CODER = "qwen3_coder"
    GLM45 = "glm45"
    HARMONY = "harmony"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    DEEPSEEK_V32 = "deepseek_v32"
    KIMI_K2 = "kimi_k2"
    MINIMAX_M2 = "minimax_m2"
    GEMMA4 = "gemma4"
    FUNCTIONGEMMA = "functiongemma"
    GRANITE = "granite"
    PHI4 = "phi4"
    PHI4_MINI = "phi4_mini_json"
    OLMO3 = "olmo3"
    HUNYUAN = "hunyuan_a13b"
    SEED_OSS = "seed_oss"
    LFM2 = "lfm2"


class Spelling(msgspec.Struct, frozen=True, kw_only=True):
    """How a grammar writes calls. Control tokens stand for themselves; {name} is the function's, {quoted} the same as
    a JSON string, {index} a number."""

    first: str = ""  # before all calls
    begin: str  # before the arguments of one
    end: str = ""
    between: str = ""
    last: str = ""
    trigger: str = ""  # with which calls begin in text; empty: calls are all of the output
    # Around each argument's name and value, where they are written one by one, else the arguments are a JSON object.
    # {string} is true before a string and false before another value.
    argument: tuple[str, str, str] | None = None
    comma: str = ""  # between arguments
    quote: str | None = '"'  # around strings: JSON's, which escapes, or a mark of their own; None: they stand bare


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """One form of calls."""

    told: tuple[tuple[str, ...], ...] = ()  # a template that has all texts of one of these is of this form
    marks: tuple[str, ...]
    spelling: Spelling
    reader: Frame | Tags | None = None  # None: a machine of its own


def listed(opening: str, closing: str, marker: str) -> Spelling:
    """A JSON list behind a marker."""
    item = '{"name": {quoted}, "arguments": '
    return Spelling(first=opening + "[", begin=item, end="}", between=", ", last="]" + closing, trigger=marker)


def elements(head: str, key: str, stop: str, end: str, *, several: bool = True, blanks: str = "") -> Elements:
    """A call with an element for each argument. Patterns: `head` and `key` have the names, `stop` ends an argument and
    `end` the call. `several`: another may follow; `blanks` around values are none of them."""
    first, next_key = head.partition("(")[0], key.partition("(")[0]
    behind = rf"(?={next_key}|{end}\s*(?:{first}|\Z))" if several else rf"(?={next_key}|{end}\s*\Z)"
    return Elements(
        re.compile(rf"\s*{head}\s*"),
        re.compile(rf"{key}{blanks}(?P<value>.*?){blanks}{stop}\s*{behind}", re.DOTALL),
        re.compile(rf"{end}\s*"),
    )


OBJECT = '{"name": {quoted}, '
NAME = r"([^\s\[\]{}<>|｜:]+)"
MISTRAL_HEAD = r"([^\s\[\]{}]+)(?:\[CALL_ID\]\s*[^\s\[\]{}]*)?\s*(?:\[ARGS\])?\s*(?=\{)"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
SECTION, ONE, SEPARATOR, ONE_END, SECTION_END = DEEPSEEK
DEEPSEEK_HEAD = rf"(?:{ONE})?\s*(?:function\s*{SEPARATOR}\s*)?{NAME}\s*(?:{SEPARATOR}|```json)\s*(?=\{{)"
DEEPSEEK_FRAME = Frame((SECTION, ONE), ("```", ONE_END, SECTION_END), re.compile(DEEPSEEK_HEAD))
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
KIMI_HEAD = rf"(?:{re.escape(KIMI[1])})?\s*(?:functions\.)?{NAME}(?::\d+)?\s*{re.escape(KIMI[2])}\s*(?=\{{)"
DSML = "｜DSML｜"
WORD = r"([^<>\s\"]+)"
KEY = r"(?P<key>[^<>\s\"]+)"
# Qwen3-Coder's, and the same where an argument's end is left out: whatever it holds up to the next one is its value.
FUNCTIONS: tuple[Elements, ...] = tuple(
    [
        elements(f"<function={WORD}>", f"<parameter={KEY}>", stop, "</function>", several=False, blanks=r"\n?")
        for stop in ("</parameter>", r"(?:</parameter>\s*)?")
    ]
)
PAIRS: Final = elements(WORD, rf"<arg_key>\s*{KEY}\s*</arg_key>\s*<arg_value>", "</arg_value>", r"\Z", several=False)
INVOKES: Final = elements(f'<invoke name="{WORD}">', f'<parameter name="{KEY}">', "</parameter>", "</invoke>")
DSML_KEY = rf'<{DSML}parameter name="{KEY}"(?:\s+string="(?P<string>true|false)")?>'
DSML_INVOKES: Final = elements(f'<{DSML}invoke name="{WORD}">', DSML_KEY, f"</{DSML}parameter>", f"</{DSML}invoke>")


def tagged(opening: str, closing: str, *forms: Elements, bare: bool = False, lenient: bool = False) -> Tags:
    """Elements between markers."""
    return Tags(opening, closing, partial(read_elements, forms=forms), bare=bare, lenient=lenient)


def quoted_values(opening: str, closing: str, quote: str) -> Form:
    """Gemma's notation: call:name{key:value,...}, strings between two of a mark of their own."""
    return Form(
        told=((f"{opening}call:",),),
        marks=(opening, closing, quote),
        reader=Tags(opening, closing, partial(read_quoted, tokens=notation(quote)), lenient=True),
        spelling=Spelling(
            begin=f"{opening}call:{{name}}{{",
            end="}" + closing,
            trigger=opening,
            argument=("", ":", ""),
            comma=",",
            quote=quote,
        ),
    )


# In the order in which a template is asked.
FORMS: Mapping[CallFormat, Form] = {
    CallFormat.HARMONY: Form(
        told=((harmony.CHANNEL, harmony.MESSAGE, "to="),),
        marks=harmony.MARKS,
        spelling=Spelling(begin="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),
    ),
    CallFormat.DEEPSEEK_V32: Form(
        told=((DSML, "invoke name="),),
        marks=(DSML, f"<{DSML}function_calls>", f"</{DSML}function_calls>"),
        reader=tagged(f"<{DSML}function_calls>", f"</{DSML}function_calls>", DSML_INVOKES, lenient=True),
        spelling=Spelling(
            first=f"<{DSML}function_calls>\n",
            begin=f'<{DSML}invoke name="{{name}}">\n',
            end=f"</{DSML}invoke>\n",
            last=f"</{DSML}function_calls>",
            trigger=f"<{DSML}function_calls>",
            argument=(f'<{DSML}parameter name="', '" string="{string}">', f"</{DSML}parameter>\n"),
            quote=None,
        ),
    ),
    CallFormat.DEEPSEEK_V3: Form(
        told=((SECTION, "```json"), (ONE, "```json")),
        marks=DEEPSEEK,
        reader=DEEPSEEK_FRAME,
        spelling=Spelling(
            first=SECTION,
            begin=f"{ONE}function{SEPARATOR}{{name}}\n```json\n",
            end=f"\n```{ONE_END}",
            between="\n",
            last=SECTION_END,
            trigger=SECTION,
        ),
    ),
    CallFormat.DEEPSEEK_V31: Form(
        told=((SECTION,), (ONE,)),
        marks=DEEPSEEK,
        reader=DEEPSEEK_FRAME,
        spelling=Spelling(
            first=SECTION, begin=f"{ONE}{{name}}{SEPARATOR}", end=ONE_END, last=SECTION_END, trigger=SECTION
        ),
    ),
    CallFormat.KIMI_K2: Form(
        told=((KIMI[0],), ("<|im_middle|>", "tool_declare")),
        marks=KIMI,
        reader=Frame(KIMI[:2], KIMI[3:], re.compile(KIMI_HEAD)),
        spelling=Spelling(
            first=KIMI[0],
            begin=f"{KIMI[1]}functions.{{name}}:{{index}}{KIMI[2]}",
            end=KIMI[3],
            last=KIMI[4],
            trigger=KIMI[0],
        ),
    ),
    CallFormat.MINIMAX_M2: Form(
        told=(("<minimax:tool_call>",),),
        marks=("<minimax:tool_call>", "</minimax:tool_call>"),
        reader=tagged("<minimax:tool_call>", "</minimax:tool_call>", INVOKES, lenient=True),
        spelling=Spelling(
            first="<minimax:tool_call>\n",
            begin='<invoke name="{name}">\n',
            end="</invoke>\n",
            last="</minimax:tool_call>",
            trigger="<minimax:tool_call>",
            argument=('<parameter name="', '">', "</parameter>\n"),
            quote=None,
        ),
    ),
    CallFormat.GEMMA4: quoted_values("<|tool_call>", "<tool_call|>", '<|"|>'),
    CallFormat.FUNCTIONGEMMA: quoted_values("<start_function_call>", "<end_function_call>", "<escape>"),
    CallFormat.SEED_OSS: Form(
        told=(("<seed:tool_call>",),),
        marks=("<seed:tool_call>", "</seed:tool_call>"),
        reader=tagged("<seed:tool_call>", "</seed:tool_call>", *FUNCTIONS, lenient=True),
        spelling=Spelling(
            begin="<seed:tool_call>\n<function={name}>\n",
            end="</function>\n</seed:tool_call>",
            between="\n",
            trigger="<seed:tool_call>",
            argument=("<parameter=", ">", "</parameter>\n"),
            quote=None,
        ),
    ),
    CallFormat.GLM45: Form(
        told=(("<tool_call>", "<arg_key>"),),
        marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        reader=tagged("<tool_call>", "</tool_call>", PAIRS),
        spelling=Spelling(
            begin="<tool_call>{name}\n",
            end="</tool_call>",
            between="\n",
            trigger="<tool_call>",
            argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            quote=None,
        ),
    ),
    CallFormat.QWEN3_CODER: Form(
        told=(("<tool_call>", "<function="),),
        marks=("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
        reader=tagged("<tool_call>", "</tool_call>", *FUNCTIONS, bare=True),
        spelling=Spelling(
            begin="<tool_call>\n<function={name}>\n",
            end="</function>\n</tool_call>",
            between="\n",
            trigger="<tool_call>",
            argument=("<parameter=", ">\n", "\n</parameter>\n"),
            quote=None,
        ),
    ),
    CallFormat.HERMES: Form(
        told=(("<tool_call>",),),
        marks=("<tool_call>", "</tool_call>"),
        reader=Frame(("<tool_call>",), ("</tool_call>",)),
        spelling=Spelling(
            begin=f'<tool_call>\n{OBJECT}"arguments": ', end="}\n</tool_call>", between="\n", trigger="<tool_call>"
        ),
    ),
    CallFormat.HUNYUAN: Form(
        told=(("<tool_calls>",),),
        marks=("<tool_calls>", "</tool_calls>"),
        reader=Frame(("<tool_calls>",), ("</tool_calls>",)),
        spelling=listed("<tool_calls>", "</tool_calls>", "<tool_calls>"),
    ),
    CallFormat.OLMO3: Form(
        told=(("<function_calls>",),),
        marks=("<function_calls>", "</function_calls>"),
        reader=Tags("<function_calls>", "</function_calls>", read_lines, lenient=True),
        spelling=Spelling(
            first="<function_calls>\n",
            begin="{name}(",
            end=")",
            between="\n",
            last="\n</function_calls>",
            trigger="<function_calls>",
            argument=("", "=", ""),
            comma=", ",
        ),
    ),
    CallFormat.PHI4_MINI: Form(
        told=(("functools",),),
        marks=("<|tool_call|>", "<|/tool_call|>"),
        reader=Frame(("functools", "<|tool_call|>"), ("<|/tool_call|>",)),
        spelling=listed("functools", "", "functools"),
    ),
    CallFormat.PHI4: Form(
        told=(("<|tool_call|>", "<|/tool_call|>"),),
        marks=("<|tool_call|>", "<|/tool_call|>"),
        reader=Frame(("<|tool_call|>",), ("<|/tool_call|>",)),
        spelling=listed("<|tool_call|>", "<|/tool_call|>", "<|tool_call|>"),
    ),
    CallFormat.GRANITE: Form(
        told=(("<|tool_call|>",),),
        marks=("<|tool_call|>", "<tool_call>", "</tool_call>"),
        reader=Frame(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
        spelling=listed("<|tool_call|>", "", "<|tool_call|>"),
    ),
    CallFormat.MISTRAL: Form(
        told=(("[TOOL_CALLS]",),),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        reader=Frame(("[TOOL_CALLS]",), (), re.compile(MISTRAL_HEAD)),
        spelling=Spelling(begin="[TOOL_CALLS]{name}[ARGS]", trigger="[TOOL_CALLS]"),
    ),
    CallFormat.LFM2: Form(
        told=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
        reader=Tags("<|tool_call_start|>", "<|tool_call_end|>", read_list, lenient=True),
        spelling=Spelling(
            first="<|tool_call_start|>[",
            begin="{name}(",
            end=")",
            between=", ",
            last="]<|tool_call_end|>",
            trigger="<|tool_call_start|>",
            argument=("", "=", ""),
            comma=", ",
        ),
    ),
    CallFormat.PYTHONIC: Form(
        marks=(pythonic.OPENING, pythonic.CLOSING),
        spelling=Spelling(
            first="[", begin="{name}(", end=")", between=", ", last="]", argument=("", "=", ""), comma=", "
        ),
    ),
    CallFormat.LLAMA: Form(
        told=(('"parameters"', '"name"', "<|start_header_id|>"),),
        marks=(llama.MARKER,),
        spelling=Spelling(begin=f'{OBJECT}"parameters": ', end="}", between="; "),
    ),
}
# Mistral's, before version 11 of their tokenizer.
MISTRAL_LIST: Final = msgspec.structs.replace(listed("[TOOL_CALLS] ", "", ""), trigger="")
# Whose calls do not tell strings from other values.
UNTYPED = frozenset(
    (CallFormat.QWEN3_CODER, CallFormat.GLM45, CallFormat.MINIMAX_M2, CallFormat.DEEPSEEK_V32, CallFormat.SEED_OSS)
)
