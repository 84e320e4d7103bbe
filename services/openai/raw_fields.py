"""The members of a body's JSON object. Long ones that say what an output must follow are set aside.

Nobody in this process looks into those: whoever compiles them does, within limits and in a process of its own. So a
grammar of a megabyte costs the streams here one look for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from penstock.services.openai import unsupported as refusals
from penstock.services.openai import validation as decoding
from penstock.services.openai.structured_output import FORMS, UNREAD

LONG = 64 << 10  # bytes of a body

T = TypeVar("T", bound=msgspec.Struct)


class Members(msgspec.Struct, frozen=True):
    """`text` is the body with null in place of what stands in `aside`."""

    text: bytes
    aside: Mapping[str, msgspec.Raw]
    known: Mapping[str, msgspec.Raw] | None = None

    @property
    def fields(self) -> Mapping[str, msgspec.Raw]:
        """All of them by name. Raises InvalidRequest for what is no JSON object."""
        return refusals.fields_of(self.text) if self.known is None else self.known

    def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The object as the decoder's type. Raises InvalidRequest naming the parameter."""
        found = decoding.decode(self.text, decoder)
        return msgspec.structs.replace(found, **self.aside) if self.aside else found


async def members_of(body: bytes) -> Members:
    """Raises InvalidRequest for a long body that is no JSON object. Streams go on before the look at one and behind."""
    if len(body) <= LONG:
        return Members(body, {})
    await asyncio.sleep(0)
    fields = refusals.fields_of(body)
    await asyncio.sleep(0)
    aside = {name: fields[name] for name in FORMS if name in fields and len(fields[name]) > UNREAD}
    text = msgspec.json.encode({**fields, **dict.fromkeys(aside)}) if aside else body
    return Members(text, aside, fields)
