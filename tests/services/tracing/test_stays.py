"""A choice's stay as spans: the wait, chunks, decoding, and why it ended."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine_core.scheduling.history import PrefillChunk, Stay
from penstock.services.tracing import names
from penstock.services.tracing.context import Ids
from penstock.services.tracing.span import Span
from penstock.services.tracing.stays import MOST_CHUNKS, stay_spans
from tests.services.tracing.tracing import SAMPLED, child_of, events, named

CHUNKS = (PrefillChunk(3, 0, 512, 1.0, 1.5), PrefillChunk(4, 512, 88, 1.4, 2.0))


def spans(**given: Any) -> list[Span]:
    fields: dict[str, Any] = {
        "trace": SAMPLED, "request": 255, "choice": 1, "queued": 0.5, "entered": 1.0, "left": 9.0, "end": "stop",
        "prompt_tokens": 600, "reused": 16, "chunks": CHUNKS, "decoding": 2.0, "first": True, "tokens": 40,
        "accepted": 5, "rejected": 3, "marks": ((4.0, 16), (6.0, 32)),
    }  # fmt: skip
    return list(stay_spans(Stay(**fields | given), Ids()))


def test_a_whole_stay() -> None:
    found = spans()
    assert [span.name for span in found] == [names.QUEUE, names.PREFILL, names.PREFILL, names.DECODE]
    assert all(child_of(span, SAMPLED) for span in found)
    assert all(span.attributes[names.REQUEST] == "ff" and span.attributes[names.CHOICE] == 1 for span in found)
    assert [(span.start, span.end) for span in found] == [(0.5, 1.0), (1.0, 1.5), (1.4, 2.0), (2.0, 9.0)]
    assert len({span.id for span in found}) == 4


def test_chunks_say_which_positions_they_ran() -> None:
    second = spans()[2].attributes
    assert (second[names.CHUNK_START], second[names.CHUNK_TOKENS], second[names.STEP_NUMBER]) == (512, 88, 4)
    assert (second[names.PROMPT_TOKENS], second[names.REUSED_TOKENS]) == (600, 16)


def test_decoding_marks_the_first_token_and_every_so_many() -> None:
    decode = named(spans(), names.DECODE)
    assert events(decode) == [names.FIRST_TOKEN, names.TOKENS, names.TOKENS]
    assert [event.time for event in decode.events] == [2.0, 4.0, 6.0]
    assert decode.events[1].attributes == {names.TOKENS_SO_FAR: 16}
    assert decode.attributes[names.OUTPUT_TOKENS] == 40
    assert (decode.attributes[names.ACCEPTED_DRAFTS], decode.attributes[names.REJECTED_DRAFTS]) == (5, 3)
    assert events(named(spans(first=False), names.DECODE))[0] == names.TOKENS


@pytest.mark.parametrize(
    ("end", "event"), [("preempted", names.PREEMPTED), ("restarted", names.RESTARTED), ("abort", names.ABORTED)]
)
def test_what_cuts_a_stay_short_is_an_event(end: str, event: str) -> None:
    assert events(named(spans(end=end, marks=()), names.DECODE)) == [names.FIRST_TOKEN, event]
    waiting = spans(end=end, entered=None, chunks=(), decoding=None)
    assert [span.name for span in waiting] == [names.QUEUE]
    assert (events(waiting[0]), waiting[0].end, waiting[0].attributes[names.END]) == ([event], 9.0, end)


def test_a_stay_cut_in_a_chunk_shows_the_chunk_that_did_not_end() -> None:
    found = spans(end="abort", chunks=CHUNKS[:1], decoding=None)
    assert [span.name for span in found] == [names.QUEUE, names.PREFILL, names.PREFILL]
    assert (found[2].start, found[2].end, events(found[2])) == (1.5, 9.0, [names.ABORTED])
    alone = spans(end="restarted", chunks=(), decoding=None)[-1]
    assert (alone.start, alone.end) == (1.0, 9.0)


@pytest.mark.parametrize("end", ["error", "grammar", "unavailable"])
def test_a_failure_is_the_status_of_the_phase_that_it_ended(end: str) -> None:
    assert [span.error for span in spans(end=end)] == [None, None, None, end]
    assert spans(end=end, entered=None)[-1].error == end
    assert spans(end=end, decoding=None)[-1].error == end


def test_a_vector_is_its_prompt_alone() -> None:
    assert [span.name for span in spans(decoding=None, tokens=0)] == [names.QUEUE, names.PREFILL, names.PREFILL]


def test_chunks_are_bounded() -> None:
    many = tuple(PrefillChunk(step, step, 1, 1.0, 2.0) for step in range(1000))
    assert sum(span.name == names.PREFILL for span in spans(chunks=many)) == MOST_CHUNKS
