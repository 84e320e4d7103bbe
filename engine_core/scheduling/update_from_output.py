"""apply(): one step's result. Tokens are appended, ends are found, the fence opens. No block is allocated.

Guides take their rows' tokens before anything else: masks of the next step wait for them, and are filled while the rest
of the result is applied.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.guide import go_on
from penstock.engine_core.scheduling.drafting import (
    count_drafts,
    fill_awaited_drafts,
    finish_drafts,
    record_acceptance,
    roll_back_rejected,
    update_jump_forward,
)
from penstock.engine_core.scheduling.host_tier import copy_ahead, observe
from penstock.engine_core.scheduling.lifecycle import cache_blocks, end, release
from penstock.engine_core.scheduling.outbox import Rows, end_rows, joined, note
from penstock.engine_core.scheduling.recurrent_state import publish_states
from penstock.engine_core.scheduling.request import Request, Sequence, finish_reason
from penstock.engine_core.scheduling.running_batch import NON_FINITE, Flags, GuidedRow, Ints, RunningBatch
from penstock.engine_core.scheduling.state import Chunk, InFlightStep, SchedulerState, SequenceEnd
from penstock.engine_core.scheduling.tracing import PrefillChunk
from penstock.engine_core.scheduling.windows import release_behind
from penstock.protocol.errors import EngineFailure, GrammarFailure
from penstock.protocol.messages import Finish
from penstock.protocol.outputs import Logprobs, TokenExtra
from penstock.protocol.steps import REJECTED, StepResult

MOST_CACHED = 64  # decoded blocks cached in one apply; the others follow later
MANY = 8  # guided rows that are followed together: columns of fewer cost more than they save
LONG_MASK = 0.25  # of a step's time: masks that are made faster come before its forward pass is over
FORGETTING = 0.8  # what a mask that was there leaves of the seconds that one took which was not
NOT_FINITE = "the model produced non-finite logits for this request"
BROKEN_OFF = "the output ended inside its structure"


def apply(state: SchedulerState, result: StepResult) -> None:
    """Take the result of the oldest step in flight. A result of another epoch is discarded."""
    if result.epoch != state.epoch:
        state.stats.totals.stale_results += 1
        return
    if state.steps.followed < result.step:
        follow(state, result)
    inflight = state.steps.in_flight.popleft()
    assert inflight.step == result.step, "results come in the order of the plans"
    state.steps.applied = inflight.step
    if result.prompt_logprobs:
        collect_prompt_logprobs(inflight, result)
    if state.slots.drafters.count or state.spec.device_drafts.most:
        finish_drafts(state, inflight, result)
    if state.traces.running:
        now = state.stats.now
        for chunk in inflight.chunks:
            record = PrefillChunk(inflight.step, chunk.start, chunk.count, inflight.planned, now)
            state.traces.chunk(chunk.sequence, record, last=chunk.sample)
    take(state, inflight, result)
    if state.kv.filled:
        cache_filled_blocks(state)
    if result.vectors:
        take_vectors(state, inflight, result)
    if state.kv.recurrent is not None and inflight.kept:
        publish_states(state.kv.recurrent, inflight.kept)
    if state.kv.layout.kinds:
        release_behind(state, inflight)
    for fenced in state.kv.fence.pop(inflight.step, ()):
        release(state, fenced)
    if state.encoder_cache.rows:
        state.encoder_cache.applied(inflight.step)
    if state.kv.host is not None:
        observe(state.kv.host, inflight, result.busy)
        copy_ahead(state)


def take(state: SchedulerState, inflight: InFlightStep, result: StepResult) -> None:
    """Append each row's tokens to its sequence, end sequences, hand the rows to the outboxes."""
    slots, batch, drafts = state.slots, inflight.batch, inflight.drafts
    kept, whole = slots.kept(batch), batch.departures == slots.departures
    tokens, counts = append_tokens(inflight, result, whole=whole)
    settled = batch.slots if whole else batch.slots[kept]
    if drafts is None:
        slots.num_tokens[settled] += 1
    else:
        slots.num_tokens[settled] += counts[kept]
        roll_back_rejected(state, inflight, drafts, counts, kept.nonzero()[0])
        record_acceptance(state, inflight, drafts, kept, counts)
    if state.traces.running:
        state.traces.mark(settled, slots, state.stats.now)
    ended_rows = state.steps.stopped
    if not whole or drafts is not None or inflight.last or state.stop_tokens.among(tokens.tolist()):
        ended_rows = find_ends(state, inflight, kept, settled, tokens, counts)
    surplus, taken, finish = len(tokens), counts, batch.unfinished
    if ended_rows:
        take_back(state, ended_rows, counts)
        tokens, counts = shortened(tokens, taken, ended_rows)
        finish = finish.copy()
    extras = first_token_extras(state, inflight, kept) if inflight.chunks else {}
    if drafts is not None:
        count_drafts(state, inflight, drafts, kept, taken, counts, extras)
    if result.logprobs:
        attach_logprobs(inflight, result, counts, extras)
    for row, found in ended_rows.items():
        if found.finish != Finish.PREFILLED:  # of which `Prefilled` tells
            finish[row] = found.finish
        if not found.tokens:
            extras.pop(row, None)  # they are those of a token that does not count
        note(extras, row, drafted=found.sequence.drafted, stop_token=found.stop_token, error=found.error)
        end(state, found.sequence, found.finish)
    given = len(tokens) if whole else int(counts[kept].sum())
    state.stats.totals.output_tokens += given
    state.stats.totals.surplus_tokens += surplus - given
    deliver(state, batch, kept, Rows(batch.ids, batch.numbers, counts, finish, tokens, extras))


def find_ends(
    state: SchedulerState,
    inflight: InFlightStep,
    kept: Flags,
    settled: Ints,
    tokens: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
) -> dict[int, SequenceEnd]:
    """The rows whose sequences end with the tokens that were appended to them. Rows of sequences preempted since become
    `kept`. # tokens: [tokens]; counts, kept: [rows]"""
    slots, batch = state.slots, inflight.batch
    suspects = state.stop_tokens.each(tokens.tolist())  # rows that a token of theirs may end
    if inflight.drafts is not None:
        suspects = np.logical_or.reduceat(suspects, np.cumsum(counts) - counts)
    suspects[kept] |= slots.num_tokens[settled] >= slots.limit[settled]
    for row in (~kept).nonzero()[0].tolist():
        sequence = batch.sequences[row]
        if not sequence.ended:  # preempted since: its tokens in flight still count
            kept[row] = True
            suspects[row] |= len(sequence.tokens) >= sequence.limit
    suspects[batch.guided] = False
    rows = (suspects & kept).nonzero()[0].tolist()
    ended_rows = check_stop_rows(inflight, rows, tokens, counts) if rows else {}
    return dict(sorted((ended_rows | state.steps.stopped).items())) if state.steps.stopped else ended_rows


def append_tokens(
    inflight: InFlightStep, result: StepResult, *, whole: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Append what each row gave to its sequence. Returns the tokens that were not rejected, and how many of them are
    each row's. `whole`: no sequence has left its slot since. # [tokens], [rows]"""
    batch, drafts = inflight.batch, inflight.drafts
    entries = np.frombuffer(result.token_ids, np.int32)
    if drafts is None:
        assert len(entries) == len(batch.slots), "one token for each row that samples"
        values: list[int] = entries.tolist()
        if whole:
            for append, token in zip(batch.appends, values, strict=True):
                append(token)
            return entries, batch.single
        for sequence, token in zip(batch.sequences, values, strict=True):
            if not sequence.ended:
                sequence.tokens.append(token)
        return entries, batch.single
    sizes = drafts.sizes(len(batch.slots))
    assert len(entries) == sizes.sum(), "a token for each entry of the rows that sample"
    valid = entries != REJECTED
    starts = np.cumsum(sizes) - sizes
    assert bool(valid[starts].all()), "the first entry of a row follows no guess"
    counts = np.add.reduceat(valid, starts, dtype=np.int32)
    tokens = entries[valid]
    values = tokens.tolist()
    place = 0
    for sequence, count in zip(batch.sequences, counts.tolist(), strict=True):
        if not sequence.ended:
            sequence.tokens.extend(values[place : place + count])
        place += count
    return tokens, counts


def take_back(state: SchedulerState, ended_rows: dict[int, SequenceEnd], counts: npt.NDArray[np.int32]) -> None:
    """Tokens behind a sequence's end do not count."""
    for row, found in ended_rows.items():
        surplus = int(counts[row]) - found.tokens
        if surplus:
            sequence = found.sequence
            del sequence.tokens[len(sequence.tokens) - surplus :]
            if sequence.slot >= 0:
                state.slots.num_tokens[sequence.slot] = len(sequence.tokens)


def shortened(
    tokens: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], ended_rows: dict[int, SequenceEnd]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Without the tokens that do not count. # [tokens], [rows]"""
    left = counts
    for row, found in ended_rows.items():
        if found.tokens < left[row]:
            if left is counts:
                left = counts.copy()
            left[row] = found.tokens
    if left is counts:
        return tokens, counts
    places = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)  # of each token in its row
    return tokens[places < np.repeat(left, counts)], left


def attach_logprobs(
    inflight: InFlightStep, result: StepResult, counts: npt.NDArray[np.int32], extras: dict[int, TokenExtra]
) -> None:
    """Put the logprobs of the tokens that count into the extras of their rows."""
    sizes = np.ones(len(counts), np.int64) if inflight.drafts is None else inflight.drafts.sizes(len(counts))
    starts = np.cumsum(sizes) - sizes
    entries = np.array([part.row for part in result.logprobs])
    rows = np.searchsorted(starts, entries, side="right") - 1
    scores: dict[int, list[Logprobs]] = {}
    counted = entries - starts[rows] < counts[rows]
    for part, row, counts_here in zip(result.logprobs, rows.tolist(), counted.tolist(), strict=True):
        if counts_here:
            scores.setdefault(row, []).append(part.logprobs)
    for row, parts in scores.items():
        note(extras, row, logprobs=joined(parts))


def cache_filled_blocks(state: SchedulerState) -> None:
    """Cache blocks that decoding has filled, a bounded number per step: rows that began together fill them together."""
    for _ in range(min(len(state.kv.filled), MOST_CACHED)):
        sequence = state.slots.sequences[state.kv.filled.popleft()]
        if sequence is not None:  # who has left has cached them
            cache_blocks(state, sequence)


def first_token_extras(state: SchedulerState, inflight: InFlightStep, kept: Flags) -> dict[int, TokenExtra]:
    """Of the rows that end a chunk: what comes with a sequence's first token."""
    extras: dict[int, TokenExtra] = {}
    row = len(inflight.batch.sequences) - sum([chunk.sample for chunk in inflight.chunks])
    for chunk in inflight.chunks:
        if not chunk.sample:
            continue
        sequence, request = chunk.sequence, chunk.sequence.request
        if kept[row]:
            if not sequence.began:
                state.stats.sequences.begin(sequence, state.stats.now)
                note(extras, row, cached_tokens=request.cached)
            if sequence.weights != state.steps.weights:  # none has gone on decoding since: it was computed again
                sequence.weights = state.steps.weights
                note(extras, row, weights=((sequence.outputs - 1, sequence.weights),))
            if (
                sequence.index == 0
                and request.needs_prompt_logprobs
                and not sequence.prompt_logprobs.delivered
                and not sequence.needs_prompt_logprobs
            ):
                sequence.prompt_logprobs.delivered = True
                scores = joined(sequence.prompt_logprobs.parts) or Logprobs(
                    width=1, token_ids=b"", values=b"", ranks=b""
                )
                note(extras, row, prompt_logprobs=scores)
                sequence.prompt_logprobs.parts.clear()
        row += 1
    return extras


def collect_prompt_logprobs(inflight: InFlightStep, result: StepResult) -> None:
    """Collect prompt logprobs. Chunks of a recomputed prompt may overlap what has come: each position counts once."""
    for part in result.prompt_logprobs:
        chunk: Chunk = inflight.chunks[part.row]
        sequence, scores = chunk.sequence, part.logprobs
        skip = sequence.prompt_logprobs.positions - chunk.start
        fresh = len(scores.ranks) // 4 - skip
        if sequence.ended or not sequence.needs_prompt_logprobs or fresh <= 0 or skip < 0:
            continue
        wide = skip * scores.width * 4
        sequence.prompt_logprobs.parts.append(
            Logprobs(
                width=scores.width,
                token_ids=scores.token_ids[wide:],
                values=scores.values[wide:],
                ranks=scores.ranks[skip * 4 :],
            )
        )
        sequence.prompt_logprobs.positions += fresh


def deliver(state: SchedulerState, batch: RunningBatch, kept: Flags, rows: Rows) -> None:
    """Split the rows by source. Rows of sequences that had ended are thrown away."""
    if batch.source >= 0:
        if kept is batch.everyone or bool(kept.all()):
            state.outboxes[batch.source].rows.append(rows)
        elif bool(kept.any()):
            state.outboxes[batch.source].rows.append(select(rows, kept))
        return
    for source in np.unique(batch.sources[kept]).tolist():
        state.outboxes[source].rows.append(select(rows, kept & (batch.sources == source)))


def select(rows: Rows, mask: npt.NDArray[np.bool_]) -> Rows:
    """The masked rows with their tokens and extras."""
    place = np.cumsum(mask) - 1
    extras = {int(place[row]): extra for row, extra in rows.extras.items() if mask[row]}
    return Rows(
        rows.ids[mask],
        rows.numbers[mask],
        rows.counts[mask],
        rows.finish[mask],
        rows.tokens[np.repeat(mask, rows.counts)],
        extras,
    )


def follow(state: SchedulerState, result: StepResult) -> None:
    """Advance the guides of the oldest step in flight by its tokens; the sequences that end are noted for `apply`."""
    if result.epoch != state.epoch:
        return
    inflight = state.steps.in_flight[0]
    assert inflight.step == result.step, "results come in the order of the plans"
    state.steps.followed, state.steps.stopped = inflight.step, {}
    long = state.steps.long_mask = LONG_MASK * result.busy
    if inflight.awaited_drafts:
        fill_awaited_drafts(inflight, result)
    if not inflight.guided:
        return
    state.spec.jump_forward.meet(len(inflight.batch.slots), state.spec.cost)
    entries: list[int] = np.frombuffer(result.token_ids, np.int32).tolist()
    for guided in inflight.guided if len(inflight.guided) < MANY else follow_plain(state, inflight, entries):
        sequence, entry = guided.sequence, guided.entry
        if sequence.ended:
            continue
        if guided.drafts or not goes_on(sequence, entries[entry]):
            came = entries[entry : entry + len(guided.drafts) + 1]
            if guided.drafts:
                came = [token for token in came if token != REJECTED]
            found = check_stop(sequence, len(sequence.tokens), came)
            if found is not None:
                state.steps.stopped[guided.row] = found
                continue
        guide = sequence.guide
        assert guide is not None
        if guide.seconds > long and guide.ready:
            guide.seconds *= FORGETTING
        if sequence.drafter is not None:
            update_jump_forward(sequence.drafter, guide, state.spec.jump_forward, len(sequence.tokens) + 1)
            if sequence.slot >= 0:
                state.slots.drafters.note(sequence)


def follow_plain(state: SchedulerState, inflight: InFlightStep, entries: list[int]) -> list[GuidedRow]:
    """Advance guides that go on for certain, where no draft is to be found either: there is nothing else to do for
    their rows. Returns the other guided rows."""
    slots, batch, jump_forward = state.slots, inflight.batch, state.spec.jump_forward
    rows, places = batch.guided_rows, batch.guided_rows.places
    aside = slots.drafters.gain[places] >= jump_forward.least
    if inflight.drafts is not None:
        aside |= np.array([bool(guided.drafts) for guided in inflight.guided])
    if batch.departures != slots.departures:
        aside |= slots.life[places] != batch.lives[batch.guided]
    if inflight.last:
        aside |= slots.num_tokens[places] + 1 >= slots.limit[places]
    if (probed := jump_forward.refuse(len(places) - int(np.count_nonzero(aside)))) >= 0:
        aside[(~aside).nonzero()[0][probed]] = True
    taken = entries if len(entries) == len(places) else [entries[guided.entry] for guided in inflight.guided]
    most = min(state.options.depth, state.options.ahead) - 1  # forced tokens that steps in flight bring anyway
    others = go_on(rows.guides, taken, aside.tolist(), state.stop_tokens.ids, most, state.steps.long_mask)
    return [inflight.guided[place] for place in others]


def goes_on(sequence: Sequence, token: int) -> bool:
    """Whether a guided sequence goes on with this token for certain: then its guide has taken it."""
    request, guide = sequence.request, sequence.guide
    if token < 0 or token in request.stop_token_ids or len(sequence.tokens) + 1 >= sequence.limit:
        return False
    return guide is not None and guide.step(token)


def check_stop_rows(
    inflight: InFlightStep, rows: list[int], tokens: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
) -> dict[int, SequenceEnd]:
    """Which of these rows' sequences end with the tokens that were appended to them, and how.

    tokens: of all rows. counts: how many of them are each row's. # [tokens], [rows]
    """
    ended_rows: dict[int, SequenceEnd] = {}
    values: list[int] = tokens.tolist()
    ends: list[int] = np.cumsum(counts).tolist()
    sizes: list[int] = counts.tolist()
    for row in rows:
        sequence, size = inflight.batch.sequences[row], sizes[row]
        found = check_stop(sequence, len(sequence.tokens) - size, values[ends[row] - size : ends[row]])
        if found is not None:
            ended_rows[row] = found
    return ended_rows


def check_stop(sequence: Sequence, before: int, tokens: list[int]) -> SequenceEnd | None:
    """How the sequence, which had `before` tokens, ends with one of these; None if it goes on. Its guide takes them
    until then. It goes token by token, so that it makes no difference how many came at once."""
    request, guide = sequence.request, sequence.guide
    for count, token in enumerate(tokens, 1):
        if token == NON_FINITE:
            return SequenceEnd(sequence, count - 1, Finish.ERROR, error=NOT_FINITE)
        if guide is not None and guide.failed:  # whatever was said under its last mask
            return SequenceEnd(sequence, count - 1, Finish.GRAMMAR, error=guide.failure)
        finish = finish_reason(sequence, token, before + count)
        if finish not in (Finish.NONE, Finish.PREFILLED):
            named = finish == Finish.STOP and token in request.message.sampling.stop_token_ids
            if guide is not None and finish == Finish.STOP and not (named or guide.may_end()):
                return SequenceEnd(sequence, count - 1, Finish.GRAMMAR, error=BROKEN_OFF)
            return SequenceEnd(sequence, count, finish, token if named else None)
        if guide is not None:
            try:
                guide.advance([token])
            except GrammarFailure as error:  # guard: design 7, one request's automaton
                return SequenceEnd(sequence, count - 1, Finish.GRAMMAR, error=error.message)
            except EngineFailure as error:  # guard: the same
                return SequenceEnd(sequence, count - 1, Finish.ERROR, error=error.message)
            if guide.ended or (guide.finished and not can_end(request, before + count)):
                return SequenceEnd(sequence, count, Finish.STOP)
        if finish:
            return SequenceEnd(sequence, count, finish)
    return None


def can_end(request: Request, length: int) -> bool:
    """Whether an end-of-sequence token can end a sequence of `length` tokens whose structure is complete: some requests
    ignore it, and min_tokens may mask it."""
    sampling = request.message.sampling
    early = length - request.prompt_tokens < sampling.min_tokens
    return not early and not request.stop_token_ids.isdisjoint(sampling.eos_token_ids)


def take_vectors(state: SchedulerState, inflight: InFlightStep, result: StepResult) -> None:
    """End the sequences whose vectors have come and hand the rows to their sources. A sequence preempted since then has
    its vector all the same; one that is not finite fails alone."""
    ended: dict[int, list[tuple[int, int, Finish, TokenExtra]]] = {}  # by source
    for part in result.vectors:
        chunk = inflight.chunks[part.row]
        assert chunk.pool, "a vector of a chunk that ends no prompt"
        sequence, request = chunk.sequence, chunk.sequence.request
        if sequence.ended:
            continue
        if np.isfinite(np.frombuffer(part.values, np.float32)).all():
            extra = TokenExtra(
                row=0, cached_tokens=request.cached, vector=part.values, weights=((0, state.steps.weights),)
            )
            finish = Finish.STOP
        else:
            finish, extra = Finish.ERROR, TokenExtra(row=0, error=NOT_FINITE)
        ended.setdefault(request.source, []).append((request.message.id, sequence.index, finish, extra))
        end(state, sequence, finish)
    for source, found in ended.items():
        state.outboxes[source].put_vectors(end_rows(found))
