"""Where chat templates run: jinja2's immutable sandbox, with a budget.

A template comes with the model and its data from a client, so neither may run code, loop without end or fill the
memory. Every turn of a loop or of a filter that walks a list costs one step of a budget, whatever it walks; what
operators, string methods and filters make is counted before it is made; and so is the output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 1 << 18  # loop turns of one rendering
MAX_OUTPUT = 8 << 20  # characters of one rendering, and of any one string in it
MAX_MADE = 1 << 28  # characters and list entries that one rendering makes on its way
MAX_NUMBER = 1 << 64
METER = "penstock_meter"  # the names of a rendering's budget and of its time among what it was started with
MOMENT = "penstock_moment"
WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*?(\d{4}|\*)")  # a field that pads without bound
WIDE_BRACES = re.compile(r"{[^{}]*:[^{}]*(\d{4}|{)")
WALKING = frozenset(
    ("batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice",
     "sort", "sum", "unique")
)  # fmt: skip


class TemplateLimit(Exception):
    """A rendering went past its budget."""


class Meter:
    """What is left of one rendering's budget."""

    def __init__(self) -> None:
        self.turns = MAX_TURNS
        self.made = MAX_MADE

    def turn(self) -> None:
        """One turn of a loop."""
        self.turns -= 1
        if self.turns < 0:
            raise TemplateLimit(f"it takes more than {MAX_TURNS} loop turns")

    def make(self, length: int) -> None:
        """A string or a list of `length` is about to be made."""
        self.made -= length
        if length > MAX_OUTPUT or self.made < 0:
            raise TemplateLimit("it makes too much text")


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with bounded operators and calls; jinja2 looks these up as methods, so this is a class."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """jinja2's hook for `intercepted_binops`. Raises TemplateLimit."""
        meter = meter_of(context)
        match operator:
            case "*" if isinstance(left, int) or isinstance(right, int):
                meter.make(size(left) * right if isinstance(right, int) else size(right) * left)
            case "+":
                meter.make(size(left) + size(right))
            case "%" if isinstance(left, str):
                check_format(left, WIDE_PERCENT)
            case "**":
                raise TemplateLimit("it uses the ** operator")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and abs(result) > MAX_NUMBER:
            raise TemplateLimit("it computes too large a number")
        return result

    def call(self, context: Context, called: Any, /, *arguments: Any, **named: Any) -> Any:
        """jinja2's hook for every call. Raises TemplateLimit."""
        text = getattr(called, "__self__", None)
        if isinstance(text, str):
            arguments = count_method(meter_of(context), text, called.__name__, arguments)
        return super().call(context, called, *arguments, **named)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """jinja2's hook for errors. Its own gives the traceback frames of the template, which refer to each other and
        to the conversation, so that only the cycle collector would free it."""
        if source is not None:  # of a template that does not compile
            super().handle_exception(source)
        raise  # the error that is being handled


def count_method(meter: Meter, text: str, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Count what the method `name` of `text` is about to make. The arguments, iterators among them as lists."""
    match name, arguments:
        case ("center" | "ljust" | "rjust" | "zfill"), (int(width), *_):
            meter.make(width)
        case "expandtabs", (int(width), *_):
            meter.make(len(text) + text.count("\t") * width)
        case "replace", (str(old), str(new), *_):
            meter.make(len(text) + text.count(old) * len(new))
        case "join", (values,):
            strings = list(values)
            meter.make(sum(map(size, strings)) + len(text) * len(strings))
            return (strings,)
        case ("format" | "format_map"), _:
            check_format(text, WIDE_BRACES)
    return arguments


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; rendering prints the inside."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 only reads it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_sandbox() -> Sandbox:
    """An environment with what chat templates rely on. Source: transformers' documentation of chat templates."""
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"])
    sandbox.filters |= {
        "metered": metered,
        "concatenated": concatenated,
        "center": center,
        "format": format_text,
        "indent": indent,
        "join": join,
        "replace": replace,
        "tojson": to_json,
    }
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return sandbox


def compile_template(sandbox: Sandbox, source: str) -> jinja2.Template:
    """A template whose loops, walks and `~` are metered. Raises jinja2.TemplateSyntaxError."""
    tree = sandbox.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        if loop.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not served", loop.lineno)
        loop.iter = filtered(loop.iter, "metered")
    for walk in list(tree.find_all(nodes.Filter)):
        if walk.name in WALKING and walk.node is not None:
            walk.node = filtered(walk.node, "metered")
    replace_concatenations(tree)
    return sandbox.template_class.from_code(sandbox, sandbox.compile(tree), sandbox.make_globals(None))


def replace_concatenations(node: nodes.Node) -> None:
    """Turn every `a ~ b` below `node` into a filter over [a, b]."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, name, filtered(nodes.List(value.nodes, lineno=value.lineno), "concatenated"))
        elif isinstance(value, list):
            value[:] = [
                filtered(nodes.List(item.nodes, lineno=item.lineno), "concatenated")
                if isinstance(item, nodes.Concat)
                else item
                for item in value
            ]
    for child in node.iter_child_nodes():
        replace_concatenations(child)


def filtered(expression: nodes.Node, name: str) -> nodes.Filter:
    """`expression|name`."""
    assert isinstance(expression, nodes.Expr)
    return nodes.Filter(expression, name, [], [], None, None, lineno=expression.lineno)


@pass_context
def metered(context: Context, values: Any) -> Iterator[Any]:
    """`values`, one turn of the budget each."""
    meter = meter_of(context)
    for value in values:
        meter.turn()
        yield value


@pass_context
def concatenated(context: Context, values: list[Any]) -> str:
    """jinja2's `~`."""
    strings = [str(value) for value in values]
    meter_of(context).make(sum(map(len, strings)))
    return "".join(strings)


@pass_context
def center(context: Context, value: Any, width: int = 80) -> str:
    """jinja2's filter."""
    meter_of(context).make(width)
    return str(value).center(width)


@pass_context
def indent(context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """jinja2's filter."""
    text = str(value)
    meter_of(context).make(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return jinja2.filters.do_indent(text, width, first, blank)


@pass_context
def join(context: Context, values: Any, between: str = "", attribute: str | int | None = None) -> str:
    """jinja2's filter."""
    made = list(values)
    meter_of(context).make(sum(map(size, made)) + len(str(between)) * len(made))
    return str(jinja2.filters.do_join(context.eval_ctx, made, between, attribute))


@pass_context
def replace(context: Context, value: Any, old: str, new: str, count: int | None = None) -> str:
    """jinja2's filter."""
    text = str(value)
    meter_of(context).make(len(text) + text.count(str(old)) * len(str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def format_text(value: Any, *arguments: Any, **named: Any) -> str:
    """jinja2's `format` filter."""
    template = str(value)
    check_format(template, WIDE_PERCENT)
    return template % (named or arguments)


def raise_exception(message: Any) -> NoReturn:
    """How a template refuses a conversation."""
    raise jinja2.TemplateError(str(message))


@pass_context
def strftime_now(context: Context, pattern: str) -> str:
    """The request's time, formatted."""
    moment: datetime = context.parent[MOMENT]
    return moment.strftime(pattern)


def render(template: jinja2.Template, names: dict[str, Any], moment: datetime) -> str:
    """Raises TemplateLimit, jinja2.TemplateError, and whatever a template's expressions raise."""
    parts: list[str] = []
    length = 0
    for part in template.generate({**names, METER: Meter(), MOMENT: moment}):
        parts.append(part)
        length += len(part)
        if length > MAX_OUTPUT:
            raise TemplateLimit(f"it prints more than {MAX_OUTPUT} characters")
    return "".join(parts)


def meter_of(context: Context) -> Meter:
    """The budget of the rendering that `context` belongs to."""
    meter: Meter = context.parent[METER]
    return meter


def size(value: Any) -> int:
    """How much a value adds to a string or list made of it."""
    return len(value) if isinstance(value, str | list | tuple) else 1


def check_format(template: str, wide: re.Pattern[str]) -> None:
    """Raise TemplateLimit when a field of a format pads without bound."""
    if wide.search(template):
        raise TemplateLimit("it formats with too wide a field")
