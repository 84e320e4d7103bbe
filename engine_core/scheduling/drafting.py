"""Drafts: which rows carry some in the next step, and how those of the last steps fared.

Drafts come from the host (prompt lookup, predictions, jump-forward under a grammar) or from the executors' draft model.
A plan requests device drafts behind its step; later plans have them verified. They yield to everything else: they are
requested last, with blocks that nothing else needs, and a step without room for them leaves them in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.scheduling.late_masks import Ready
from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.engine_core.scheduling.outbox import note
from penstock.engine_core.scheduling.request import Request, Sequence
from penstock.engine_core.scheduling.running_batch import Ints, RunningBatch
from penstock.engine_core.scheduling.state import (
    AwaitedDrafts,
    Chunk,
    DraftingWork,
    Drafts,
    InFlightStep,
    SchedulerState,
)
from penstock.engine_core.speculation.acceptance import Acceptance
from penstock.engine_core.speculation.drafter import Draft, Drafter, Prediction, Proposer
from penstock.engine_core.speculation.jump_forward import JumpForward
from penstock.engine_core.speculation.ngram import PromptLookup
from penstock.engine_core.speculation.step_cost import draft_lengths
from penstock.protocol.errors import EngineFailure, GrammarFailure
from penstock.protocol.outputs import TokenExtra
from penstock.protocol.steps import OWN_DRAFT, StepResult

Counts = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
# Of the scheduler for a step with drafts beside one without, and for each of its rows: on a CPU 60 to 190 us at 64
# rows, on an H200's host two to three times as much.
HOST_SECONDS, HOST_ROW_SECONDS = 1e-4, 1.5e-6
LEAST_CATCH_UP = 2  # positions: what every row lacks whose drafts all came true


def equip(state: SchedulerState, sequence: Sequence) -> None:
    """Give a new sequence its guide, and a drafter if it may have drafts."""
    request, options = sequence.request, state.options.speculation
    if request.guide is not None:
        sequence.guide = request.guide if request.message.n == 1 else request.guide.copy()
        if request.message.speculate and not options.own_drafts:  # a draft model predicts whitespace itself
            sequence.guide.learn(state.spec.habits)
        catch_up(sequence.guide, sequence.tokens[request.prompt_tokens :].tolist())
    found = proposers(request, options) if request.message.speculate else ()
    if sequence.guide is not None or found:
        ending = request.stop_token_ids | {state.options.image_token}  # no output goes on with an image
        sequence.drafter = Drafter(found, ending, Acceptance(state.spec.acceptance))
    if sequence.guide is not None and sequence.drafter is not None:
        state.spec.jump_forward.meet(min(len(state.requests) + 1, state.slots.count), state.spec.cost)
        update_jump_forward(sequence.drafter, sequence.guide, state.spec.jump_forward, len(sequence.tokens))


def catch_up(guide: Guide, written: list[int]) -> None:
    """Advance a guide by what its sequence has written already. If that fails, the sequence will end."""
    try:
        guide.advance(written)
    except (GrammarFailure, EngineFailure) as error:  # guard: design 7, one request's automaton
        guide.fail(error.message)


def proposers(request: Request, options: SpeculationOptions) -> tuple[Proposer, ...]:
    """For one sequence, in order of preference."""
    found: list[Proposer] = []
    if request.message.prediction:
        found.append(Prediction(request.message.prediction, request.prompt_tokens))
    if options.method == "ngram":
        found.append(PromptLookup(request.limit, options.prompt_lookup_min, options.prompt_lookup_max))
    return tuple(found)


def draft_rows(state: SchedulerState, batch: RunningBatch, budget: int, ready: Ready) -> Drafts | None:
    """Drafts for the rows of the batch, at most `budget` tokens in all. No row is drafted past its limit, and none of
    `ready` past its masks."""
    slots, options = state.slots, state.options.speculation
    if not slots.drafters.drafting:
        return None
    found: list[tuple[int, Drafter, Draft]] = []
    asked = np.isinf(slots.drafters.gain[batch.slots]).nonzero()[0].tolist()
    for row in asked:
        sequence = batch.sequences[row]
        drafter, slot = sequence.drafter, sequence.slot
        assert drafter is not None
        room = int(slots.limit[slot] - slots.num_computed_tokens[slot]) - 2  # the step's own token is one of those
        if room <= 0:
            continue
        drafter.in_flight = drafts_in_flight(state, sequence)
        most = min(room, options.max_row_drafts)
        draft = drafter.draft(sequence.tokens, options.num_speculative_tokens, most)
        if draft is not None and (guide := ready.get(sequence)) is not None:
            count = guide.covered(draft.tokens)
            draft = Draft(draft.tokens[:count], draft.chances[:count]) if count else None
        if draft is not None:
            found.append((row, drafter, draft))
    lengths = sent_lengths(state, batch, budget, [draft.chances for _, _, draft in found]) if found else []
    for (_, drafter, _), length in zip(found, lengths, strict=True):
        drafter.sent(length)
    for row in asked:
        slots.drafters.note(batch.sequences[row])
    sent = [(row, draft.tokens[:length]) for (row, _, draft), length in zip(found, lengths, strict=True) if length]
    if not sent:
        return None
    return Drafts(
        np.array([row for row, _ in sent]),
        np.array([len(ids) for _, ids in sent]),
        [ids for _, ids in sent],
        np.zeros(len(sent), np.bool_),
    )


def sent_lengths(state: SchedulerState, batch: RunningBatch, budget: int, chances: list[list[float]]) -> list[int]:
    """How many tokens of each draft are worth their place in a step of this batch."""
    most = max(0, min(budget, state.options.speculation.max_step_drafts))
    rows = len(batch.slots)
    return draft_lengths(rows, chances, state.spec.cost, most, HOST_SECONDS + HOST_ROW_SECONDS * rows)


def drafts_in_flight(state: SchedulerState, sequence: Sequence) -> list[SequenceOf[int]]:
    """The drafts that a sequence has in each step in flight that samples for it."""
    steps = state.steps.in_flight
    return [step.carried.get(step.batch.rows[sequence], ()) for step in steps if sequence in step.batch.rows]


def roll_back_rejected(
    state: SchedulerState, inflight: InFlightStep, drafts: Drafts, counts: Counts, kept: Ints
) -> None:
    """Rejected positions were never taken: correct what the plan had to suppose. # counts: entries that count, [rows]

    `kept` are the rows whose sequence is still where the step met it.
    """
    slots = state.slots
    surplus = drafts.sizes(len(counts)) - counts
    rows = kept[surplus[kept] > 0]
    places = inflight.batch.slots[rows]
    slots.num_computed_tokens[places] -= surplus[rows]
    again = places[~slots.ready[places] & (slots.num_computed_tokens[places] + 1 < slots.limit[places])]
    for slot in again.tolist():
        slots.set_ready(slot, True)  # the limit was nearer than it had to be


def count_drafts(
    state: SchedulerState,
    inflight: InFlightStep,
    drafts: Drafts,
    kept: Flags,
    taken: Counts,
    given: Counts,
    extras: dict[int, TokenExtra],
) -> None:
    """Count accepted and rejected drafts of sequences that had not ended before, and note them where a stop string may
    end the sequence elsewhere. # [rows]: whether the sequence was alive, its tokens that were not rejected, and those
    of them that count"""
    totals = state.stats.totals
    for row, drafted in zip(drafts.rows.tolist(), drafts.counts.tolist(), strict=True):
        if not kept[row]:
            continue
        sequence = inflight.batch.sequences[row]
        accepted = min(int(taken[row]) - 1, int(given[row]))  # the last token that was not rejected is no draft
        before = sequence.drafted or (0, 0)
        sequence.drafted = before[0] + accepted, before[1] + drafted - accepted
        if sequence.request.message.stop_strings:
            note(extras, row, drafted=sequence.drafted)
        totals.count_drafts(drafted, accepted)


def finish_drafts(state: SchedulerState, inflight: InFlightStep, result: StepResult) -> None:
    """The step's result is being applied: record how long it took, and the drafting behind the step before."""
    if not inflight.chunks and result.busy > 0.0:
        rows = len(inflight.batch.slots)
        state.spec.cost.observe(rows, rows + (0 if inflight.drafts is None else inflight.drafts.total), result.busy)
    before = inflight.drafting_before
    if before is not None and before.turns and result.drafting > 0.0:
        state.spec.device_drafts.cost.observe(before.rows, before.turns, result.drafting)


def with_device_drafts(
    state: SchedulerState, batch: RunningBatch, drafts: Drafts | None, budget: int, ready: Ready
) -> Drafts | None:
    """The step's drafts together with at most `budget` device drafts of other rows, none of `ready` past its masks."""
    device_drafts, slots = state.spec.device_drafts, batch.slots
    room = (state.slots.limit - state.slots.num_computed_tokens)[slots] - 2
    counts = np.minimum(device_drafts.available[slots], room)
    for row, sequence in enumerate(batch.sequences if ready else ()):
        if (guide := ready.get(sequence)) is not None:
            counts[row] = min(counts[row], guide.covered(sequence.device_drafts or []))
    if drafts is not None:
        counts[drafts.rows] = 0  # jump-forward and predictions are more certain
    counts = np.maximum(counts, 0)
    counts -= np.clip(np.cumsum(counts) - max(0, budget), 0, counts)
    rows = counts.nonzero()[0]
    if not len(rows):
        return drafts
    pairs = zip(rows.tolist(), counts[rows].tolist(), strict=True)
    ids = [carried(batch.sequences[row].device_drafts, count) for row, count in pairs]
    own = np.ones(len(rows), np.bool_)
    if drafts is None:
        return Drafts(rows, counts[rows], ids, own)
    every = np.concatenate((drafts.rows, rows))
    order = np.argsort(every)
    both = drafts.ids + ids
    return Drafts(
        every[order],
        np.concatenate((drafts.counts, counts[rows]))[order],
        [both[place] for place in order.tolist()],
        np.concatenate((np.zeros(len(drafts.rows), np.bool_), own))[order],
    )


def carried(told: list[int] | None, count: int) -> list[int]:
    """The ids of a row's device drafts. A list of awaited ids is filled when they come."""
    if told is None:
        return [OWN_DRAFT] * count
    del told[count:]
    return told


def no_slots() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class RequestedDrafts:
    """What a plan asks to be drafted behind its step."""

    columns: bytes = b""  # of `StepPlan.drafting`
    told: tuple[AwaitedDrafts, ...] = ()
    short: Ints = field(default_factory=no_slots)  # slots, each as often as it needs a new block for its drafts


NO_DRAFTS_REQUESTED = RequestedDrafts()


def request_drafts(
    state: SchedulerState,
    batch: RunningBatch,
    drafts: Drafts | None,
    carried: Mapping[int, list[int]],
    chunks: list[Chunk],
) -> RequestedDrafts:
    """Close the accounts of the step's own drafts and ask for those of the next one.

    `batch` are the rows that sample, those of chunks last; planned positions count this step already.
    """
    device_drafts, slots = state.spec.device_drafts, batch.slots
    room = (state.slots.limit - state.slots.num_computed_tokens)[slots] - 2
    device_drafts.unseen[slots] += 1
    if drafts is not None:
        carriers = slots[drafts.rows]
        whole = drafts.counts == device_drafts.available[carriers]  # the last draft made was never an input
        seen = drafts.own & (not state.options.speculation.rereads)
        device_drafts.unseen[carriers] += np.where(seen, whole, drafts.counts)
        room[drafts.rows[~drafts.own]] = 0  # their drafts come from elsewhere
    device_drafts.available[slots] = 0
    options = state.options
    most = min(options.speculation.max_step_drafts, options.max_num_batched_tokens - len(slots))
    forget_device_drafts(state, batch, carried, room)
    lengths = device_drafts.choose_lengths(slots, room, most, state.spec.cost, state.steps.planned, stretch(state))
    short = claim_blocks(state, slots, lengths)
    state.spec.drafted = None if chunks else DraftingWork(int(np.count_nonzero(lengths)), int(lengths.max(initial=0)))
    device_drafts.available[slots] = lengths
    told = await_drafts(state, batch, lengths)
    return RequestedDrafts(drafting_columns(state, batch, lengths, chunks), told, short)


def forget_device_drafts(
    state: SchedulerState, batch: RunningBatch, carried: Mapping[int, list[int]], room: Ints
) -> None:
    """Drop the awaited drafts of guided rows, which are used up. A row whose forced tokens reach beyond the steps in
    flight, this one included, needs no new ones."""
    for row in batch.guided.tolist():
        sequence = batch.sequences[row]
        sequence.device_drafts = None
        drafter = sequence.drafter
        if drafter is not None and drafter.forced:
            drafts = [*drafts_in_flight(state, sequence), carried.get(row, ())]
            if len(drafter.forced) > sum([1 + len(each) for each in drafts]):
                room[row] = 0


def await_drafts(state: SchedulerState, batch: RunningBatch, lengths: Ints) -> tuple[AwaitedDrafts, ...]:
    """The ids of guided rows' drafts come with the step's result: masks behind them depend on them."""
    found = []
    for row in batch.guided.tolist():
        if length := int(lengths[row]):
            ids = batch.sequences[row].device_drafts = [OWN_DRAFT] * length
            found.append(AwaitedDrafts(ids, length))
    return tuple(found)


def claim_blocks(state: SchedulerState, slots: Ints, lengths: Ints) -> Ints:
    """Slots, each as often as its drafts need a new block; `lengths` become 0 where the pool has none left."""
    columns, size = state.slots, state.options.block_size
    beyond = (columns.num_computed_tokens + 1)[slots] + lengths - columns.blocks.capacity[slots]
    needs = np.where(lengths > 0, np.maximum(-(-beyond // size), 0), 0)
    if not needs.any():
        return no_slots()
    denied = np.cumsum(needs) * state.kv.layout.groups > state.kv.pool.available
    lengths[denied & (needs > 0)] = 0
    return np.repeat(slots, np.where(denied, 0, needs))


def drafting_columns(state: SchedulerState, batch: RunningBatch, lengths: Ints, chunks: list[Chunk]) -> bytes:
    """The plan's `drafting`: rows that get drafts, and every chunk, so that the draft model keeps up with prompts."""
    device_drafts, slots = state.spec.device_drafts, batch.slots
    sampled = sum([chunk.sample for chunk in chunks])
    decoding = len(slots) - sampled
    rows = lengths[:decoding].nonzero()[0]
    asked = slots[rows]
    told = state.slots.guided[slots] & (lengths > 0)
    parts = []
    if len(rows):
        spare = state.options.max_num_batched_tokens - sum([chunk.count for chunk in chunks])
        most = max(LEAST_CATCH_UP, spare // len(rows))
        lacking = np.minimum(np.minimum(device_drafts.unseen[asked], state.slots.num_tokens[asked] + 1), most)
        parts.append(np.stack((asked, -lacking, lacking, lengths[rows], told[rows]), axis=1))
        device_drafts.unseen[asked] = 0
    row, lines = decoding, []
    for chunk in chunks:
        slot, length, heard = chunk.sequence.slot, 0, False
        if chunk.sample:
            length, heard = int(lengths[row]), bool(told[row])
            device_drafts.unseen[slot] = 0 if length else 1
            row += 1
        lines.append((slot, chunk.start, chunk.count + (length > 0), length, heard))
    if lines:
        parts.append(np.array(lines, np.int64))
    return np.concatenate(parts).astype(np.int32).tobytes() if parts else b""


def fill_awaited_drafts(inflight: InFlightStep, result: StepResult) -> None:
    """Fill in the draft ids that a step's result brings."""
    ids: list[int] = np.frombuffer(result.drafts, np.int32).tolist()
    place = 0
    for told in inflight.awaited_drafts:
        told.ids[:] = ids[place : place + len(told.ids)]
        place += told.count
    assert place == len(ids), "the result has the drafts of every row that awaits them"


def record_acceptance(
    state: SchedulerState, inflight: InFlightStep, drafts: Drafts, kept: Flags, counts: Counts
) -> None:
    """What became of the step's own drafts, of rows whose sequence is still where the step met it.
    # kept, counts (entries that count): [rows]"""
    mine = drafts.own & kept[drafts.rows]
    if mine.any():
        rows = drafts.rows[mine]
        state.spec.device_drafts.observe(
            inflight.batch.slots[rows], drafts.counts[mine], counts[rows].astype(np.int64) - 1
        )


def update_jump_forward(drafter: Drafter, guide: Guide, jump_forward: JumpForward, length: int) -> None:
    """Give a drafter the tokens that its sequence's grammar forces or makes likely behind so many tokens, if it will
    use them. What is forced in a state is found out in any case, once for all sequences that come there."""
    drafter.forced, drafter.likely = [], []
    due = drafter.is_due(length)
    forced = guide.forced() if due or guide.state is not None else []
    if due:
        drafter.forced = forced
        if jump_forward.pays(drafter.acceptance.gain):
            drafter.likely = guide.likely(drafter.forced)


def stretch(state: SchedulerState) -> float:
    """How many times as long as its time on the last stage, which is measured, a step takes until that stage drafts
    behind the next one: 1 where every stage has a micro-batch to run, as many as there are stages for a single one."""
    return state.options.stages / max(1, sum([size > 0 for size in state.slots.sizes]))
