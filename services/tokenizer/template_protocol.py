"""What a template worker and its owner say to each other: `Setting` once, then a `Job` in, an `Answer` out."""

from __future__ import annotations

import msgspec

from penstock.engine_core.parsers.dialect import Dialect
from penstock.engine_core.text.prompts import PromptLimits
from penstock.engine_core.text.rendering import Rendered
from penstock.protocol.messages import Detokenize, SubmitText, Tokenize


class Setting(msgspec.Struct, frozen=True):
    """What a template worker must know of the model, and what one rendering may take."""

    folder: str  # of the model
    chat_template: str  # the operator's file with one, or empty
    limits: PromptLimits
    names: dict[str, str]  # the special tokens that templates can name
    dialect: Dialect
    controls: frozenset[str] | None  # control tokens that contents must not spell; None: they may
    seconds: float  # of CPU
    memory: int  # bytes


class Order(msgspec.Struct, frozen=True, tag=True):
    """A chat to be rendered by the request's own template."""

    request: SubmitText
    now: float  # unix seconds


class Trial(msgspec.Struct, frozen=True, tag=True):
    """What may have killed a tokenizer: whether it kills a process that does with it what a tokenizer does."""

    question: SubmitText | Tokenize | Detokenize
    now: float  # unix seconds
    rendered: Rendered | None = None  # of a request with a template of its own


class Complaint(msgspec.Struct, frozen=True, tag=True):
    """Why a chat is not rendered: what `InvalidRequest` tells."""

    message: str
    param: str | None
    code: str | None = None


class Printed(msgspec.Struct, frozen=True, tag=True):
    """A chat as text."""

    rendered: Rendered


class Survived(msgspec.Struct, frozen=True, tag=True):
    """What was tried kills nobody."""


class Answer(msgspec.Struct, frozen=True):
    """What came of a job."""

    outcome: Printed | Complaint | Survived
    remembered: int = 0  # bytes of the template sources that the worker keeps compiled
    ended: bool = False  # the rendering passed a limit or died


SETTING = msgspec.msgpack.Decoder(Setting)
JOB: msgspec.msgpack.Decoder[Order | Trial] = msgspec.msgpack.Decoder(Order | Trial)
ANSWER = msgspec.msgpack.Decoder(Answer)
OUTCOME: msgspec.msgpack.Decoder[Printed | Complaint | Survived] = msgspec.msgpack.Decoder(
    Printed | Complaint | Survived
)
