"""A fake executor that takes protocol/steps.py at its word and fails at the first thing that is not as it should be.

Every KV cell holds the hash of the whole prefix it was computed from. Before a row is computed, every cell that it
would attend to is compared with the hash of the slot's own tokens: a wrong block table, a block reused too early, a
stale prefix hit and a wrong start position all show at once.

Where the model has recurrent layers, a slot's state is the hash of the prefix that it has gone through, kept as of the
multiples that a real executor keeps. A slot that begins from the state of another prefix, a state kept where none is,
and a place written while a step in flight touches it show as well.

Where the model sees images, each placeholder of a chunk must have a row that holds its part of its image, encoded by
all executors before the plan came and not given away since (images.py). An image whose tokens see one another is never
cut.

A plan's diffs are taken when it arrives; its work waits for the work before it and, if rows of it are masked, for their
masks. Drafts are computed as if they were accepted and judged against what the model says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.engine_core.kv.block_layout import BlockLayout, first_column
from penstock.protocol.messages import Pooling, Sampling
from penstock.protocol.outputs import Logprobs
from penstock.protocol.steps import (
    HOST_PLACES,
    NO_MICROBATCH,
    NO_STATE,
    OWN_DRAFT,
    REJECTED,
    RowLogprobs,
    RowVector,
    SlotStart,
    StepMasks,
    StepPlan,
    StepResult,
)
from tests.sim.adapters import Hosts
from tests.sim.host_tier import HostMemory
from tests.sim.images import Encoders, read_images, rows_of
from tests.sim.lives import World
from tests.sim.model import VOCAB, Nature, cell, cells, choose, logprob
from tests.sim.storage import Storage


@dataclass(slots=True)
class Slot:
    tokens: list[int]
    prompt_tokens: int
    computed: int
    tables: list[list[int]]  # of each KV group
    sampling: Sampling
    seed: int
    nature: Nature
    hashes: list[int] = field(default_factory=list)  # of its own tokens, computed from nothing else
    guesses: list[int] = field(default_factory=list)  # drafts of the executor's own
    guessed: int = -1  # tokens that it had when they were made
    pooling: Pooling | None = None
    pooled: int = 0  # positions that went into its vector
    place: int = 0  # of its adapter
    firsts: dict[int, int] = field(default_factory=dict)  # row of each image, by its position
    began: int = 0  # position of its first row in the last step, or its end where that was a chunk

    @property
    def table(self) -> list[int]:
        """Of the first group, which a draft model shares."""
        return self.tables[0]


@dataclass(frozen=True, slots=True)
class Work:
    """A plan as it stood when it arrived."""

    plan: StepPlan
    decoding: list[tuple[int, Slot, list[int]]]  # slot number, slot, drafts
    chunks: list[tuple[int, Slot]]


@dataclass(frozen=True, slots=True)
class Touched:
    """What a step reads or writes."""

    step: int
    slots: frozenset[int]
    places: frozenset[int]  # of snapshots
    tables: list[tuple[Slot, list[list[int]]]]  # as they were when the plan arrived
    rows: frozenset[int]  # of the encoder cache
    starts: dict[int, int] = field(default_factory=dict)  # by the slot's identity: its first position, once computed

    def blocks(self, layout: BlockLayout) -> set[int]:
        """Behind a window nothing is read. A step that has not run begins where its slots stand, or later."""
        found: set[int] = set()
        for slot, tables in self.tables:
            start = self.starts.get(id(slot), slot.computed)
            for table, window in zip(tables, layout.windows, strict=True):
                found.update(table[first_column(start, window, layout.block_size) :])
        return found


def ints(data: bytes, width: int = 1) -> list[list[int]]:
    return np.frombuffer(data, np.int32).reshape(-1, width).tolist()


def turned_off(plan: StepPlan) -> list[int]:
    return [slot for (slot,) in ints(plan.decode_off)]


class FakeExecutor:
    def __init__(self, world: World, epoch: int, natures: Mapping[int, Nature], storage: Storage | None = None) -> None:
        self._stages = world.stages
        self._pace = world.pace  # seconds for each token beside the step's own; 0: it does not say how long it took
        self._skill = world.skill  # how many of its own drafts are what the model says
        self._drafted = 0.0  # seconds of the last drafting
        self._draft_pages = [[0] * world.block_size for _ in range(world.blocks + 1)]
        self.seen = self.unseen = 0  # positions of the draft model that were there, or missing, when it drafted
        self._longest = world.max_model_len
        self._layout = BlockLayout(world.block_size, world.windows)
        self.epoch = epoch
        self._size = world.block_size
        self._budget = world.budget
        self._count = world.slots
        self._natures = natures  # by the request's seed
        self._pages = [[0] * world.block_size for _ in range(world.blocks + 1)]
        self._slots: dict[int, Slot] = {}
        self._decoding: dict[int, set[int]] = {}  # by micro-batch
        self._flying: deque[Touched] = deque()
        self._waiting: deque[Work] = deque()
        self._masks: StepMasks | None = None
        self._store: dict[int, frozenset[int]] = {}
        self._step = 0
        self.rows = 0
        self.hosts = Hosts(world.adapter_places, world.adapter_memory)
        self.encoders = Encoders(world.encoder_rows, lambda: set().union(*[touched.rows for touched in self._flying]))
        self.host = HostMemory(world.host_blocks, self._pages, self._draft_pages, self._touched, storage)
        self._mutual = world.mutual
        self._recurrent, self._piece = world.recurrent, world.state_piece
        numbers = (*range(world.places), *range(HOST_PLACES, HOST_PLACES + world.host_places))
        # By place, those in the host's memory included: position, hash of the prefix before it.
        self._places: dict[int, tuple[int, int] | None] = dict.fromkeys(numbers)
        self.kept = self.begun = self.spilled = 0  # snapshots, slots that began from one, snapshots copied

    def applied(self, step: int) -> None:
        """The scheduler has applied this step: its fence is open."""
        assert self._flying.popleft().step == step

    def _touched(self) -> set[int]:
        return set().union(*[touched.blocks(self._layout) for touched in self._flying])

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Take a plan; returns the results that are complete now."""
        assert plan.epoch == self.epoch
        assert plan.step > self._step
        self._step = plan.step
        fenced_slots = frozenset().union(*[touched.slots for touched in self._flying])
        fenced_blocks = frozenset(self._touched())
        for number, place in ints(plan.adapters, 2):
            self.hosts.copy(number, place)
        self.encoders.share(plan)
        for start in plan.starts:
            for number, decoding in self._decoding.items():
                assert start.slot not in decoding or number != plan.microbatch or start.slot in turned_off(plan)
                if number != plan.microbatch:
                    decoding.discard(start.slot)
            assert start.slot not in fenced_slots, "slot reused before its fence opened"
            self._start(start, fenced_blocks)
        fenced_places = frozenset().union(*[touched.places for touched in self._flying])
        for _, _, place, _ in ints(plan.keep, 4):
            assert place in self._places
            assert place not in fenced_places, "a place written before its fence opened"
        self._spill(plan, fenced_places)
        for slot, *blocks in ints(plan.blocks, 1 + self._layout.groups):
            for table, block in zip(self._slots[slot].tables, blocks, strict=True):
                assert block not in fenced_blocks, "block reused before its fence opened"
                assert 1 <= block < len(self._pages)
                table.append(block)
        self._turn(plan)
        self._waiting.append(self._receive(plan))
        return self._work()

    def mask(self, masks: StepMasks) -> list[StepResult]:
        """Take the masks of the oldest step that waits for some."""
        assert masks.epoch == self.epoch
        assert self._masks is None, "one message for each masked plan"
        assert masks.step == next(work.plan.step for work in self._waiting if work.plan.masked)
        words = np.frombuffer(masks.bits, np.uint32).reshape(-1, VOCAB // 32)
        for (place,), row in zip(ints(masks.new_slots), words, strict=True):
            self._store[place] = frozenset(np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist())
        self._masks = masks
        return self._work()

    def _work(self) -> list[StepResult]:
        found = []
        while self._waiting:
            plan = self._waiting[0].plan
            if plan.masked and (self._masks is None or self._masks.step != plan.step):
                break
            masks: dict[int, frozenset[int]] = {}
            if plan.masked and self._masks is not None:
                places = zip(ints(self._masks.entries), ints(self._masks.slots), strict=True)
                masks = {entry: self._store[place] for (entry,), (place,) in places}
                self._masks = None
            found.append(self._compute(self._waiting.popleft(), masks))
        return found

    def _start(self, start, fenced_blocks: frozenset[int]) -> None:  # type: ignore[no-untyped-def]
        tokens = ints(start.token_ids)
        slot = Slot(
            [token for (token,) in tokens],
            start.prompt_tokens,
            start.computed,
            [list(table) for table in zip(*ints(start.blocks, self._layout.groups), strict=True)],
            start.sampling,
            start.seed,
            self._natures[start.sampling.seed],
            pooling=start.pooling,
        )
        assert not (start.pooling and start.pooling.whole and start.computed), "a vector of all positions"
        assert 0 <= start.slot < self._count
        assert 0 <= slot.computed < len(slot.tokens), "at least one position is computed"
        assert slot.computed % self._size == 0
        blocks = [block for table in slot.tables for block in table if block]
        assert len(set(blocks)) == len(blocks)
        for table, window in zip(slot.tables, self._layout.windows, strict=True):
            assert all(table[first_column(slot.computed, window, self._size) :]), "a block that is read is there"
            assert not fenced_blocks.intersection(table[slot.computed // self._size :]), "block reused too early"
        slot.hashes = cells(slot.nature.root, slot.tokens, slot.nature.images)
        slot.firsts = read_images(start, slot.nature.images)
        slot.place = start.adapter
        assert self.hosts.places[slot.place] == slot.nature.adapter, "a start in a place of another adapter"
        self._slots[start.slot] = slot
        if start.state != NO_STATE:
            self.begun += 1
            expected = slot.computed, slot.hashes[slot.computed - 1]
            assert self._places[start.state] == expected, "the state of another prefix"
        assert (start.state != NO_STATE) == (self._recurrent and slot.computed > 0), "a prefix without its state"

    def _turn(self, plan: StepPlan) -> None:
        decoding = self._set(plan)
        for slot in turned_off(plan):
            assert slot in decoding
            decoding.remove(slot)
        for (slot,) in ints(plan.decode_on):
            assert slot not in decoding
            decoding.add(slot)

    def _set(self, plan: StepPlan) -> set[int]:
        if plan.microbatch == NO_MICROBATCH:
            assert not plan.decode_on
            assert not plan.decode_off
            return set()
        assert 0 <= plan.microbatch < self._stages
        return self._decoding.setdefault(plan.microbatch, set())

    def _receive(self, plan: StepPlan) -> Work:
        chunks, counts = ints(plan.chunks, 4), dict(map(tuple, ints(plan.drafts, 2)))
        running = self._set(plan)
        used = [*sorted(running), *[row[0] for row in chunks]]
        assert used, "a step without work"
        assert len(set(used)) == len(used), "one row per slot"
        assert {start.slot for start in plan.starts} <= {row[0] for row in chunks}
        for number in used:
            slot = self._slots[number]
            assert self.hosts.places[slot.place] == slot.nature.adapter, "a place overwritten while it was used"
        ids = [token for (token,) in ints(plan.draft_ids)]
        assert list(counts) == sorted(counts)
        assert set(counts) <= running
        assert all(count >= 1 for count in counts.values())
        assert sum(counts.values()) == len(ids)
        assert len(running) + len(ids) + sum(row[2] for row in chunks) <= self._budget
        decoding, place = [], 0
        for slot in sorted(running):
            count = counts.get(slot, 0)
            decoding.append((slot, self._slots[slot], ids[place : place + count]))
            place += count
        sampling = running | {row[0] for row in chunks if row[3]}
        assert {slot for (slot,) in ints(plan.masked)} <= sampling
        kept = ints(plan.keep, 4)
        assert {row[0] for row in kept} <= set(used), "a state of a slot that does not run"
        places = [start.state for start in plan.starts if start.state != NO_STATE] + [row[2] for row in kept]
        places += [row[3] + HOST_PLACES for row in kept if row[3] != NO_STATE]
        assert len(set(places)) == len(places) - repeated(plan.starts), "a place twice"
        assert len({(row[0], row[1]) for row in kept}) == len({row[2] for row in kept}) == len(kept)
        tables = [(self._slots[slot], [list(table) for table in self._slots[slot].tables]) for slot in used]
        rows = self._image_rows(chunks)
        self._flying.append(Touched(plan.step, frozenset(used), frozenset(places), tables, rows))
        self.rows += len(used)
        return Work(plan, decoding, [(row[0], self._slots[row[0]]) for row in chunks])

    def _image_rows(self, chunks: list[list[int]]) -> frozenset[int]:
        """Rows of the encoder cache that chunks read, each of which holds what it must."""
        found: set[int] = set()
        for number, start, count, _ in chunks:
            slot = self._slots[number]
            for image in slot.nature.images if self._mutual else ():
                for cut in (start, start + count):
                    assert not image.position < cut < image.position + image.length, "an image is cut"
            for row, pixels, at in rows_of(slot.tokens, slot.nature.images, slot.firsts, start, start + count):
                assert self.encoders.rows[row] == (pixels, at), "another image, or none yet"
                found.add(row)
        return frozenset(found)

    def _compute(self, work: Work, masks: Mapping[int, frozenset[int]]) -> StepResult:
        plan = work.plan
        touched = next(touched for touched in self._flying if touched.step == plan.step)
        touched.starts.update((id(slot), slot.computed) for slot, _ in touched.tables)
        sampler = Sampler(self._longest, {slot for (slot,) in ints(plan.masked)}, masks)
        prompt_scores: list[RowLogprobs] = []
        vectors: list[RowVector] = []
        for index, slot, drafts in work.decoding:
            assert slot.pooling is None, "a slot that pools never decodes"
            assert slot.computed == len(slot.tokens) - 1, "a decoding slot runs its last token"
            if OWN_DRAFT in drafts:
                assert slot.guessed == len(slot.tokens), "drafts that were made behind other tokens"
                assert set(drafts) == {OWN_DRAFT}
                assert len(drafts) <= len(slot.guesses), "more drafts than were made"
                drafts = slot.guesses[: len(drafts)]
            slot.began = slot.computed
            lasts = self._positions(slot, 1, drafts)
            sampler.sample(index, slot, lasts, drafts)
        for row, ((index, slot), (_, start, count, sample)) in enumerate(
            zip(work.chunks, ints(plan.chunks, 4), strict=True)
        ):
            assert start == slot.computed, "a chunk starts where the slot stands"
            assert count >= 1
            lasts = self._positions(slot, count, [])
            slot.began = slot.computed
            ends = slot.computed == len(slot.tokens)
            assert bool(sample) == (ends and slot.pooling is None), "the last chunk samples, no other does"
            if slot.pooling is not None:
                slot.pooled += count
                vectors += [RowVector(row, vector_of(slot).tobytes())] if ends else []
            if slot.sampling.prompt_logprobs >= 0:
                last = min(start + count, slot.prompt_tokens - 1)
                if part := score_positions(slot, start + 1, last):
                    prompt_scores.append(RowLogprobs(row=row, logprobs=part))
            if sample:
                sampler.sample(index, slot, lasts, [])
        sampler.close()
        held = dict([*((index, slot) for index, slot, _ in work.decoding), *work.chunks])
        lengths = {row[0]: row[2] for row in ints(plan.chunks, 4)}
        for number, position, place, _ in ints(plan.keep, 4):
            self._keep(held[number], position, place, lengths.get(number, self._piece))
        told, drafted = self._draft(plan), self._drafted
        self._drafted = sum(row[3] for row in ints(plan.drafting, 5)) * self._pace
        return StepResult(
            step=plan.step,
            epoch=plan.epoch,
            token_ids=np.array(sampler.tokens, np.int32).tobytes(),
            logprobs=tuple(sampler.scores),
            prompt_logprobs=tuple(prompt_scores),
            vectors=tuple(vectors),
            drafts=np.array(told, np.int32).tobytes(),
            busy=0.01 + len(sampler.tokens) * self._pace if self._pace else 0.0,
            drafting=drafted,
        )

    def _spill(self, plan: StepPlan, fenced: frozenset[int]) -> None:
        """Copies to the host's memory, between the starts and what the step keeps."""
        begun = {start.state for start in plan.starts}
        for _, _, place, host in ints(plan.keep, 4):
            if host == NO_STATE:
                continue
            assert not fenced & {place, host + HOST_PLACES}, "a place that a step in flight touches"
            assert not begun & {place, host + HOST_PLACES}, "a place that a slot begins from"
            assert self._places[place] is not None, "nothing to copy"
            self._places[host + HOST_PLACES] = self._places[place]
            self.spilled += 1

    def _keep(self, slot: Slot, position: int, place: int, window: int) -> None:
        """The slot's state as of a position that it passes, or may still have one of."""
        assert position > 0
        assert position % self._piece == 0
        assert 0 <= slot.began - position < window, "a state that the executor has no more"
        self._places[place] = position, slot.hashes[position - 1]
        self.kept += 1

    def _draft(self, plan: StepPlan) -> list[int]:
        """What the draft model runs behind the step; returns the drafts that are told."""
        found, asked, ends = [], ints(plan.drafting, 5), {row[0]: row[1] + row[2] for row in ints(plan.chunks, 4)}
        assert len({row[0] for row in asked}) == len(asked), "one row per slot"
        assert set(ends) <= {row[0] for row in asked} or not asked, "the draft model keeps up with every chunk"
        masked = {slot for (slot,) in ints(plan.masked)}
        for index, start, count, drafts, told in asked:
            slot = self._slots[index]
            first = len(slot.tokens) + start if start < 0 else start
            end = len(slot.tokens) if drafts else ends[index]
            assert first >= 0
            assert first + count == end, "up to the last token, or to the chunk's end"
            assert bool(told) == (drafts > 0 and index in masked)
            there = sum(self._draft_cell(slot, place) == slot.hashes[place] for place in range(first))
            self.seen, self.unseen = self.seen + there, self.unseen + first - there
            for position in range(first, end):
                self._set_draft_cell(slot, position, slot.hashes[position])
            if drafts:
                self._guess(slot, drafts)
                found += slot.guesses if told else []
        return found

    def _guess(self, slot: Slot, count: int) -> None:
        slot.guesses, slot.guessed = [], len(slot.tokens)
        last, outputs = slot.hashes[-1], len(slot.tokens) - slot.prompt_tokens
        for place in range(count):
            token = max(0, choose(last, slot.seed, slot.sampling, outputs + place, slot.nature))
            if hash((last, 9)) % 1000 >= 1000 * self._skill:
                token = (token + 1) % VOCAB
            slot.guesses.append(token)
            last = cell(last, token)
            if place < count - 1:
                self._set_draft_cell(slot, len(slot.tokens) + place, last)

    def _draft_cell(self, slot: Slot, position: int) -> int:
        return self._draft_pages[slot.table[position // self._size]][position % self._size]

    def _set_draft_cell(self, slot: Slot, position: int, value: int) -> None:
        assert position < len(slot.table) * self._size, "a draft beyond the block table"
        self._draft_pages[slot.table[position // self._size]][position % self._size] = value

    def _positions(self, slot: Slot, count: int, drafts: list[int]) -> list[int]:
        """Attend to everything before, then write the KV of `count` positions and of the drafts. Returns the KV that
        each entry is sampled from, read back from the pages. Drafts leave the slot as it was."""
        size, end = self._size, slot.computed + count
        assert end <= len(slot.tokens), "positions of unknown tokens"
        assert end + len(drafts) <= len(slot.table) * size, "positions beyond the block table"
        for group, (table, window) in enumerate(zip(slot.tables, self._layout.windows, strict=True)):
            for start in range(max(0, slot.computed + 1 - window) if window else 0, slot.computed):
                assert self._pages[table[start // size]][start % size] == slot.hashes[start] + group, "another prefix"
        written = slot.hashes[slot.computed : end]
        for token in drafts:
            written.append(cell(written[-1], token))
        for group, table in enumerate(slot.tables):
            for position, value in enumerate(written, slot.computed):
                self._pages[table[position // size]][position % size] = value + group
        slot.computed = end
        return [
            self._pages[slot.table[position // size]][position % size] for position in range(end - 1, end + len(drafts))
        ]


def repeated(starts: Sequence[SlotStart]) -> int:
    """How many slots begin from a place that another one of these begins from."""
    states = [start.state for start in starts if start.state != NO_STATE]
    return len(states) - len(set(states))


def vector_of(slot: Slot) -> NDArray[np.float32]:
    """What stands for a slot's vector: it tells the whole prefix, and how many positions went into it."""
    value = np.nan if slot.nature.fails_at == 0 else slot.hashes[-1] % 9973
    whole = slot.pooling is not None and slot.pooling.whole
    return np.array([value, slot.pooled if whole else 0], np.float32)


class Sampler:
    """What one step samples, entry by entry."""

    def __init__(self, longest: int, masked: set[int], masks: Mapping[int, frozenset[int]]) -> None:
        self.tokens: list[int] = []
        self.scores: list[RowLogprobs] = []
        self._longest, self._masked, self._masks = longest, masked, masks
        self._used: set[int] = set()

    def sample(self, index: int, slot: Slot, lasts: list[int], drafts: list[int]) -> None:
        """The row's entries: each token as if the drafts before it stood; those after the first other one are void."""
        outputs = len(slot.tokens) - slot.prompt_tokens
        assert slot.sampling.max_tokens is not None
        assert outputs + len(drafts) < slot.sampling.max_tokens, "a length stop is known ahead"
        assert len(slot.tokens) + len(drafts) < self._longest, "a length stop is known ahead"
        alive = True
        for depth, last in enumerate(lasts):
            entry = len(self.tokens)
            if entry in self._masks:
                assert index in self._masked, "a mask for a row that has none"
                self._used.add(entry)
            if not alive:
                self.tokens.append(REJECTED)
                continue
            token = choose(last, slot.seed, slot.sampling, outputs + depth, slot.nature, self._masks.get(entry))
            if slot.sampling.logprobs >= 0:
                value, rank = logprob(last, token)
                self.scores.append(RowLogprobs(row=entry, logprobs=one_row([token], [value], [rank])))
            self.tokens.append(token)
            slot.tokens.append(token)
            slot.hashes.append(cell(last, token))
            alive = depth < len(drafts) and drafts[depth] == token
            slot.computed += alive

    def close(self) -> None:
        assert self._used == set(self._masks), "a mask for an entry that does not exist"


def one_row(tokens: list[int], values: list[float], ranks: list[int]) -> Logprobs:
    return Logprobs(
        width=1,
        token_ids=np.array(tokens, np.int32).tobytes(),
        values=np.array(values, np.float32).tobytes(),
        ranks=np.array(ranks, np.int32).tobytes(),
    )


def score_positions(slot: Slot, first: int, last: int) -> Logprobs | None:
    """Log-probabilities of the prompt's tokens at positions first..last."""
    if last < first:
        return None
    found = [logprob(slot.hashes[position - 1], slot.tokens[position]) for position in range(first, last + 1)]
    return one_row(slot.tokens[first : last + 1], [value for value, _ in found], [rank for _, rank in found])
