"""What other APIs call the fields of a chat: an error that names one is told in the words of the request it is for."""

from __future__ import annotations

import re

import msgspec

from penstock.protocol.errors import RequestError


class Term(msgspec.Struct, frozen=True):
    """Fields whose name begins as `chat` matches begin with `own` in the other API; groups of `chat` may be in it."""

    chat: re.Pattern[str]
    own: str


Terms = tuple[Term, ...]


def told_in(error: RequestError, terms: Terms) -> RequestError:
    """`error` itself, its field renamed by the first term that fits, in the message as well."""
    param = error.param
    if param is None:
        return error
    for term in terms:
        found = term.chat.match(param)
        if found:
            error.param = found.expand(term.own) + param[found.end() :]
            error.message = error.message.replace(param, error.param)
            break
    return error
