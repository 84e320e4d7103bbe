"""From the bytes of a body to a request struct, or to the error that says what is wrong with it."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TypeGuard, TypeVar

import msgspec
from starlette.types import Receive, Scope

from penstock.protocol import limits
from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from penstock.services.http import request_context as exchange
from penstock.services.http.disconnect import ClientLeft
from penstock.services.http.nesting import Nesting, openings
from penstock.services.openai import limits as bounds
from penstock.services.openai.enum_values import words_at
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

T = TypeVar("T")

LOGGED = 64 << 10  # bytes of a body that --log-prompts shows
MEASURED = 8 << 10  # bytes of a body whose nesting is measured in one go: less than half a millisecond

NULL = b"null"
PLACE = re.compile(r"(.*) - at `(key in )?\$(.*)`", re.DOTALL)
BOUND = re.compile(r"<= \d+\Z")  # msgspec's words for a number or a length beyond its bound
WORD = re.compile(r"Invalid enum value|Invalid value '")  # msgspec's, for a word that is none of a field's
MISSING = re.compile(r"Object missing required field `(\w+)`")


async def read_json(scope: Scope, receive: Receive, options: ApiConfig) -> bytes:
    """The whole JSON body of the request, within the limits of the options.

    Raises UnsupportedMediaType for another content type than JSON (none at all passes) and for a compressed body,
    PayloadTooLarge past --max-body-bytes, announced or counted, InvalidRequest past --max-json-depth, ClientLeft when
    the client goes away before the end.
    """
    current = exchange.of(scope)
    if (read := current.body) is not None:
        current.body = None
        return read
    limit, levels = options.max_body_bytes, options.max_json_depth
    for name, value in scope["headers"]:
        if name == b"content-type":
            check_content_type(value)
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            raise UnsupportedMediaType("the body must not be compressed", code="unsupported_content_encoding")
        elif name == b"content-length":
            check_content_length(value, limit)
    pieces: list[bytes] = []
    size = opened = 0
    nesting: Nesting | None = None  # of a body that has opened enough to be too deep, wherever that may stand
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        current.grow(len(piece))
        pieces.append(piece)
        opened += openings(piece)
        if opened > levels:
            if nesting is None:
                nesting, piece = Nesting(), b"".join(pieces)
            for start in range(0, len(piece), MEASURED):
                nesting.push(piece[start : start + MEASURED])
                if nesting.deepest > levels:
                    told = f"the body is nested deeper than {levels} levels (--max-json-depth)"
                    raise InvalidRequest(told, code="limit_exceeded")
                await asyncio.sleep(0)  # streams come first
    body = b"".join(pieces)
    if options.log_prompts:
        shown = body[:LOGGED].decode(errors="replace")
        trace = current.context.trace_id
        logs.info(log, "body", id=current.id.decode(), trace_id=trace, size=len(body), body=shown)
    return body


def check_content_type(value: bytes) -> None:
    kind = value.split(b";", 1)[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise UnsupportedMediaType("the content type must be application/json", code="unsupported_media_type")


def check_content_length(value: bytes, limit: int) -> None:
    if not value.isdigit():
        raise InvalidRequest("the content length is not a number", code="invalid_content_length")
    if len(value) > 18 or int(value) > limit:
        raise too_large(limit)


def too_large(limit: int) -> PayloadTooLarge:
    message = f"the body is larger than {limit} bytes (--max-body-bytes)"
    return PayloadTooLarge(message, code="request_too_large")


def decode(body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], path: str = "") -> T:
    """`body` as the decoder's type. Raises InvalidRequest naming the parameter, below `path` if that is given."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise misfit(str(error), path, decoder.type) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = f"the body is not valid JSON: {error}" if body else "the body is empty"
        raise InvalidRequest(what, param=path or None, code="invalid_json") from error
    except RecursionError as error:
        raise too_deep(path) from error


def misfit(text: str, path: str, kind: object = None) -> InvalidRequest:
    """msgspec's message as one that names the parameter: 'Expected `int`, got `str` - at `$.n`'. `kind` is the type
    that was decoded, which knows what words a field may hold."""
    found = PLACE.fullmatch(text)
    reason, place = (found[1], found[3]) if found else (text, "")
    missing = MISSING.fullmatch(reason)
    if missing:
        place = f"{place}.{missing[1]}"
    param = (path + place).lstrip(".").removesuffix("[...]")
    if missing:
        return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    if not param:
        return InvalidRequest(f"the body: {reason}", code="invalid_type")
    code = "invalid_type" if ", got `" in reason else "invalid_value"
    message = f"{param}: {reason[:1].lower()}{reason[1:]}"
    if BOUND.search(reason) and param in bounds.OPTIONS:
        message = f"{param}: more than {bounds.OPTIONS[param]} allows"
    elif WORD.match(reason) and (words := words_at(kind, place)):
        message += f"; it may be {', '.join(words)}"
    return InvalidRequest(message, param=param, code=code)


def too_deep(path: str) -> InvalidRequest:
    what = path or "the body"
    message = f"{what} is nested deeper than {limits.MAX_JSON_DEPTH} levels"
    return InvalidRequest(message, param=path or None, code="invalid_value")


def check_depth(value: object, path: str) -> None:
    """Refuse decoded JSON that is nested deeper than limits.MAX_JSON_DEPTH."""
    level = [value]
    for _ in range(limits.MAX_JSON_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(part for part in item.values() if isinstance(part, dict | list))
            elif isinstance(item, list):
                below.extend(part for part in item if isinstance(part, dict | list))
        if not below:
            return
        level = below
    raise too_deep(path)


def given(raw: msgspec.Raw | msgspec.UnsetType) -> TypeGuard[msgspec.Raw]:
    """Whether an optional raw field holds something other than null."""
    return raw is not msgspec.UNSET and (len(raw) != len(NULL) or bytes(raw) != NULL)
