"""The grammar of a chat's answer: its reasoning, its calls, and what the request wants its content to follow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.engine_core.grammar import calls
from penstock.engine_core.grammar.calls import Format, Function
from penstock.engine_core.grammar.fields import text_of
from penstock.engine_core.grammar.regexes import names_of
from penstock.engine_core.parsers.dialect import Dialect
from penstock.protocol.columns import pack
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar, ToolUse

BUDGET = "thinking_token_budget"
FREE: Mapping[str, Any] = {"type": "any_text"}
GAP: Mapping[str, Any] = {"type": "regex", "pattern": r"\s{0,4}"}  # between the reasoning and what follows it


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer begins."""

    inside: bool  # within the reasoning
    closed: bool = False  # the prompt has written the reasoning's end
    thinks: bool = False  # the model was told to reason
    budget: int | None = None  # most tokens of it


class Bound(msgspec.Struct, frozen=True):
    """What an answer must follow; None: nothing. `after` as `Automaton.after`."""

    grammar: Grammar | None
    after: bytes = b""
    reasons: bool = True  # the answer may begin with reasoning


def answer_bound(
    grammar: Grammar | None, use: ToolUse | None, functions: Sequence[Function], dialect: Dialect, opening: Opening
) -> Bound:
    """Raises InvalidRequest for a budget that cannot be held and for tools that the call format has no form for."""
    check_budget(opening, dialect)
    body = called_body(grammar, use, functions, dialect)
    if body is None and dialect.channels and (grammar is not None or opening.budget is not None):
        body = calls.answered(dict(FREE) if grammar is None else format_of(grammar))
        if grammar is None and use is not None:
            body = calls.calls_in_text(dialect, functions, several=use.parallel)
    if dialect.reasoning is None or opening.closed:
        return unreasoned(body, grammar, use, dialect)
    if opening.budget is None and opening.inside and dialect.closing is not None:
        return Bound(grammar if body is None else whole(body, grammar, use), pack("i", [dialect.closing]))
    free = use is not None and not use.required and grammar is None  # the model must be able to reason if it likes to
    reasons = opening.inside or opening.thinks or free or opening.budget is not None
    if not reasons or (body is None and grammar is None and opening.budget is None):
        return unreasoned(body, grammar, use, dialect)
    if body is None and grammar is not None:
        body = format_of(grammar)
    return Bound(whole(reasoned(body, dialect, opening), grammar, use))


def unreasoned(body: Format | None, grammar: Grammar | None, use: ToolUse | None, dialect: Dialect) -> Bound:
    """No reasoning, where anything is bound at all: text of the structure that reads like its opening is content. A
    grammar that names the opening has its own."""
    found = grammar if body is None else whole(body, grammar, use)
    own = grammar is not None and dialect.reasoning is not None and marks(grammar, dialect.reasoning.opening)
    return Bound(found, reasons=found is None or own)


def marks(grammar: Grammar, opening: str) -> bool:
    """Whether a grammar has this marker as one, and not as text."""
    match grammar.kind:
        case "structural_tag":
            begin = re.compile(r'"(?:begin|triggers)"\s*:\s*\[?\s*"\s*' + re.escape(opening))
            return begin.search(source_text(grammar)) is not None
        case "grammar":
            return opening in names_of(source_text(grammar))
        case _:
            return False


def check_budget(opening: Opening, dialect: Dialect) -> None:
    if opening.budget is None or (dialect.reasoning is not None and dialect.closing is not None):
        return
    message = f"{BUDGET} cannot be held: nothing tells how this model ends its reasoning; see --reasoning-parser"
    raise InvalidRequest(message, param=BUDGET, code="unsupported")


def called_body(
    grammar: Grammar | None, use: ToolUse | None, functions: Sequence[Function], dialect: Dialect
) -> Format | None:
    """What calls have to do with it; None where they bind nothing."""
    if use is None:
        return None
    if use.required:
        return calls.calls_alone(dialect, functions, several=use.parallel)
    if grammar is not None:
        alone = calls.calls_alone(dialect, functions, several=use.parallel)
        form = format_of(grammar)
        return calls.either(alone, calls.answered(form) if dialect.channels else form)
    if use.strict or use.bound or not use.parallel:
        return calls.calls_in_text(dialect, functions, several=use.parallel)
    return None


def reasoned(body: Format | None, dialect: Dialect, opening: Opening) -> Format:
    """The reasoning, if there is any, and then the body, or any text."""
    markers = dialect.reasoning
    assert markers is not None
    thought: Format = dict(FREE) if opening.budget is None else {**FREE, "max_tokens": opening.budget}
    begin = "" if opening.inside else markers.opening
    if opening.budget == 0:
        thought = calls.text("")
        reasoning = calls.marker(markers.closing) if opening.inside else None
    else:
        reasoning = calls.tag(begin, thought, markers.closing)
    gap = calls.marker(calls.BEGIN_MESSAGE) if dialect.channels else dict(GAP)
    rest = [dict(FREE)] if body is None else [gap, body]
    if reasoning is None:
        return calls.sequence(*rest[-1:])
    if opening.inside:
        return calls.sequence(reasoning, *rest)
    if body is None:
        return calls.sequence({"type": "optional", "content": reasoning}, dict(FREE))
    return calls.sequence({"type": "optional", "content": calls.sequence(reasoning, gap)}, body)


def whole(body: Format, grammar: Grammar | None, use: ToolUse | None) -> Grammar:
    """A format as the grammar of the answer, with what the request's own says of whitespace."""
    source = json.dumps({"format": body}, ensure_ascii=False)
    if grammar is None:
        return Grammar(kind="structural_tag", source=source, param=BUDGET if use is None else "tools")
    return msgspec.structs.replace(grammar, kind="structural_tag", source=source)


def format_of(grammar: Grammar) -> Format:
    """A request's grammar as a format of structural tags. Raises InvalidRequest for what is not JSON."""
    match grammar.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": read_source(grammar)}
        case "regex":
            return {"type": "regex", "pattern": source_text(grammar)}
        case "choice":
            return calls.either(*(calls.text(choice) for choice in read_source(grammar)))
        case "structural_tag":
            tag = read_source(grammar)
            if not isinstance(tag, dict):
                return {"type": "structural_tag"}  # refused where it is compiled, in the words of any other
            older = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tag.get("structures")}
            return tag.get("format", older)  # type: ignore[no-any-return]
        case _:
            return {"type": "grammar", "grammar": source_text(grammar)}


def source_text(grammar: Grammar) -> str:
    """Raises InvalidRequest that names the field."""
    try:
        return text_of(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(f"{grammar.param}: {error.message}", param=grammar.param, code=error.code) from None


def read_source(grammar: Grammar) -> Any:
    try:
        return msgspec.json.decode(source_text(grammar))
    except (msgspec.DecodeError, RecursionError):
        message = f"{grammar.param}: it must be valid JSON"
        raise InvalidRequest(message, param=grammar.param, code="invalid_grammar") from None
