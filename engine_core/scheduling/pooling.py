"""Vectors of requests that pool: each ends its choice, whose only row it is."""

from __future__ import annotations

import numpy as np

from penstock.engine_core.scheduling.judging import NOT_FINITE
from penstock.engine_core.scheduling.lifecycle import end
from penstock.engine_core.scheduling.outbox import Note, Rows
from penstock.engine_core.scheduling.request import Choice
from penstock.engine_core.scheduling.state import Flight, State
from penstock.protocol.messages import Finish
from penstock.protocol.steps import StepResult

Ended = tuple[Choice, Finish, Note]


def take_vectors(state: State, flight: Flight, result: StepResult) -> None:
    """End the choices whose vectors have come and hand the rows to their sources. A choice that was preempted since has
    its vector all the same; one that is not finite fails alone."""
    ended: dict[int, list[Ended]] = {}  # by source
    for part in result.vectors:
        chunk = flight.chunks[part.row]
        assert chunk.pool, "a vector of a chunk that ends no prompt"
        choice, request = chunk.choice, chunk.choice.request
        if choice.ended:
            continue
        finite = bool(np.isfinite(np.frombuffer(part.values, np.float32)).all())
        finish = Finish.STOP if finite else Finish.ERROR
        note = Note(cached_tokens=request.cached, vector=part.values) if finite else Note(error=NOT_FINITE)
        ended.setdefault(request.source, []).append((choice, finish, note))
        end(state, choice, finish)
    for source, found in ended.items():
        state.outbox(source).put_vectors(vector_rows(found))


def vector_rows(ended: list[Ended]) -> Rows:
    """Terminal rows without tokens."""
    return Rows(
        np.array([choice.request.message.id for choice, _, _ in ended], np.int64),
        np.array([choice.index for choice, _, _ in ended], np.uint16),
        np.zeros(len(ended), np.int32),
        np.array([finish for _, finish, _ in ended], np.uint8),
        np.zeros(0, np.int32),
        {row: note for row, (_, _, note) in enumerate(ended)},
    )
