"""Where chat templates run: jinja2's immutable sandbox, with what transformers adds to it.

The operator's own template renders in this process. It is trusted, its data is not, so what grows faster than the
conversation is counted: turns of loops, entries that a filter walks over, and the printed characters. A request's
template renders in a process of its own with hard limits (services/tokenizer/template_worker.py) and gets by with
fewer names.

Nothing of ours can be named by a template: the count lives in the rendering's context, which expressions cannot reach.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 1 << 22  # loop turns of one rendering: a conversation of 2,000 messages, compared each with each
MAX_OUTPUT = 64 << 20  # characters of one rendering
WALKING = frozenset(
    ("batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice",
     "sort", "sum", "unique")
)  # fmt: skip
# What no chat template of a model is known to use: most of it makes text out of nothing or reaches attributes by name.
NEEDLESS_GLOBALS = ("cycler", "joiner", "lipsum")
NEEDLESS_FILTERS = ("attr", "pprint", "random", "urlize", "xmlattr")


class TemplateLimit(Exception):
    """A rendering went past its budget."""


class CountingContext(Context):
    """The context of one rendering, with the loop turns that are left of it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.turns = MAX_TURNS


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox whose renderings count their loops; jinja2 looks the class up here."""

    context_class = CountingContext

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """jinja2's hook for errors. Its own gives the traceback frames of the template, which refer to each other and
        to the conversation, so that only the cycle collector would free it."""
        if source is not None:  # of a template that does not compile
            super().handle_exception(source)
        raise  # the error that is being handled


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; rendering prints the inside."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 only reads it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_sandbox(*, trusted: bool = True) -> Sandbox:
    """An environment with what chat templates rely on. Source: transformers' documentation of chat templates.

    `trusted`: with all that jinja2 has, for the operator's template.
    """
    sandbox = Sandbox(
        trim_blocks=True, lstrip_blocks=True, cache_size=0, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = raise_exception
    if not trusted:
        for name in NEEDLESS_GLOBALS:
            del sandbox.globals[name]
        for name in NEEDLESS_FILTERS:
            del sandbox.filters[name]
    return sandbox


def compile_template(sandbox: Sandbox, source: str, *, counted: bool = True) -> jinja2.Template:
    """A template, its loops and walks `counted` or not. Raises jinja2.TemplateSyntaxError, RecursionError."""
    tree = sandbox.parse(source)
    if counted:
        count_walks(tree)
    try:
        code = sandbox.compile(tree)
    except SyntaxError as error:  # what Python refuses of the code that jinja2 makes, such as twenty nested loops
        raise jinja2.TemplateSyntaxError(str(error.msg), 1) from None
    return sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))


def count_walks(tree: nodes.Template) -> None:
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = counted_walk(loop.iter)
    for filtered in list(tree.find_all(nodes.Filter)):
        if filtered.name in WALKING and filtered.node is not None:
            filtered.node = counted_walk(filtered.node)


def counted_walk(expression: nodes.Node) -> nodes.Call:
    """A call of `walk`, which has no name in templates."""
    assert isinstance(expression, nodes.Expr)
    function = nodes.ImportedName(f"{__name__}.walk", lineno=expression.lineno)
    return nodes.Call(function, [expression], [], None, None, lineno=expression.lineno)


@pass_context
def walk(context: CountingContext, values: Any) -> Iterator[Any]:
    """`values`, each counted as a turn."""
    for value in values:
        context.turns -= 1
        if context.turns < 0:
            raise TemplateLimit(f"it takes more than {MAX_TURNS} loop turns")
        yield value


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any) -> NoReturn:
    """How a template refuses a conversation."""
    raise jinja2.TemplateError(str(message))


def clock(moment: datetime) -> Callable[[str], str]:
    """The template's `strftime_now`. A closure: attributes of a bound method would lead on."""

    def strftime_now(pattern: str) -> str:
        return moment.strftime(pattern)

    return strftime_now


def render(template: jinja2.Template, names: dict[str, Any], moment: datetime) -> str:
    """Raises TemplateLimit, jinja2.TemplateError, and whatever a template's expressions raise."""
    parts: list[str] = []
    length = 0
    for part in template.generate({"strftime_now": clock(moment), **names}):
        parts.append(part)
        length += len(part)
        if length > MAX_OUTPUT:
            raise TemplateLimit(f"it prints more than {MAX_OUTPUT} characters")
    return "".join(parts)
