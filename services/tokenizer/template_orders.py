"""What a template worker and its owner say to each other: `Setting` once, then an `Order` in, an `Answer` out."""

from __future__ import annotations

import msgspec

from engine_core.text.parsers.dialect import Dialect
from engine_core.text.rendering import Rendered
from protocol.messages import SubmitText


class Setting(msgspec.Struct, frozen=True):
    """What a template worker must know of the model, and what one rendering may take."""

    names: dict[str, str]  # the special tokens that templates can name
    dialect: Dialect
    controls: frozenset[str] | None  # control tokens that contents must not spell; None: they may
    seconds: float  # of CPU
    memory: int  # bytes


class Order(msgspec.Struct, frozen=True):
    """A chat to be rendered by the request's own template."""

    request: SubmitText
    now: float  # unix seconds


class Complaint(msgspec.Struct, frozen=True, tag=True):
    """Why a chat is not rendered: what `InvalidRequest` tells."""

    message: str
    param: str | None
    code: str | None = None


class Printed(msgspec.Struct, frozen=True, tag=True):
    """A chat as text."""

    rendered: Rendered


class Answer(msgspec.Struct, frozen=True):
    """What came of an order."""

    outcome: Printed | Complaint
    remembered: int = 0  # bytes of the template sources that the worker keeps compiled
    ended: bool = False  # the rendering passed a limit or died


SETTING = msgspec.msgpack.Decoder(Setting)
ORDER = msgspec.msgpack.Decoder(Order)
ANSWER = msgspec.msgpack.Decoder(Answer)
PRINTING: msgspec.msgpack.Decoder[Printed | Complaint] = msgspec.msgpack.Decoder(Printed | Complaint)
