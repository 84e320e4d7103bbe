"""From the bytes of a body to a request struct, or to the error that says what is wrong with it."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import inspect

from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest, invalid
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.schema import GRAMMAR_FIELDS, UNREAD, GenerationRequest

T = TypeVar("T")


class Body(Protocol):
    """What the bodies of all APIs that generate have in common."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool | None: ...

    @property
    def timeout(self) -> float | None: ...


R = TypeVar("R", bound=Body)

YES = ("true", "True", "1", "")  # of `stream` in a query
NO = ("false", "False", "0")


NULL = b"null"
PLACE = re.compile(r"(.*) - at `(key in )?\$(.*)`", re.DOTALL)
BOUND = re.compile(r"Expected `(?:int|array|object)` .*<= \d+\Z")  # msgspec's words for a number or a count beyond it
NUMBER = re.compile(r"Expected `(?:int|float)` [<>]")  # for a number alone
WRITTEN = re.compile(rb"-?\d[\d.eE+-]*\Z")  # a number in JSON
SHOWN = 24  # digits of one
STEPS = re.compile(r"\.(\w+)|\[(\d+)\]")
WORD = re.compile(r"Invalid enum value|Invalid value '")  # msgspec's, for a word that is none of a field's
FLOAT = re.compile(r"Expected `int.*, got `float`")
WHOLE = re.compile(rb"\A(-?\d+)\.0+\Z")
HALF_PAIR = re.compile(rb"(?<!\\)\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])")  # as of a text that was cut between the halves
MISSING = re.compile(r"Object missing required field `(\w+)`")


# Parameter → the option that bounds it, for every message about its limit.
LIMIT_OPTIONS: Mapping[str, str] = {
    "n": "--max-n",
    "logprobs": "--max-logprobs",
    "top_logprobs": "--max-logprobs",
    "prompt_logprobs": "--max-logprobs",
    "stop": "--max-stop-strings",
    "logit_bias": "--max-logit-bias",
}


def stream_asked(context: RequestContext) -> bool | None:
    """The query's `stream`, None without one."""
    query = context.query
    if not query:
        return None
    said = [value for name, value in parse_qsl(query, keep_blank_values=True) if name == "stream"]
    if not said:
        return None
    if len(said) > 1 or said[0] not in YES + NO:
        raise invalid("stream", "must be true or false in the query")
    return said[0] in YES


def decode(body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], path: str = "") -> T:
    """`body` as the decoder's type. Raises InvalidRequest naming the parameter, below `path` if that is given."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not path and FLOAT.match(str(error)) and (plain := with_whole_numbers(body)) != body:
            return decode(plain, decoder)
        raise misfit(str(error), path, decoder.type, body) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = "a \\u escape has half of a surrogate pair" if HALF_PAIR.search(bytes(body)) else str(error)
        what = f"the body is not valid JSON: {why}" if body else "the body is empty"
        raise InvalidRequest(what, param=path or None, code="invalid_json") from error
    except RecursionError as error:
        message = f"{path or 'the body'} is nested deeper than {limits.MAX_JSON_DEPTH} levels"
        raise InvalidRequest(message, param=path or None) from error


def with_whole_numbers(body: bytes | msgspec.Raw) -> bytes:
    """The object with fields such as 100.0 as whole numbers, which they are in JSON Schema and in vLLM."""
    fields = {name: WHOLE.sub(rb"\1", bytes(raw)) for name, raw in decode(body, FIELDS).items()}
    return msgspec.json.encode({name: msgspec.Raw(raw) for name, raw in fields.items()})


def misfit(text: str, path: str, kind: object = None, body: bytes | msgspec.Raw = b"") -> InvalidRequest:
    """msgspec's message as one that names the parameter: 'Expected `int`, got `str` - at `$.n`'. `kind` is the type
    that was decoded, which knows what words a field may hold; `body` knows what number was given."""
    found = PLACE.fullmatch(text)
    reason, place = (found[1], found[3]) if found else (text, "")
    absent = MISSING.fullmatch(reason)
    if absent:
        place = f"{place}.{absent[1]}"
    param = (path + place).lstrip(".").removesuffix("[...]")
    if absent:
        return missing(param)
    if not param:
        return InvalidRequest(f"the body: {reason}", code="invalid_type")
    code = "invalid_type" if ", got `" in reason else "invalid_value"
    number = number_at(body, place) if NUMBER.match(reason) else ""
    message = f"{param}{f' is {number};' if number else ':'} {reason[:1].lower()}{reason[1:]}"
    if BOUND.match(reason) and param in LIMIT_OPTIONS:
        message += f", the most that {LIMIT_OPTIONS[param]} can allow"
    elif WORD.match(reason) and (words := enum_values(kind, place)):
        message += f"; it may be {', '.join(words)}"
    return InvalidRequest(message, param=param, code=code)


def number_at(body: bytes | msgspec.Raw, place: str) -> str:
    """The number at a place of msgspec's errors, as it was written; empty where the place does not lead to one."""
    try:
        for name, item in STEPS.findall(place):
            body = FIELDS.decode(body)[name] if name else ITEMS.decode(body)[int(item)]
    except (msgspec.DecodeError, LookupError):
        return ""
    found = bytes(body)
    if not WRITTEN.match(found):
        return ""
    return found.decode() if len(found) <= SHOWN else found[:SHOWN].decode() + "…"


def given(raw: msgspec.Raw | msgspec.UnsetType) -> TypeGuard[msgspec.Raw]:
    """Whether an optional raw field holds something other than null."""
    return raw is not msgspec.UNSET and (len(raw) != len(NULL) or bytes(raw) != NULL)


STEP = re.compile(r"\.(\w+)|\[\]")
INDEX = re.compile(r"\[(?:\d+|\.\.\.)\]")


def enum_values(kind: Any, place: str) -> tuple[str, ...]:
    """Of a field of `kind`, a type that msgspec decodes. `place` is its path in msgspec's errors: `.tools[3].type`."""
    return enum_values_at(kind, INDEX.sub("[]", place))


@functools.lru_cache(maxsize=256)  # looking at a type takes as long as forty tokens, and anybody can ask for it
def enum_values_at(kind: Any, place: str) -> tuple[str, ...]:
    """Of a field, whichever item of a list it is in."""
    types = list(plain_types([inspect.type_info(kind)]))
    for step in STEP.finditer(place):
        types = list(plain_types(found for each in types for found in child_types(each, step[1])))
    return tuple(
        dict.fromkeys(
            str(word) for each in types if isinstance(each, inspect.LiteralType) for word in each.values
        )
    )  # fmt: skip


def child_types(kind: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """The types of a struct's field `name`; without a name those of a list's items or a dict's values."""
    match kind:
        case inspect.StructType(fields=fields) if name:
            yield from (field.type for field in fields if field.encode_name == name)
        case inspect.ListType(item_type=item) if not name:
            yield item
        case inspect.DictType(value_type=value) if not name:
            yield value


def plain_types(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """The types without what stands around them: unions and descriptions."""
    for kind in kinds:
        match kind:
            case inspect.UnionType(types=types):
                yield from plain_types(types)
            case inspect.Metadata(type=inner):
                yield from plain_types([inner])
            case _:
                yield kind


ITEMS: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
FIELDS: msgspec.json.Decoder[Mapping[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
LONG = 64 << 10  # bytes of a body


class RawFields(msgspec.Struct, frozen=True):
    """`text` is the body with null in place of what stands in `deferred`."""

    text: bytes
    deferred: Mapping[str, msgspec.Raw] = {}
    known: Mapping[str, msgspec.Raw] | None = None

    @property
    def fields(self) -> Mapping[str, msgspec.Raw]:
        """All of them by name. Raises InvalidRequest for what is no JSON object."""
        return decode(self.text, FIELDS) if self.known is None else self.known

    def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The object as the decoder's type. Raises InvalidRequest naming the parameter."""
        found = decode(self.text, decoder)
        return msgspec.structs.replace(found, **self.deferred) if self.deferred else found  # type: ignore[type-var]


async def read_request(
    body: bytes, decoder: msgspec.json.Decoder[R], model: ModelInfo, context: RequestContext
) -> tuple[R, Mapping[str, msgspec.Raw]]:
    """The body as the decoder's type, with the query's `stream` where it has none, and all of its fields by name.

    Raises InvalidRequest naming the parameter, and NotFound for another model. The body's timeout holds from now on.
    """
    if len(body) > LONG and isinstance(decoder.type, type) and issubclass(decoder.type, GenerationRequest):
        long = await read_fields(body)
        request, fields = long.decode(decoder), long.fields
    else:
        request, fields = decode(body, decoder), decode(body, FIELDS)
    if context.scope["query_string"] and (said := stream_asked(context)) is not None and request.stream is None:
        request = msgspec.structs.replace(request, stream=said)  # type: ignore[type-var]
    if request.model is not None and request.model not in model.names:
        context.adapter = model.adapter(request.model)
    if request.timeout is not None:
        context.set_timeout(request.timeout, "timeout")
    return request, fields


async def read_fields(body: bytes) -> RawFields:
    """Raises InvalidRequest for a long body that is no JSON object. A long one leaves streams their turns."""
    if len(body) <= LONG:
        return RawFields(body)
    await asyncio.sleep(0)
    fields = decode(body, FIELDS)
    await asyncio.sleep(0)
    deferred = {name: fields[name] for name in GRAMMAR_FIELDS if name in fields and len(fields[name]) > UNREAD}
    text = msgspec.json.encode({**fields, **dict.fromkeys(deferred)}) if deferred else body
    return RawFields(text, deferred, fields)


def missing(param: str) -> InvalidRequest:
    return invalid(param, "is missing", "missing_required_parameter")


def needed(value: Any, param: str) -> Any:
    """A field that the type beside it asks for. Raises InvalidRequest where it is missing."""
    if value is None:
        raise missing(param)
    return value
