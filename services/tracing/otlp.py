"""Spans as bytes of OTLP's ExportTraceServiceRequest.

Written out by hand: a span costs a tenth of what it costs through generated classes, and it is the streams' time that
would pay for them. Source: opentelemetry-proto 1.x, collector/trace/v1/trace_service.proto, trace/v1/trace.proto,
common/v1/common.proto, and the encoding of Protocol Buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from protocol.messages import TraceContext
from services.tracing.clock import Clock
from services.tracing.context import span_of, trace_of
from services.tracing.names import Status
from services.tracing.span import Attributes, Event, Span, Value

FIXED = struct.Struct("<Q")
DOUBLE = struct.Struct("<d")
FLAGS = struct.Struct("<I")
HAS_IS_REMOTE, IS_REMOTE = 0x100, 0x200  # of SpanFlags
INT64 = 1 << 64

# Field number and wire type in one byte: 0 varint, 1 eight bytes, 2 with a length, 5 four bytes.
ONE, TWO, THREE, FOUR, FIVE = b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a"
SPAN_KIND, SPAN_START, SPAN_END, SPAN_ATTRIBUTE = b"\x30", b"\x39", b"\x41", b"\x4a"
SPAN_EVENT, SPAN_LINK, SPAN_STATUS, SPAN_FLAGS = b"\x5a", b"\x6a", b"\x7a", b"\x85\x01"
EVENT_TIME, STATUS_CODE, LINK_FLAGS = b"\x09", b"\x18", b"\x35"
VALUE_BOOL, VALUE_INT, VALUE_DOUBLE, VALUE_ARRAY = b"\x10", b"\x18", b"\x21", b"\x2a"


def varint(number: int) -> bytes:
    """A whole number that is not negative."""
    if number < 0x80:
        return bytes((number,))
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def field(tag: bytes, content: bytes) -> bytes:
    """A field with a length."""
    return tag + varint(len(content)) + content


def value(given: Value) -> bytes:
    """An AnyValue."""
    match given:
        case str():
            return field(ONE, given.encode(errors="replace"))
        case bool():
            return VALUE_BOOL + varint(given)
        case int():
            return VALUE_INT + varint(given % INT64)
        case float():
            return VALUE_DOUBLE + DOUBLE.pack(given)
        case _:
            return field(VALUE_ARRAY, b"".join([field(ONE, value(each)) for each in given]))


def attributes(tag: bytes, given: Attributes) -> list[bytes]:
    """KeyValues, each as field `tag`."""
    return [field(tag, field(ONE, name.encode()) + field(TWO, value(each))) for name, each in given.items()]


def event(given: Event, clock: Clock) -> bytes:
    """A Span.Event."""
    return b"".join((
        EVENT_TIME, FIXED.pack(clock.nanoseconds(given.time)), field(TWO, given.name.encode()),
        *attributes(THREE, given.attributes),
    ))  # fmt: skip


def link(given: TraceContext) -> bytes:
    """A Span.Link to a span that is told elsewhere."""
    return b"".join((
        field(ONE, bytes.fromhex(trace_of(given))), field(TWO, bytes.fromhex(span_of(given))),
        LINK_FLAGS, FLAGS.pack(1 | HAS_IS_REMOTE | IS_REMOTE),
    ))  # fmt: skip


def span(given: Span, clock: Clock) -> bytes:
    """A Span. What ends before it starts, by a correction of the clock, ends as it starts."""
    start = clock.nanoseconds(given.start)
    parts = [field(ONE, bytes.fromhex(trace_of(given.parent))), field(TWO, bytes.fromhex(given.id))]
    if given.parent.tracestate:
        parts.append(field(THREE, given.parent.tracestate.encode()))
    if parent := span_of(given.parent):
        parts.append(field(FOUR, bytes.fromhex(parent)))
    parts += (
        field(FIVE, given.name.encode(errors="replace")), SPAN_KIND, varint(given.kind),
        SPAN_START, FIXED.pack(start), SPAN_END, FIXED.pack(max(start, clock.nanoseconds(given.end))),
        *attributes(SPAN_ATTRIBUTE, given.attributes),
    )  # fmt: skip
    parts += [field(SPAN_EVENT, event(each, clock)) for each in given.events]
    parts += [field(SPAN_LINK, link(each)) for each in given.links]
    if given.error is not None:
        message = field(TWO, given.error.encode(errors="replace")) if given.error else b""
        parts.append(field(SPAN_STATUS, message + STATUS_CODE + varint(Status.ERROR)))
    flags = 1 | HAS_IS_REMOTE | (IS_REMOTE if given.remote else 0)
    return b"".join((*parts, SPAN_FLAGS, FLAGS.pack(flags)))


def request(spans: Iterable[Span], resource: Mapping[str, Value], scope: tuple[str, str], clock: Clock) -> bytes:
    """The whole request: spans of one resource and of one instrumentation scope, which has a name and a version."""
    told = field(ONE, b"".join(attributes(ONE, resource)))
    named = field(ONE, field(ONE, scope[0].encode()) + field(TWO, scope[1].encode()))
    scoped = named + b"".join([field(TWO, span(each, clock)) for each in spans])
    return field(ONE, told + field(TWO, scoped))
