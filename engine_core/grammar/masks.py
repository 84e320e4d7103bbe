"""Bitmasks of one step: a bit per token for each entry of the constrained rows, and the slot of each mask.

Executors keep masks in numbered slots, which are assigned here, so a mask that was sent before costs its number alone.
A slot is given to a new mask only when no step in flight may still read the old one.

`fill` may run in a thread. It holds no lock: the caller runs one at a time and leaves the guides alone meanwhile.
Beside it `make` may run, with other guides. What it makes has no slot until `keep`, and leaves with the next step's.
Masks that are few and quickly made are worth no thread: handing them over takes longer (`soon`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from penstock.engine_core.grammar.guide import Guide, first_line
from penstock.engine_core.grammar.states import State
from penstock.engine_core.grammar.tokens import GrammarTokens

Masks32 = npt.NDArray[np.int32]  # [rows, words]
ABSENT = -1  # a mask is in no slot
SOON = 0.0002  # seconds that masks may take which are made without a thread: what it costs to hand them to one
Job = tuple[Guide, int, list[int]]  # a guide, its first entry, and the drafts after each of which a mask is wanted
Executors = Sequence[LLExecutor]  # for one family, and for several; none: all on this thread


class MaskRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One constrained row of a step: it has an entry after its last token and one after each draft."""

    guide: Guide
    drafts: list[int]
    entry: int  # index of its first entry among the step's


class Waiting(NamedTuple):
    """A row some of whose masks are in no slot."""

    row: MaskRow
    start: int  # of its entries among the step's
    route: list[State | None]  # its entries' states


class FilledMasks(msgspec.Struct, frozen=True):
    """The columns of `StepMasks`."""

    entries: bytes  # int32 [entries]
    slots: bytes  # int32 [entries]
    new_slots: bytes  # int32 [new masks]
    bits: bytes  # uint32 [new masks, words]
    late: tuple[Guide, ...] = ()  # whose masks were in no slot
    made: int = 0  # masks, for those


class Stored:
    """A mask in a slot of `store`, which is None once another has the slot."""

    __slots__ = ("digest", "slot", "store", "text")

    def __init__(self, store: object, slot: int, digest: int, text: bytes) -> None:
        self.store: object | None = store
        self.slot = slot
        self.digest = digest
        self.text = text  # empty once another has the slot

    def remove(self) -> None:
        self.store, self.text = None, b""


class MaskStore:
    """Assigns the executors' mask slots. `slots`: at least twice the masks of any one step."""

    def __init__(self, tokens: GrammarTokens, slots: int, threads: int) -> None:
        assert slots >= 2
        self.most = slots // 2  # entries of constrained rows that one step may have
        self._ends = bits_of(tokens, tokens.eos)
        self._others = bits_of(tokens, set(range(tokens.width)) - tokens.eos)
        self._executors = LLExecutor(1), LLExecutor(threads)
        self._beside = LLExecutor(threads)
        self._words = tokens.words
        self._mark = object()  # of what is stored here: a store itself would live as long as any state
        self._stored: list[Stored | None] = [None] * slots
        self._last = np.zeros(slots, np.int64)  # last step that reads each slot
        self._free = list(range(slots - 1, -1, -1))
        self._known: dict[int, Stored] = {}  # by digest
        self._factors = np.random.default_rng(tokens.words).integers(1, 1 << 63, tokens.words, np.uint64) * 2 + 1
        self._filled = bytearray()  # a step's masks one behind the other, compared in place
        self._unsent: list[Stored] = []  # that no step has brought to the executors

    def fill(
        self, step: int, applied: int, rows: Sequence[MaskRow], clock: Callable[[], float] | None = None
    ) -> FilledMasks:
        """Masks of a step whose rows' guides have taken all tokens before it; steps up to `applied` are over.

        With a `clock`, in seconds, rows are filled one after the other and each guide pays for its own time: for the
        steps after a slow one, to find the guide that made it slow.

        A row whose automaton fails goes on by any token but an end, and its guide raises when it takes that one.
        """
        slots, waiting = self._look(rows)
        return self._fill_waiting(step, applied, rows, slots, waiting, clock)

    def soon(self, step: int, applied: int, rows: Sequence[MaskRow]) -> FilledMasks | None:
        """The same, if all masks are in slots but for a few that will be there soon; else None, and nothing is done."""
        slots, waiting = self._look(rows)
        if waiting and sum([each.row.guide.pace * len(each.route) for each in waiting]) > SOON:
            return None
        return self._fill_waiting(step, applied, rows, slots, waiting, None, alone=True)

    def _look(self, rows: Sequence[MaskRow]) -> tuple[list[int], list[Waiting]]:
        """The slots of all entries, ABSENT where a mask is in none, and the rows that this is so for."""
        slots: list[int] = []
        waiting: list[Waiting] = []
        for row in rows:
            guide = row.guide
            if not row.drafts and (state := guide.state) is not None:
                stored: Stored | None = state.place
                state.used = True
                if stored is not None and stored.store is self._mark:
                    slots.append(stored.slot)
                    continue
            route = guide.route(row.drafts)
            places = [ABSENT if each is None else self._slot(each) for each in route]
            if ABSENT in places:
                waiting.append(Waiting(row, len(slots), route))
            slots += places
        return slots, waiting

    def _fill_waiting(
        self,
        step: int,
        applied: int,
        rows: Sequence[MaskRow],
        slots: list[int],
        waiting: list[Waiting],
        clock: Callable[[], float] | None,
        *,
        alone: bool = False,
    ) -> FilledMasks:
        """Make what is waited for. `alone`: on this thread."""
        late, made = tuple([each.row.guide for each in waiting]), 0
        new: list[Stored] = []
        while waiting:  # a second time where the row failed that was in the same state
            met: set[State] = set()
            later: list[Waiting] = []
            now: list[Waiting] = []
            for each in waiting:
                alike = each.route[0] if len(each.route) == 1 and clock is None else None
                (later if alike in met else now).append(each)
                if alike is not None:
                    met.add(alike)
            self._last[[slot for slot in slots if slot != ABSENT]] = step
            count = self._fill([each.row for each in now], clock, () if alone else self._executors)
            made += count
            found = self._assign(self._filled, count, step, applied, new)
            for each in now:
                for entry, (state, stored) in enumerate(zip(each.route, found, strict=False), each.start):
                    slots[entry] = stored.slot
                    if state is not None and not each.row.guide.failed:
                        state.place = stored
                del found[: len(each.route)]
            waiting = [each for each in later if each.route[0] is not None and self._slot(each.route[0]) == ABSENT]
            for each in later:
                slots[each.start] = ABSENT if each.route[0] is None else self._slot(each.route[0])
        entries, places, new_slots, bits = self._columns(step, rows, slots, new)
        return FilledMasks(entries, places, new_slots, bits, late, made)

    def make(self, guide: Guide, clock: Callable[[], float] | None = None) -> bytearray:
        """The mask behind all that a guide has taken. # uint32 [words]"""
        filled = bytearray(self._words * 4)
        masks = np.frombuffer(filled, np.int32).reshape(1, self._words)
        self._fill_entries([MaskRow(guide, [], 0)], masks, clock, (self._beside,))
        return filled

    def keep(self, spot: State, filled: bytearray, applied: int) -> None:
        """Store what was made, in this state; not if each slot has a mask that steps in flight may read."""
        if self._free or self._last.min() <= applied:
            (spot.place,) = self._assign(filled, 1, applied, applied, self._unsent)

    def _slot(self, state: State) -> int:
        """Where the mask of a state is, if anywhere."""
        stored: Stored | None = state.place
        return stored.slot if stored is not None and stored.store is self._mark else ABSENT

    def _columns(
        self, step: int, rows: Sequence[MaskRow], slots: list[int], new: list[Stored]
    ) -> tuple[bytes, bytes, bytes, bytes]:
        if len(slots) == len(rows):
            entries = np.array([row.entry for row in rows], np.int32)
        else:
            ranges = [range(row.entry, row.entry + len(row.drafts) + 1) for row in rows]
            entries = np.fromiter(chain.from_iterable(ranges), np.int32, len(slots))
        places = np.array(slots, np.int32)
        self._last[places] = step
        new = [stored for stored in self._unsent if stored.store is not None] + new
        self._unsent = []
        new_slots = np.array([mask.slot for mask in new], np.int32)
        return entries.tobytes(), places.tobytes(), new_slots.tobytes(), b"".join([mask.text for mask in new])

    def _fill(self, rows: Sequence[MaskRow], clock: Callable[[], float] | None, executors: Executors) -> int:
        """Fill the bits of each entry; how many there are."""
        count = sum([len(row.drafts) + 1 for row in rows])
        assert count <= self.most, "two steps' masks fit the store"
        if len(self._filled) < count * self._words * 4:
            self._filled = bytearray(count * self._words * 4)
        masks = np.frombuffer(self._filled, np.int32, count * self._words).reshape(count, self._words)
        self._fill_entries(rows, masks, clock, executors)
        return count

    def _fill_entries(
        self,
        rows: Sequence[MaskRow],
        masks: Masks32,
        clock: Callable[[], float] | None,
        executors: Executors,
    ) -> None:
        """Fill the entries of rows, one behind the other."""
        jobs: list[Job] = []
        start = 0
        for row in rows:
            guide, drafts = row.guide, row.drafts
            end = start + len(drafts) + 1
            if guide.bound and not (drafts or guide.ended or guide.failed):
                jobs.append((guide, start, drafts))
                start = end
                continue
            if drafts or not guide.bound:
                # Before a structure begins the output cannot end. After a draft that cannot be, anything will do.
                masks[start:end] = self._others
            if guide.ended:
                masks[start:end] = self._ends
            elif guide.failed:
                masks[start:end] = self._others
            elif start + (free := guide.free_before(drafts)) < end:
                jobs.append((guide, start + free, guide.before_end(drafts[free:]) if drafts else drafts))
            start = end
        if clock is None:
            self._run(jobs, masks, executors)
            return
        for job in jobs:
            began = clock()
            self._run([job], masks, executors)
            job[0].spend(clock() - began, len(job[2]) + 1)

    def _run(self, jobs: Sequence[Job], masks: Masks32, executors: Executors) -> None:
        """Fill each job's entries, from its first one on; all at once unless one of them fails."""
        if not jobs:
            return
        try:
            call(jobs, masks, executors)
        except Exception as error:  # guard: design 7, one request's automaton; the library names no narrower class
            if len(jobs) == 1:
                jobs[0][0].fail(first_line(str(error)))
            else:
                for job in jobs:
                    self._run([job], masks, executors)
                return
        for guide, entry, drafts in jobs:
            if guide.matcher.is_error():
                guide.fail(first_line(guide.matcher.get_error()))
            elif guide.unique is not None:
                guide.unique.restrict(masks[entry : entry + len(drafts) + 1], drafts)
                if not masks[entry].any():
                    guide.fail("nothing can follow but a repeated item of an array whose items are unique")
            if guide.failed:
                masks[entry : entry + len(drafts) + 1] = self._others

    def _assign(self, filled: bytearray, count: int, step: int, applied: int, new: list[Stored]) -> list[Stored]:
        """Where each mask of a buffer is; those that no slot held are added to `new`."""
        masks = np.frombuffer(filled, np.int32, count * self._words).reshape(count, self._words)
        words = masks.view(np.uint32) if masks.shape[1] % 2 else masks.view(np.uint64)
        digests = np.einsum("rw,w->r", words, self._factors[: words.shape[1]]).tolist()  # multilinear, modulo 2**64
        known, size = self._known, self._words * 4
        found: list[Stored] = []
        for row, digest in enumerate(digests):
            mask = known.get(digest)
            while mask is not None and not filled.startswith(mask.text, row * size):
                digest += 1  # another mask has this digest
                mask = known.get(digest)
            if mask is None:
                slot = self._take(applied)
                mask = known[digest] = self._stored[slot] = Stored(self._mark, slot, digest, masks[row].tobytes())
                new.append(mask)
            self._last[mask.slot] = max(step, int(self._last[mask.slot]))
            found.append(mask)
        return found

    def _take(self, applied: int) -> int:
        """A slot that no step in flight reads: one that was never used, or the least recently used."""
        if self._free:
            return self._free.pop()
        slot = int(self._last.argmin())
        assert self._last[slot] <= applied, "the store holds the masks of two steps"
        old = self._stored[slot]
        assert old is not None, "it is not free"
        del self._known[old.digest]
        old.remove()
        return slot

    def close(self) -> None:
        """The executors' slots are gone: states that outlive them hold no masks."""
        for stored in filter(None, self._stored):
            stored.remove()


def call(jobs: Sequence[Job], masks: Masks32, executors: Executors) -> None:
    """Threads that fill rows of one family wait for one another, so a family's rows are kept together."""
    families: dict[int, list[Job]] = {}
    for job in jobs:
        families.setdefault(id(job[0].family), []).append(job)
    executor = executors[min(len(families), len(executors)) - 1] if executors else None
    together = list(chain.from_iterable(families.values()))
    plain = [(guide.matcher, entry) for guide, entry, drafts in together if not drafts]
    drafted = [(guide.matcher, entry, drafts) for guide, entry, drafts in together if drafts]
    if drafted:
        fill_backwards(executor, drafted, masks)
    fill_plain(executor, plain, masks)


def fill_plain(executor: LLExecutor | None, rows: list[tuple[LLMatcher, int]], masks: Masks32) -> None:
    if executor is not None and rows:
        fill_next_token_bitmask_par(executor, rows, masks)
        return
    for matcher, entry in rows:
        fill_next_token_bitmask(matcher, masks, entry)


def fill_backwards(
    executor: LLExecutor | None, drafted: Sequence[tuple[LLMatcher, int, list[int]]], masks: Masks32
) -> None:
    """Fill the entries of rows with drafts: from the one behind the last draft that may come back to the first.

    The library keeps the mask that it made last, and takes it for that of a later state with as many rows of items and
    the same state of the lexer, even if it has been rolled back since and other tokens have come. So what was made last
    must be of a state that the output comes through: the first one, or, where a token is forced there, of which no mask
    is kept, the one behind that token.
    """
    ahead = [matcher.try_consume_tokens(drafts) for matcher, _, drafts in drafted]  # tokens of each, now
    try:
        for place in range(max(ahead), -1, -1):
            here = [row for row, count in enumerate(ahead) if count == place]
            fill_plain(executor, [(drafted[row][0], drafted[row][1] + place) for row in here], masks)
            for row in here if place else ():
                drafted[row][0].rollback(1)
                ahead[row] -= 1
    finally:
        for (matcher, _, _), count in zip(drafted, ahead, strict=True):
            if count and not matcher.is_error():
                matcher.rollback(count)


def bits_of(tokens: GrammarTokens, allowed: Iterable[int]) -> Masks32:
    """The mask that allows these tokens alone. # [words]"""
    bits = np.zeros(tokens.words * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
