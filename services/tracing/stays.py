"""A choice's stay in the scheduler as spans: its wait, the chunks of its prompt, its decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.engine_core.scheduling.history import Stay
from penstock.services.tracing import names
from penstock.services.tracing.context import Ids
from penstock.services.tracing.span import Event, Facts, Span

MOST_CHUNKS = 128  # of a prompt that are told one by one
EVENTS: Mapping[str, str] = {
    "preempted": names.PREEMPTED,
    "restarted": names.RESTARTED,
    "abort": names.ABORTED,
}  # by how a stay ends
ERRORS = ("error", "grammar", "unavailable")


def stay_spans(stay: Stay, ids: Ids) -> Iterator[Span]:
    """All of it. Every span is below the api's, so that none hangs in the air when a process dies before it tells."""
    common: Facts = {names.REQUEST: f"{stay.request:x}", names.CHOICE: stay.choice}
    ended = (Event(EVENTS[stay.end], stay.left),) if stay.end in EVENTS else ()
    error = stay.end if stay.end in ERRORS else None
    waits = stay.entered is None
    yield Span(
        parent=stay.trace, id=ids.span(), name=names.QUEUE, start=stay.queued,
        end=stay.left if stay.entered is None else stay.entered,
        attributes=common | ({names.END: stay.end} if waits else {}),
        events=ended if waits else (), error=error if waits else None,
    )  # fmt: skip
    if stay.entered is None:
        return
    yield from prefills(stay, common, ids)
    if stay.decoding is not None:
        yield decode(stay, common, ended, error, ids)
    elif ended or error:  # in the midst of a chunk
        began = stay.chunks[-1].applied if stay.chunks else stay.entered
        attributes: Facts = common | {names.END: stay.end}
        yield Span(parent=stay.trace, id=ids.span(), name=names.PREFILL, start=began, end=stay.left,
                   attributes=attributes, events=ended, error=error)  # fmt: skip


def prefills(stay: Stay, common: Facts, ids: Ids) -> Iterator[Span]:
    """One for each chunk. The steps overlap: a chunk is planned while the one before it runs."""
    for chunk in stay.chunks[:MOST_CHUNKS]:
        attributes = {
            **common, names.PROMPT_TOKENS: stay.prompt_tokens, names.REUSED_TOKENS: stay.reused,
            names.CHUNK_START: chunk.start, names.CHUNK_TOKENS: chunk.count, names.STEP_NUMBER: chunk.step,
        }  # fmt: skip
        yield Span(parent=stay.trace, id=ids.span(), name=names.PREFILL, start=chunk.planned, end=chunk.applied,
                   attributes=attributes)  # fmt: skip


def decode(stay: Stay, common: Facts, ended: tuple[Event, ...], error: str | None, ids: Ids) -> Span:
    """From the first token of this stay to its end."""
    assert stay.decoding is not None
    attributes = {
        **common, names.END: stay.end, names.OUTPUT_TOKENS: stay.tokens,
        names.ACCEPTED_DRAFTS: stay.accepted, names.REJECTED_DRAFTS: stay.rejected,
    }  # fmt: skip
    events = [Event(names.FIRST_TOKEN, stay.decoding)] if stay.first else []
    events += [Event(names.TOKENS, time, {names.TOKENS_SO_FAR: tokens}) for time, tokens in stay.marks]
    return Span(parent=stay.trace, id=ids.span(), name=names.DECODE, start=stay.decoding, end=stay.left,
                attributes=attributes, events=(*events, *ended), error=error)  # fmt: skip
