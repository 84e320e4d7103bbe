"""apply(): what one step's result means. Tokens are appended, ends are found, the fence opens. Nothing is allocated."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.engine_core.scheduling.drafting import (
    count_drafts,
    fill_told,
    land_drafts,
    look_ahead,
    settle_drafts,
    tell_guesses,
)
from penstock.engine_core.scheduling.lifecycle import end, release, seal_to
from penstock.engine_core.scheduling.outbox import Note, Rows, joined
from penstock.engine_core.scheduling.request import Choice, Request, verdict
from penstock.engine_core.scheduling.running_batch import Lane
from penstock.engine_core.scheduling.state import Chunk, Flight, Judged, State
from penstock.engine_core.scheduling.tracing import PrefillChunk
from penstock.protocol.errors import EngineFailure, GrammarFailure
from penstock.protocol.messages import Finish, Logprobs
from penstock.protocol.steps import REJECTED, StepResult

SEALS = 64  # decoded blocks named in one apply; the others follow in the next ones or when the choice leaves
NOT_FINITE = "the model produced non-finite logits for this request"
BROKEN_OFF = "the output ended inside its structure"
NON_FINITE = -1  # the token of a row whose logits were not finite
Ended = tuple[Choice, Finish, Note]


def apply(state: State, result: StepResult) -> None:
    """Take the result of the oldest step in flight. A result of another epoch is discarded."""
    if result.epoch != state.epoch:
        state.totals.stale_results += 1
        return
    if state.followed < result.step:
        follow(state, result)
    flight = state.flights.popleft()
    assert flight.step == result.step, "results come in the order of the plans"
    state.applied = flight.step
    if result.prompt_logprobs:
        keep_scores(flight, result)
    if flight.drafting or state.guesses.most:
        land_drafts(state, flight, result)
    if state.traces.running:
        now = state.durations.now
        for chunk in flight.chunks:
            record = PrefillChunk(flight.step, chunk.start, chunk.count, flight.planned, now)
            state.traces.chunk(chunk.choice, record, slots=state.slots, last=chunk.sample)
    take(state, flight, result)
    if result.vectors:
        take_vectors(state, flight, result)
    for fenced in state.fence.open(flight.step):
        release(state, fenced)


def take(state: State, flight: Flight, result: StepResult) -> None:
    """Append each row's tokens to its choice, end those that are over, hand the rows to the outboxes."""
    slots, lane = state.slots, flight.lane
    tokens, counts = append_tokens(flight, np.frombuffer(result.token_ids, np.int32))
    kept = slots.life[lane.slots] == lane.lives  # rows whose choice is still where the step met it
    settled = lane.slots[kept]
    slots.known[settled] += 1 if flight.drafts is None else counts[kept]
    if flight.drafts is not None:
        settle_drafts(state, flight, flight.drafts, counts, kept.nonzero()[0])
        tell_guesses(state, flight, flight.drafts, kept, counts)
    if state.traces.running:
        state.traces.mark(settled, slots, state.durations.now)
    suspects = state.suspects.among(tokens)  # rows that must be looked at: a token of theirs may end one
    if flight.drafts is not None:
        suspects = np.logical_or.reduceat(suspects, np.cumsum(counts) - counts)
    suspects[kept] |= slots.known[settled] >= slots.limit[settled]
    for row in (~kept).nonzero()[0].tolist():
        choice = lane.choices[row]
        if not choice.ended:  # preempted since: its tokens in flight still count
            kept[row] = True
            suspects[row] |= len(choice.tokens) >= choice.request.limit
    if flight.guided:
        suspects[[guided.row for guided in flight.guided]] = False
    rows = (suspects & kept).nonzero()[0].tolist()
    judged = judge_rows(flight, rows, tokens, counts) if rows else {}
    if state.judged:
        judged = dict(sorted((judged | state.judged).items()))
    surplus, taken = len(tokens), counts
    if judged:
        take_back(state, judged, counts)
        tokens, counts = shortened(tokens, taken, judged)
    notes = first_notes(state, flight, kept) if flight.chunks else {}
    if flight.drafts is not None:
        count_drafts(state, flight, flight.drafts, kept, taken, counts, notes)
    seal_rows(state, settled)
    if result.logprobs:
        score_rows(flight, result, counts, notes)
    finish = np.zeros(len(counts), np.uint8)
    for row, found in judged.items():
        finish[row] = found.finish
        note_end(notes, row, found)
        end(state, found.choice, found.finish)
    given = int(counts[kept].sum())
    state.totals.output_tokens += given
    state.totals.surplus_tokens += surplus - given
    deliver(state, lane, kept, Rows(lane.ids, lane.numbers, counts, finish, tokens, notes))


def append_tokens(
    flight: Flight, entries: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Append what each row gave to its choice. Returns the tokens that were not rejected, and how many of them are
    each row's. # [entries] → [tokens], [rows]"""
    lane, drafts = flight.lane, flight.drafts
    if drafts is None:
        assert len(entries) == len(lane.slots), "one token for each row that samples"
        for choice, token in zip(lane.choices, entries.tolist(), strict=True):
            if not choice.ended:
                choice.tokens.append(token)
        return entries, np.ones(len(entries), np.int32)
    sizes = drafts.sizes(len(lane.slots))
    assert len(entries) == sizes.sum(), "a token for each entry of the rows that sample"
    valid = entries != REJECTED
    starts = np.cumsum(sizes) - sizes
    assert bool(valid[starts].all()), "the first entry of a row follows no guess"
    counts = np.add.reduceat(valid, starts, dtype=np.int32)
    tokens = entries[valid]
    values, place = tokens.tolist(), 0
    for choice, count in zip(lane.choices, counts.tolist(), strict=True):
        if not choice.ended:
            choice.tokens.extend(values[place : place + count])
        place += count
    return tokens, counts


def take_back(state: State, judged: dict[int, Judged], counts: npt.NDArray[np.int32]) -> None:
    """Tokens behind a choice's end do not count."""
    for row, found in judged.items():
        surplus = int(counts[row]) - found.tokens
        if surplus:
            choice = found.choice
            del choice.tokens[len(choice.tokens) - surplus :]
            if choice.slot >= 0:
                state.slots.known[choice.slot] = len(choice.tokens)


def shortened(
    tokens: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], judged: dict[int, Judged]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Without the tokens that do not count. # [tokens], [rows]"""
    left = counts
    for row, found in judged.items():
        if found.tokens < left[row]:
            if left is counts:
                left = counts.copy()
            left[row] = found.tokens
    if left is counts:
        return tokens, counts
    places = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)  # of each token in its row
    return tokens[places < np.repeat(left, counts)], left


def score_rows(flight: Flight, result: StepResult, counts: npt.NDArray[np.int32], notes: dict[int, Note]) -> None:
    """Put the logprobs of the tokens that count into the notes of their rows."""
    sizes = np.ones(len(counts), np.int64) if flight.drafts is None else flight.drafts.sizes(len(counts))
    starts = np.cumsum(sizes) - sizes
    entries = np.array([part.row for part in result.logprobs])
    rows = np.searchsorted(starts, entries, side="right") - 1
    scores: dict[int, list[Logprobs]] = {}
    counted = entries - starts[rows] < counts[rows]
    for part, row, counts_here in zip(result.logprobs, rows.tolist(), counted.tolist(), strict=True):
        if counts_here:
            scores.setdefault(row, []).append(part.logprobs)
    for row, parts in scores.items():
        notes.setdefault(row, Note()).logprobs = joined(parts)


def note_end(notes: dict[int, Note], row: int, found: Judged) -> None:
    """What is told with a choice's last row."""
    note = notes.setdefault(row, Note()) if found.tokens else Note()
    notes[row] = note
    note.drafted = found.choice.drafted
    note.stop_token = found.stop_token
    note.error = found.error


def seal_rows(state: State, settled: npt.NDArray[np.int64]) -> None:
    """Name blocks that decoding has filled, a bounded number per step: rows that began together fill them together."""
    slots = state.slots
    full = np.minimum(slots.planned[settled], slots.known[settled]) // state.options.block_size
    rows = (full > slots.sealed[settled]).nonzero()[0][:SEALS]
    for slot, blocks in zip(settled[rows].tolist(), full[rows].tolist(), strict=True):
        choice = slots.choices[slot]
        assert choice is not None
        seal_to(state, choice, blocks)


def first_notes(state: State, flight: Flight, kept: npt.NDArray[np.bool_]) -> dict[int, Note]:
    """Notes of the rows that end a chunk: what is told with a choice's first token."""
    notes: dict[int, Note] = {}
    row = len(flight.lane.choices) - sum([chunk.sample for chunk in flight.chunks])
    for chunk in flight.chunks:
        if not chunk.sample:
            continue
        choice, request = chunk.choice, chunk.choice.request
        if kept[row]:
            if not choice.began:
                choice.began = True
                state.durations.begin(choice)
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
    """Split the rows by source. Rows of choices that had ended are thrown away."""
    if lane.source >= 0:
        if bool(kept.all()):
            state.outboxes[lane.source].put(rows)
        elif bool(kept.any()):
            state.outboxes[lane.source].put(select(rows, kept))
        return
    for source in np.unique(lane.sources[kept]).tolist():
        state.outboxes[source].put(select(rows, kept & (lane.sources == source)))


def select(rows: Rows, mask: npt.NDArray[np.bool_]) -> Rows:
    """The masked rows with their tokens and notes."""
    place = np.cumsum(mask) - 1
    notes = {int(place[row]): note for row, note in rows.notes.items() if mask[row]}
    return Rows(
        rows.ids[mask],
        rows.numbers[mask],
        rows.counts[mask],
        rows.finish[mask],
        rows.tokens[np.repeat(mask, rows.counts)],
        notes,
    )


def follow(state: State, result: StepResult) -> None:
    """Have the guides of the oldest step in flight take its tokens, and note whom that ends for `apply`."""
    if result.epoch != state.epoch:
        return
    flight = state.flights[0]
    assert flight.step == result.step, "results come in the order of the plans"
    state.followed, state.judged = flight.step, {}
    if flight.told:
        fill_told(flight, result)
    if not flight.guided:
        return
    state.looks.meet(len(flight.lane.slots), state.cost)
    entries: list[int] = np.frombuffer(result.token_ids, np.int32).tolist()
    for guided in flight.guided:
        choice, entry = guided.choice, guided.entry
        if choice.ended:
            continue
        tokens = entries[entry : entry + len(guided.drafts) + 1]
        if guided.drafts:
            tokens = [token for token in tokens if token != REJECTED]
        found = judge(choice, len(choice.tokens), tokens)
        if found is not None:
            state.judged[guided.row] = found
        elif choice.drafter is not None and choice.guide is not None:
            look_ahead(choice.drafter, choice.guide, state.looks)


def judge_rows(
    flight: Flight, rows: list[int], tokens: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
) -> dict[int, Judged]:
    """Which of these rows' choices end with the tokens that were appended to them, and how.

    tokens: of all rows. counts: how many of them are each row's. # [tokens], [rows]
    """
    judged: dict[int, Judged] = {}
    values: list[int] = tokens.tolist()
    ends: list[int] = np.cumsum(counts).tolist()
    sizes: list[int] = counts.tolist()
    for row in rows:
        choice, size = flight.lane.choices[row], sizes[row]
        found = judge(choice, len(choice.tokens) - size, values[ends[row] - size : ends[row]])
        if found is not None:
            judged[row] = found
    return judged


def judge(choice: Choice, before: int, tokens: list[int]) -> Judged | None:
    """Whether the choice, of so many tokens before, ends with one of these, and how; None if it goes on. Its guide
    takes them as long as it does. Token by token, so that how many came at once makes no difference."""
    request, guide = choice.request, choice.guide
    for count, token in enumerate(tokens, 1):
        if token == NON_FINITE:
            return Judged(choice, count - 1, Finish.ERROR, error=NOT_FINITE)
        if guide is not None and guide.failed:  # whatever was said under its last mask
            return Judged(choice, count - 1, Finish.GRAMMAR, error=guide.failure)
        finish = verdict(request, token, before + count)
        if finish != Finish.NONE:
            named = finish == Finish.STOP and token in request.message.sampling.stop_token_ids
            if guide is not None and finish == Finish.STOP and not (named or guide.may_end()):
                return Judged(choice, count - 1, Finish.GRAMMAR, error=BROKEN_OFF)
            return Judged(choice, count, finish, token if named else None)
        if guide is None:
            continue
        try:
            guide.advance([token])
        except GrammarFailure as error:  # guard: design 7, one request's automaton
            return Judged(choice, count - 1, Finish.GRAMMAR, error=error.message)
        except EngineFailure as error:  # guard: the same
            return Judged(choice, count - 1, Finish.ERROR, error=error.message)
        if guide.ended or (guide.finished and not can_end(request, before + count)):
            return Judged(choice, count, Finish.STOP)
    return None


def can_end(request: Request, length: int) -> bool:
    """Whether a choice of so many tokens, whose structure is complete, ends by an end-of-sequence token: for some
    requests that ends nothing, and min_tokens may keep it away."""
    sampling = request.message.sampling
    early = length - request.prompt_tokens < sampling.min_tokens
    return not early and not request.ending.isdisjoint(sampling.eos_token_ids)


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
        state.outboxes[source].put_vectors(vector_rows(found))


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
