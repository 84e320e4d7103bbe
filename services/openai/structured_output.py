"""What a request's output must follow, in whichever form its client knows, as one `Grammar`.

Forms: OpenAI's `response_format`; vLLM's `structured_outputs`, and the `guided_*` fields that came before it; SGLang's
`json_schema`, `regex`, `ebnf` and `structural_tag`; llama.cpp's `grammar`. A request may use one of them.

Long ones are passed on unread: who compiles them says what is wrong with them.

`strict: false` in a `json_schema` format asks for a schema as far as it can be held, as `lenient` does; left out, what
has no exact form is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.protocol.errors import InvalidRequest, invalid, unsupported
from penstock.protocol.messages import Grammar
from penstock.services.openai.schema import UNREAD, GenerationRequest, OptionalJson
from penstock.services.openai.validation import decode, given, missing

LONGEST_NAME = 64
TEXT = msgspec.json.Decoder(str)
FLAG = msgspec.json.Decoder(bool)
CHOICES = msgspec.json.Decoder(Annotated[list[str], Meta(min_length=1)])


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`."""

    schema: OptionalJson = msgspec.UNSET
    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format`. Source: OpenAI API reference; a `schema` in a json_object is llama.cpp's."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: OptionalJson = msgspec.UNSET


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """`structured_outputs`. Source: vLLM's StructuredOutputsParams."""

    json: OptionalJson = msgspec.UNSET
    regex: OptionalJson = msgspec.UNSET
    grammar: OptionalJson = msgspec.UNSET
    choice: OptionalJson = msgspec.UNSET
    structural_tag: OptionalJson = msgspec.UNSET
    json_object: OptionalJson = msgspec.UNSET
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is nothing to fall back to


FORMAT = msgspec.json.Decoder(ResponseFormat)
OUTPUTS = msgspec.json.Decoder(StructuredOutputs)


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """The request's grammar; None if its output is free. Raises InvalidRequest naming the field that is wrong."""
    found: list[Grammar] = []
    for name, read in FORMS.items():
        raw = getattr(request, name)
        if given(raw) and (grammar := read(raw, name)) is not None:
            found.append(grammar)
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequest(f"{first} and {second} cannot both be given", param=second)
    whitespace = whitespace_of(request)
    if found:
        grammar = found[0]
        return msgspec.structs.replace(
            grammar, whitespace=whitespace or grammar.whitespace, lenient=grammar.lenient or bool(request.lenient)
        )
    for name in ("whitespace", "guided_whitespace_pattern", "lenient"):
        if getattr(request, name):
            raise invalid(name, "needs a grammar that it applies to")
    return None


def whitespace_of(request: GenerationRequest) -> str:
    """The whitespace between JSON tokens that the request asks for; empty if it says nothing."""
    if request.whitespace is not None and request.guided_whitespace_pattern is not None:
        name = "guided_whitespace_pattern"
        raise InvalidRequest(f"whitespace and {name} cannot both be given", param=name)
    return request.whitespace or request.guided_whitespace_pattern or ""


def response_format(raw: msgspec.Raw, name: str) -> Grammar | None:
    form = decode(raw, FORMAT, name)
    match form.type:
        case "text":
            return None
        case "json_object":
            return (
                Grammar(kind="json_object", param=name)
                if not given(form.schema)
                else schema(form.schema, f"{name}.schema")
            )
        case "json_schema":
            path = f"{name}.json_schema"
            if form.json_schema is None or not given(form.json_schema.schema):
                path = path if form.json_schema is None else f"{path}.schema"
                raise missing(path)
            found = schema(form.json_schema.schema, f"{path}.schema")
            return msgspec.structs.replace(found, lenient=form.json_schema.strict is False)
        case "structural_tag":
            return structural_tag(raw, name)
        case other:
            why = f": {other[:64]!r} is not one of text, json_object, json_schema, structural_tag"
            raise invalid(f"{name}.type", why)


def structured_outputs(raw: msgspec.Raw, name: str) -> Grammar | None:
    form = decode(raw, OUTPUTS, name)
    if form.disable_additional_properties:
        why = "is not supported; the schema says it with additionalProperties"
        raise unsupported(f"{name}.disable_additional_properties", why)
    found = []
    for kind, read in KINDS.items():
        part = getattr(form, kind)
        if given(part) and (grammar := read(part, f"{name}.{kind}")) is not None:
            found.append(grammar)
    if len(found) != 1:
        both = f"{found[0].param} and {found[1].param} cannot both be given" if found else ""
        message = both or f"{name} must hold one of {', '.join(KINDS)}"
        raise InvalidRequest(message, param=found[1].param if found else name)
    whitespace = form.whitespace_pattern or ("none" if form.disable_any_whitespace else found[0].whitespace)
    return msgspec.structs.replace(found[0], whitespace=whitespace)


def schema(raw: msgspec.Raw, name: str) -> Grammar:
    """A JSON Schema, as a value or as text."""
    return grammar("json_schema", raw, name, text_or_value)


def structural_tag(raw: msgspec.Raw, name: str) -> Grammar:
    return grammar("structural_tag", raw, name, text_or_value)


def regex(raw: msgspec.Raw, name: str) -> Grammar:
    return grammar("regex", raw, name, text)


def rules(raw: msgspec.Raw, name: str) -> Grammar:
    """A grammar in EBNF or Lark."""
    return grammar("grammar", raw, name, text)


def choice(raw: msgspec.Raw, name: str) -> Grammar:
    return grammar("choice", raw, name, choices)


def grammar(kind: str, raw: msgspec.Raw, name: str, read: Callable[[msgspec.Raw, str], str]) -> Grammar:
    """The grammar of a field that holds its source."""
    if len(raw) > UNREAD:
        return Grammar(kind=kind, unread=bytes(raw), param=name)
    return Grammar(kind=kind, source=read(raw, name), param=name)


def json_object(raw: msgspec.Raw, name: str) -> Grammar | None:
    return Grammar(kind="json_object", param=name) if decode(raw, FLAG, name) else None


def choices(raw: msgspec.Raw, name: str) -> str:
    """JSON of a list of strings that is not empty."""
    decode(raw, CHOICES, name)
    return bytes(raw).decode()


def text(raw: msgspec.Raw, name: str) -> str:
    """A string that is not empty."""
    found = decode(raw, TEXT, name)
    if not found:
        raise invalid(name, "is empty")
    return found


def text_or_value(raw: msgspec.Raw, name: str) -> str:
    """JSON, given as it is or as a string that holds it."""
    source = bytes(raw).decode()
    return text(raw, name) if source.startswith('"') else source


Reader = Callable[[msgspec.Raw, str], Grammar | None]
KINDS: Mapping[str, Reader] = {
    "json": schema,
    "regex": regex,
    "grammar": rules,
    "choice": choice,
    "structural_tag": structural_tag,
    "json_object": json_object,
}
FORMS: Mapping[str, Reader] = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "guided_json": schema,
    "guided_regex": regex,
    "guided_grammar": rules,
    "guided_choice": choice,
    "guided_json_object": json_object,
    "json_schema": schema,
    "regex": regex,
    "ebnf": rules,
    "grammar": rules,
    "structural_tag": structural_tag,
}
