"""Where chat templates run: jinja2's immutable sandbox, with a budget.

A template comes with the model and its data from a client, so neither may run code, loop without end or fill the
memory. Every loop costs one step of a budget per turn, whatever it loops over; the results of `+`, `*`, `~` and of
string formatting are bounded before they are made, and so is the output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 1 << 18  # loop turns of one rendering
MAX_OUTPUT = 8 << 20  # characters of one rendering, and of any one string in it
MAX_NUMBER = 1 << 64
METER = "penstock_meter"  # the names of a rendering's budget and of its time among what it was started with
MOMENT = "penstock_moment"
WIDE = re.compile(r"\d{4}|\*")  # a field width that pads a format without bound


class TemplateLimit(Exception):
    """A rendering went past its budget."""


class Meter:
    """What is left of one rendering's budget."""

    def __init__(self) -> None:
        self.turns = MAX_TURNS

    def turn(self) -> None:
        self.turns -= 1
        if self.turns < 0:
            raise TemplateLimit(f"it takes more than {MAX_TURNS} loop turns")


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with bounded operators; jinja2 looks these up as methods, so this is a class."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """jinja2's hook for `intercepted_binops`. Raises TemplateLimit."""
        match operator:
            case "*" if isinstance(left, int) or isinstance(right, int):
                check_size(size(left) * right if isinstance(right, int) else size(right) * left)
            case "+":
                check_size(size(left) + size(right))
            case "%" if isinstance(left, str):
                check_format(left)
            case "**":
                raise TemplateLimit("it uses the ** operator")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and abs(result) > MAX_NUMBER:
            raise TemplateLimit("it computes too large a number")
        return result


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; rendering prints the inside."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 only reads it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_sandbox() -> Sandbox:
    """An environment with what chat templates rely on. Source: transformers' documentation of chat templates."""
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"])
    sandbox.filters |= {"tojson": to_json, "format": format_text, "metered": metered, "concatenated": concatenated}
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return sandbox


def compile_template(sandbox: Sandbox, source: str) -> jinja2.Template:
    """A template whose loops and `~` are metered. Raises jinja2.TemplateSyntaxError."""
    tree = sandbox.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        if loop.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not served", loop.lineno)
        loop.iter = filtered(loop.iter, "metered")
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
    meter: Meter = context.parent[METER]
    for value in values:
        meter.turn()
        yield value


def concatenated(values: list[Any]) -> str:
    """jinja2's `~`."""
    strings = [str(value) for value in values]
    check_size(sum(map(len, strings)))
    return "".join(strings)


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
    check_format(template)
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
        check_size(length)
    return "".join(parts)


def size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def check_size(length: int) -> None:
    if length > MAX_OUTPUT:
        raise TemplateLimit(f"it makes more than {MAX_OUTPUT} characters")


def check_format(template: str) -> None:
    if WIDE.search(template):
        raise TemplateLimit("it formats with too wide a field")
