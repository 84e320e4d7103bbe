"""The encoder cache: which image has which rows of it, who holds them, and which image is encoded next.

An image has one run of rows, found by its digest, so equal images share it. A sequence enters a slot when all images
that it needs have rows, or can have some, and holds these until the last step that reads them was applied. Images that
nobody holds stay until their rows are needed: the one that was used longest ago goes first, and as many as it takes for
a run to fit.

The queue asks in order. What was asked for in a pass over it is kept for whoever asked, and nobody behind a sequence
that lacks rows gets any, or holds any longer what it lacks. So the first one gets its rows once nothing is held.

Each image is encoded by one executor of the first stage, the one with the least to do; it has one image at a time, and
ENCODES are sent ahead, those of running sequences first. Rows of an image that is being encoded are its own until the
executor has answered. The first step that reads them has the others receive them (`StepPlan.images`).
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.engine_core.scheduling.request import Sequence
from penstock.protocol.images import EncodeImage, Image

ENCODES = 2  # of an executor: one is encoded, the next is there already, and a link has room for few messages
NOWHERE = -1  # first row of an image that a sequence needs none of
NEVER = 1 << 60  # position of the first image that is not encoded, where all are

Span = tuple[int, int]  # first row, and the one behind the last


class EncoderStatistics(msgspec.Struct, frozen=True):
    """Counters as of now."""

    rows: int
    held: int  # rows that running sequences hold
    filled: int  # rows of images that are encoded
    images: int  # that have rows
    encoding: int
    encoded: int  # totals since start: images encoded,
    failures: int  # that could not be,
    hits: int  # that a sequence found encoded, or being encoded, for another
    evicted: int  # and that went for others


@dataclass(slots=True, eq=False)
class Resident:
    """One image that has rows."""

    digest: bytes
    first: int
    rows: int
    image: Image | None  # until it is sent
    used: int  # the larger the later
    wanted: int  # the last pass over the queue that asked for it
    number: int = 0  # of the message; 0: it is not sent
    rank: int = 0  # that encodes it
    ready: bool = False
    everywhere: bool = False  # all ranks have its rows, or will have before the next step
    holders: int = 0  # images of sequences in slots, and of steps that are not applied
    entered: bool = False  # a sequence has had it

    @property
    def span(self) -> Span:
        return self.first, self.first + self.rows


class EncoderCache:
    """Owner of the rows. `ranks`: of the first stage."""

    def __init__(self, rows: int, ranks: int) -> None:
        self.rows = rows
        self.messages: list[EncodeImage] = []  # to ranks of the first stage, behind the plans so far
        self._ranks = ranks
        self.shares: list[tuple[int, int, int]] = []  # of the plan that is being made: rank, first row, rows
        self._residents: dict[bytes, Resident] = {}
        self._unsent: dict[Resident, None] = {}  # in the order in which they got their rows
        self._encoding: dict[int, Resident] = {}
        self._asked: dict[Sequence, tuple[Image, ...]] = {}  # by sequences that wait: what they need
        self._held: dict[Sequence, deque[tuple[Image, Resident]]] = {}  # by those in slots, ascending by position
        self._fence: dict[int, list[Resident]] = {}  # by the last step that reads them
        self.short = False  # a sequence of this pass lacks rows
        self._pass = self._turn = self._number = 0
        self._encoded = self._failures = self._hits = self._evicted = 0

    def begin_pass(self) -> None:
        """The queue is gone through anew, in order."""
        self._pass += 1
        self.short = False

    def ask(self, sequence: Sequence, images: tuple[Image, ...]) -> bool:
        """Whether the next sequence in order, which needs these images, may enter a slot: all have rows. What is not
        encoded is on its way then."""
        self._asked[sequence] = images
        if self.short:
            return False
        needed = {image.digest: image for image in images}
        missing = [image for digest, image in needed.items() if digest not in self._residents]
        if missing and not self._assign(missing, needed):
            self.short = True
            return False
        for digest in needed:
            self._residents[digest].wanted = self._pass
        self._send()
        return True

    def can_have(self, images: Collection[Image]) -> bool:
        """Whether rows for all of these could be had now, whatever else was asked for."""
        needed = {image.digest: image for image in images}
        missing = [image.rows for digest, image in needed.items() if digest not in self._residents]
        return not missing or self._layout(missing, needed) is not None or not self._busy

    def enter(self, sequence: Sequence) -> None:
        """A sequence for which `ask` said yes has a slot now."""
        held = self._held[sequence] = deque((image, self._residents[image.digest]) for image in self._asked[sequence])
        del self._asked[sequence]
        for _, resident in held:
            resident.holders += 1
            self._hits += resident.entered
            resident.entered = True
            resident.used = self._next_turn()

    def awaited(self, sequence: Sequence) -> int:
        """Position of the first image that the sequence needs and that is not encoded; NEVER: all are."""
        for image, resident in self._held.get(sequence, ()):
            if not resident.ready:
                return image.position
        for image in self._asked.get(sequence, ()):
            found = self._residents.get(image.digest)
            if found is None or not found.ready:
                return image.position
        return NEVER

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence of the queue lacks rows, or an image that is encoded."""
        return self.short or (sequence in self._asked and self.awaited(sequence) < NEVER)

    def table(self, sequence: Sequence, images: Iterable[Image]) -> bytes:
        """`SlotStart.images` of a sequence that has entered its slot, whose prompt holds these images."""
        rows = {image.position: resident.first for image, resident in self._held.get(sequence, ())}
        columns = [
            (image.position, image.length, rows.get(image.position, NOWHERE), image.width, image.height)
            for image in images
        ]
        return np.array(columns, np.int32).tobytes()

    def advance(self, sequence: Sequence, computed: int, step: int) -> None:
        """The sequence's first `computed` positions are computed once `step`, which is being planned, has run."""
        held = self._held.get(sequence, deque())
        for image, resident in held:
            if image.position < computed and not resident.everywhere:
                self.shares.append((resident.rank, resident.first, resident.rows))
                resident.everywhere = True
        while held and held[0][0].position + held[0][0].length <= computed:
            self._fence.setdefault(step, []).append(held.popleft()[1])

    def take_shares(self) -> bytes:
        """`StepPlan.images` of the plan that is being made."""
        shares, self.shares = self.shares, []
        return np.array(shares, np.int32).tobytes()

    def leave(self, sequence: Sequence, step: int, applied: int) -> None:
        """A sequence leaves its slot, or the queue. `step` is the last planned one that touches its slot."""
        self._asked.pop(sequence, None)
        residents = [resident for _, resident in self._held.pop(sequence, ())]
        if step > applied:
            self._fence.setdefault(step, []).extend(residents)
        else:
            self._release(residents)

    def applied(self, step: int) -> None:
        """A step was applied: what it was the last to read can be given away."""
        if self._fence:
            self._release(self._fence.pop(step, ()))

    def encoded(self, number: int, error: str) -> list[Sequence]:
        """An image is encoded, or could not be: then it is forgotten, and the sequences that need it are returned. What
        is said of another epoch is ignored."""
        resident = self._encoding.pop(number, None)
        if resident is None:
            return []
        failed = self._needing({resident.digest}) if error else []
        if error:
            self._failures += 1
            del self._residents[resident.digest]
        else:
            self._encoded += 1
            resident.ready, resident.everywhere = True, self._ranks == 1
        self._send()
        return failed

    def in_flight_sequences(self) -> list[Sequence]:
        """Sequences that need an image which executors are encoding."""
        return self._needing({resident.digest for resident in self._encoding.values()})

    def clear(self, rows: int | None = None) -> None:
        """Executors begin anew with empty rows, so many of them if their number changed. No sequence has a slot."""
        assert not self._held
        self.rows = self.rows if rows is None else rows
        for one in (self._residents, self._unsent, self._encoding, self._asked, self._fence, self.messages,
                    self.shares):  # fmt: skip
            one.clear()

    def check(self) -> tuple[str, ...]:
        """What is wrong with the accounts of rows, in words."""
        holding = [resident for held in self._held.values() for _, resident in held]
        counted = Counter(itertools.chain(holding, *self._fence.values()))
        faults = []
        if any(resident.holders != counted[resident] for resident in self._residents.values()):
            faults.append("an image's rows are held by others than it counts")
        spans = sorted(resident.span for resident in self._residents.values())
        if any(begin < end for (_, end), (begin, _) in itertools.pairwise(spans)):
            faults.append("images share rows")
        return tuple(faults)

    def statistics(self) -> EncoderStatistics:
        residents = self._residents.values()
        held = sum(one.rows for one in residents if one.holders)
        filled = sum(one.rows for one in residents if one.ready)
        return EncoderStatistics(
            self.rows, held, filled, len(residents), len(self._encoding), self._encoded, self._failures, self._hits,
            self._evicted,
        )  # fmt: skip

    @property
    def _busy(self) -> bool:
        """Whether rows are held, or may be written."""
        return bool(self._encoding) or any(resident.holders for resident in self._residents.values())

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _needing(self, digests: Collection[bytes]) -> list[Sequence]:
        running = [one for one, held in self._held.items() if any(image.digest in digests for image, _ in held)]
        waiting = [one for one, images in self._asked.items() if any(image.digest in digests for image in images)]
        return running + waiting

    def _release(self, residents: Iterable[Resident]) -> None:
        for resident in residents:
            assert resident.holders > 0
            resident.holders -= 1
            resident.used = self._next_turn()

    def _assign(self, missing: list[Image], needed: dict[bytes, Image]) -> bool:
        """Give rows to images that have none."""
        found = self._layout([image.rows for image in missing], needed)
        if found is None and not self._busy:  # what the sequence has already stands in the way: it is encoded again
            self._evict([one for one in self._residents.values() if one.digest in needed and self._evictable(one)])
            missing = [image for digest, image in needed.items() if digest not in self._residents]
            found = self._layout([image.rows for image in missing], needed)
        if found is None:
            return False
        evicted, firsts = found
        self._evict(evicted)
        for image, first in zip(missing, firsts, strict=True):
            resident = Resident(image.digest, first, image.rows, image, self._next_turn(), self._pass)
            self._residents[image.digest] = resident
            self._unsent[resident] = None
        return True

    def _evict(self, residents: Iterable[Resident]) -> None:
        for resident in residents:
            self._evicted += resident.ready
            del self._residents[resident.digest]
            self._unsent.pop(resident, None)

    def _layout(self, sizes: list[int], kept: Collection[bytes]) -> tuple[list[Resident], list[int]] | None:
        """Where runs of so many rows fit, and which images go for them, none of `kept`; None: they cannot fit now."""
        spare = sorted(
            (one for one in self._residents.values() if self._evictable(one) and one.digest not in kept),
            key=lambda one: one.used,
        )
        staying = self._residents.keys() - {one.digest for one in spare}
        spans = sorted(self._residents[digest].span for digest in staying)
        without = [first_fit(spans, size, self.rows) for size in sizes]
        if None in without:
            return None
        spans = sorted(one.span for one in self._residents.values())
        evicted, firsts = 0, []
        for size in sizes:
            while (first := first_fit(spans, size, self.rows, take=False)) is None and evicted < len(spare):
                spans.remove(spare[evicted].span)
                evicted += 1
            if first is None:  # runs of this call split what is left: all go
                return spare, [found for found in without if found is not None]
            insort(spans, (first, first + size))
            firsts.append(first)
        return spare[:evicted], firsts

    def _evictable(self, resident: Resident) -> bool:
        """Whether nobody needs it: nobody holds it or has asked for it in this pass, and nothing is written to it."""
        settled = resident.ready or not resident.number
        return settled and not resident.holders and resident.wanted != self._pass

    def _send(self) -> None:
        """Have executors encode what is needed next."""
        while (rank := self._idlest()) is not None:
            resident = next((one for one in self._unsent if one.holders), None)
            resident = resident or next((one for one in self._unsent if one.wanted == self._pass), None)
            if resident is None:
                return
            del self._unsent[resident]
            image, resident.image = resident.image, None
            assert image is not None
            self._number += 1
            resident.number, resident.rank = self._number, rank
            self._encoding[self._number] = resident
            self.messages.append(
                EncodeImage(
                    number=self._number,
                    rank=rank,
                    first_row=resident.first,
                    rows=image.rows,
                    width=image.width,
                    height=image.height,
                    pixels=image.pixels,
                )
            )

    def _idlest(self) -> int | None:
        """The rank with the fewest rows to make, of those that may be asked for more; None: none may."""
        asked: list[list[int]] = [[] for _ in range(self._ranks)]
        for resident in self._encoding.values():
            asked[resident.rank].append(resident.rows)
        free = [rank for rank, rows in enumerate(asked) if len(rows) < ENCODES]
        return min(free, key=lambda rank: sum(asked[rank]), default=None)


def first_fit(spans: list[Span], size: int, rows: int, *, take: bool = True) -> int | None:
    """The first of `rows` rows that begins a run of `size` rows outside of these spans, which are ascending. With
    `take` the run is one of them from then on."""
    first = 0
    for begin, end in spans:
        if begin - first >= size:
            break
        first = end
    if first + size > rows:
        return None
    if take:
        insort(spans, (first, first + size))
    return first
