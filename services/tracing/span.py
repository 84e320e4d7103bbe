"""What is told of a trace: spans as frozen records, with times in monotonic seconds of the process that tells."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.protocol.messages import TraceContext
from penstock.services.tracing.names import Kind

Value = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]
Facts = dict[str, Value]  # attributes in the making

MOST_LINKS = 128  # of a span; OpenTelemetry's limit


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened in a span's time."""

    name: str
    time: float
    attributes: Attributes = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One span that has ended. `parent` is the context that it belongs under; one without a span begins a trace."""

    parent: TraceContext
    id: str
    name: str
    start: float
    end: float
    kind: Kind = Kind.INTERNAL
    remote: bool = False  # the parent came from elsewhere
    attributes: Attributes = {}
    events: tuple[Event, ...] = ()
    links: tuple[TraceContext, ...] = ()
    error: str | None = None  # what went wrong; empty: nothing more is known than that something did
