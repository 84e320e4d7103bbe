"""apply(): what one step's result means. Tokens are appended, ends are found, the fence opens. Nothing is allocated."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_core.scheduling.lifecycle import end, release, seal_to
from engine_core.scheduling.outbox import Note, Rows, joined
from engine_core.scheduling.request import Choice
from engine_core.scheduling.slots import Lane
from engine_core.scheduling.state import Chunk, Flight, State
from engine_core.scheduling.stops import NON_FINITE, verdict
from protocol.messages import Finish, Logprobs
from protocol.steps import StepResult

SEALS = 64  # decoded blocks named in one apply; the others follow in the next ones or when the choice leaves
NOT_FINITE = "the model produced non-finite logits for this request"


def apply(state: State, result: StepResult) -> None:
    """Take the result of the oldest step in flight. A result of another epoch is discarded."""
    if result.epoch != state.epoch:
        state.totals.stale_results += 1
        return
    flight = state.flights.popleft()
    assert flight.step == result.step, "results come in the order of the plans"
    tokens = np.frombuffer(result.token_ids, np.int32)
    assert len(tokens) == len(flight.lane.slots), "one token for each row that samples"
    state.applied = flight.step
    keep_scores(flight, result)
    take(state, flight, tokens, result)
    for fenced in state.fence.open(flight.step):
        release(state, fenced)


def take(state: State, flight: Flight, tokens: npt.NDArray[np.int32], result: StepResult) -> None:
    """Append each row's token to its choice, end those that are over, hand the rows to the outboxes."""
    slots, lane = state.slots, flight.lane
    finish = np.zeros(len(tokens), np.uint8)
    for choice, token in zip(lane.choices, tokens.tolist(), strict=True):
        if not choice.ended:
            choice.tokens.append(token)
    kept = slots.life[lane.slots] == lane.lives  # rows whose choice is still where the step met it
    settled = lane.slots[kept]
    slots.known[settled] += 1
    suspects = state.suspects.among(tokens)
    suspects[kept] |= slots.known[settled] >= slots.limit[settled]
    for row in (~kept).nonzero()[0].tolist():
        choice = lane.choices[row]
        if not choice.ended:  # preempted since: its token in flight still counts
            kept[row] = True
            suspects[row] |= len(choice.tokens) >= choice.request.limit
    notes = first_notes(flight, lane, kept)
    for part in result.logprobs:
        notes.setdefault(part.row, Note()).logprobs = part.logprobs
    seal_rows(state, settled)
    counts = kept.astype(np.int32)
    for row in (suspects & kept).nonzero()[0].tolist():
        finish[row] = judge(state, lane.choices[row], int(tokens[row]), notes, row)
        counts[row] = tokens[row] != NON_FINITE
    state.totals.output_tokens += int(counts.sum())
    state.totals.surplus_tokens += len(tokens) - int(kept.sum())
    deliver(state, lane, kept, Rows(lane.ids, lane.numbers, counts, finish, tokens, notes))


def judge(state: State, choice: Choice, token: int, notes: dict[int, Note], row: int) -> Finish:
    """Whether the choice ends with this token, which is its last already; if so, end it."""
    if token == NON_FINITE:
        choice.tokens.pop()
        notes[row] = Note(error=NOT_FINITE)
        end(state, choice, Finish.ERROR)
        return Finish.ERROR
    finish = verdict(choice, token)
    if finish != Finish.NONE:
        if finish == Finish.STOP and token in choice.request.message.sampling.stop_token_ids:
            notes.setdefault(row, Note()).stop_token = token
        end(state, choice, finish)
    return finish


def seal_rows(state: State, settled: npt.NDArray[np.int64]) -> None:
    """Name blocks that decoding has filled, a bounded number per step: rows that began together fill them together."""
    slots = state.slots
    full = np.minimum(slots.planned[settled], slots.known[settled]) // state.options.block_size
    rows = (full > slots.sealed[settled]).nonzero()[0][:SEALS]
    for slot, blocks in zip(settled[rows].tolist(), full[rows].tolist(), strict=True):
        choice = slots.choices[slot]
        assert choice is not None
        seal_to(state, choice, blocks)


def first_notes(flight: Flight, lane: Lane, kept: npt.NDArray[np.bool_]) -> dict[int, Note]:
    """Notes of the rows that end a chunk: what is told with a choice's first token."""
    notes: dict[int, Note] = {}
    row = len(lane.choices) - sum([chunk.sample for chunk in flight.chunks])
    for chunk in flight.chunks:
        if not chunk.sample:
            continue
        choice, request = chunk.choice, chunk.choice.request
        if kept[row]:
            if not choice.began:
                choice.began = True
                notes.setdefault(row, Note()).cached_tokens = request.cached
            if choice.index == 0 and request.wants_scores and not choice.told and not choice.wants_scores:
                choice.told = True
                scores = joined(choice.scores) or Logprobs(width=1, token_ids=b"", values=b"", ranks=b"")
                notes.setdefault(row, Note()).prompt_logprobs = scores
                choice.scores.clear()
        row += 1
    return notes


def keep_scores(flight: Flight, result: StepResult) -> None:
    """Collect prompt logprobs. Chunks of a recomputed prompt may overlap what has come: each position counts once."""
    for part in result.prompt_logprobs:
        chunk: Chunk = flight.chunks[part.row]
        choice, scores = chunk.choice, part.logprobs
        skip = choice.scored - chunk.start
        fresh = len(scores.ranks) // 4 - skip
        if choice.ended or not choice.wants_scores or fresh <= 0 or skip < 0:
            continue
        wide = skip * scores.width * 4
        choice.scores.append(
            Logprobs(
                width=scores.width,
                token_ids=scores.token_ids[wide:],
                values=scores.values[wide:],
                ranks=scores.ranks[skip * 4 :],
            )
        )
        choice.scored += fresh


def deliver(state: State, lane: Lane, kept: npt.NDArray[np.bool_], rows: Rows) -> None:
    """Split the rows by source. Rows of choices that had ended are thrown away; an error's row has no token."""
    if lane.source >= 0:
        if bool(kept.all()):
            state.outbox(lane.source).put(select(rows, None))
        elif bool(kept.any()):
            state.outbox(lane.source).put(select(rows, kept))
        return
    for source in np.unique(lane.sources[kept]).tolist():
        state.outbox(source).put(select(rows, kept & (lane.sources == source)))


def select(rows: Rows, mask: npt.NDArray[np.bool_] | None) -> Rows:
    """The masked rows with their notes, and only the tokens that count."""
    if mask is None:
        if bool(rows.counts.all()):
            return rows
        return Rows(rows.ids, rows.numbers, rows.counts, rows.finish, rows.tokens[rows.counts > 0], rows.notes)
    place = np.cumsum(mask) - 1
    notes = {int(place[row]): note for row, note in rows.notes.items() if mask[row]}
    return Rows(
        rows.ids[mask],
        rows.numbers[mask],
        rows.counts[mask],
        rows.finish[mask],
        rows.tokens[mask & (rows.counts > 0)],
        notes,
    )
