"""Waiting sequences enter free slots, in order, while the token budget and the peak estimate allow."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from penstock.engine_core.kv.block_layout import HOLDS_ALL, NO_BLOCK, columns_of
from penstock.engine_core.kv.prefix_index import extend
from penstock.engine_core.scheduling.disaggregation import transfer_of, transfer_places
from penstock.engine_core.scheduling.host_tier import (
    FindPlace,
    copying_blocks,
    fetch_prefix,
    find_anywhere,
    find_prefix,
    forget_waiting,
    joins,
    may_wait,
    waits_for_blocks,
    worth_fetching,
)
from penstock.engine_core.scheduling.images import ask_images, awaits_images, cut_at_images, reusable
from penstock.engine_core.scheduling.late_masks import short_of_end
from penstock.engine_core.scheduling.lifecycle import TOO_SMALL, announce_prefix, cancel, lacks_adapter
from penstock.engine_core.scheduling.peak_estimate import PeakEstimate, new_estimate
from penstock.engine_core.scheduling.preemption import leaving_blocks
from penstock.engine_core.scheduling.recurrent_state import ask_leader, enter_slot, waits, with_state
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.request_queue import rank
from penstock.engine_core.scheduling.running_batch import Ints, RunningBatch, blocks_at_end
from penstock.engine_core.scheduling.state import SchedulerState
from penstock.engine_core.scheduling.storage_tier import load_prefix, look_up, may_load, waits_for_storage
from penstock.protocol.control import PauseMode
from penstock.protocol.messages import Finish
from penstock.protocol.steps import NO_STATE

LOOKAHEAD = 256  # waiting sequences that one plan passes over
HASHES = 2048  # blocks of theirs that one plan hashes, about 2 ms
BLOCKED = 1024  # waiting sequences without their adapters or images that it passes over as well
REASONS = ("trial", "slot", "blocks", "step", "prefix", "host", "disk", "adapter", "image", "pause")


@dataclass(slots=True)
class Admissions:
    """One plan's pass over the queue: it carries the estimate from one admission to the next."""

    state: SchedulerState
    batch: RunningBatch | None = None  # rows of the step that do not wait for a newcomer's first mask
    estimate: PeakEstimate | None = None
    hashed: int = 0

    def admit(self, budget: int) -> Iterator[tuple[Sequence, int]]:
        """Sequences that enter slots now, with the positions of their first chunk, whose blocks the caller takes before
        it asks for the next."""
        state = self.state
        state.adapters.begin_pass()
        state.encoder_cache.begin_pass()
        if state.steps.pause.closed:
            return
        if state.quarantine:
            yield from self._try_alone(budget)
            return
        walk, blind = state.queue.walk(), 0
        while budget > 0 and state.slots.free and walk.passed < LOOKAHEAD and walk.blocked < BLOCKED:
            if (walk.passed or blind) and self.hashed > HASHES:
                break
            sequence = walk.next()
            if sequence is None or sequence is state.refused or sequence.last_step > state.steps.applied:
                break  # in order: no sequence overtakes one that waits for memory or for its own tokens in flight
            adapter = sequence.request.adapter
            if adapter is not None and not state.adapters.ask(adapter, state.stats.now):
                walk.skip_blocked(sequence)
                continue
            if sequence.request.message.images and state.encoder_cache.short:
                walk.skip_blocked(sequence)
                continue
            found = self._prefix(sequence)
            if found is None:
                walk.skip(sequence)
                continue
            start = self._positions(found)
            if sequence.request.message.images and not ask_images(state, sequence, start):
                walk.skip_blocked(sequence)
                blind += 1
                continue
            count = cut_at_images(state, sequence, start, min(len(sequence.tokens) - start, budget))
            if not count or (state.options.encoder and count < len(sequence.tokens)):
                break  # it runs as a whole, or what it begins with does, in the next step
            if self.batch is not None:
                count = short_of_end(state, self.batch, sequence, start, count)
                count = cut_at_images(state, sequence, start, count)
            if not count:
                walk.skip(sequence)
                continue
            if not self._fits(sequence, found, count):
                if self._never_fits():
                    cancel(state, sequence.request, Finish.ERROR, TOO_SMALL)
                    continue
                state.refused = sequence
                state.stats.totals.put_off += 1
                break
            self._enter(sequence, found)
            yield sequence, count
            budget -= count

    def _try_alone(self, budget: int) -> Iterator[tuple[Sequence, int]]:
        """The next suspect of the executors' deaths, once nothing else runs."""
        state = self.state
        if state.steps.in_flight or len(state.slots.occupied()) or copying_blocks(state):
            return
        sequence = min(state.quarantine, key=rank)
        adapter = sequence.request.adapter
        if adapter is not None and not state.adapters.ask(adapter, state.stats.now):
            return
        found = self._prefix(sequence)
        if found is None:
            return  # it waits for blocks from the host's memory: no other sequence computes a prefix for it
        start = self._positions(found)
        if sequence.request.message.images and not ask_images(state, sequence, start):
            return
        count = cut_at_images(state, sequence, start, min(len(sequence.tokens) - start, budget))
        assert count, "a step has room for any image"
        if not self._fits(sequence, found, count):
            cancel(state, sequence.request, Finish.ERROR, TOO_SMALL)
            return
        self._enter(sequence, found)
        yield sequence, count

    def _positions(self, found: list[int]) -> int:
        """Of a prefix that is there already."""
        layout = self.state.kv.layout
        return len(found) // layout.groups * layout.block_size

    def _prefix(self, sequence: Sequence) -> list[int] | None:
        """The table of a prefix of the sequence that is there already, column by column; None: wait for one that is
        being computed, or fetched from the host's memory."""
        state, size, start = self.state, self.state.options.block_size, sequence.request.root
        states = state.kv.recurrent
        if states is not None:
            states.found = 0, NO_STATE
        if sequence.waits_for is not None:
            leader, life, blocks = sequence.waits_for
            if leader.life == life and leader.cached < blocks if states is None else waits(states, sequence, blocks):
                return None
            sequence.waits_for = None
        if waits_for_blocks(state, sequence) or waits_for_storage(state, sequence):
            return None
        if start is None:
            return []
        self.hashed += len(sequence.tokens) // size - len(sequence.block_hashes)
        images = sequence.request.message.images
        extend(sequence.block_hashes, start, sequence.tokens, len(sequence.tokens) // size, size, images)
        if sequence.skips_prefix_cache:
            return []
        most = (len(sequence.tokens) - 1) // size  # at least one position is computed, so that there are logits
        found = self._match(sequence, most)
        columns = len(found) // state.kv.layout.groups
        leader_next = state.kv.in_flight_prefixes.get(sequence.block_hashes[columns]) if columns < most else None
        if leader_next is None:
            if columns < most and self._fetches(sequence, found, most):
                return None
            return found if states is None else with_state(state, states, sequence, found, most)
        common = common_blocks(sequence.block_hashes[:most], leader_next.block_hashes)
        if (common := reusable(state, sequence, common)) <= columns:
            return found
        if states is not None:
            ask_leader(state, states, leader_next, common)
            return with_state(state, states, sequence, found, most)
        sequence.waits_for = (leader_next, leader_next.life, common)
        return None

    def _fetches(self, sequence: Sequence, found: list[int], most: int) -> bool:
        """Whether the sequence waits for blocks from the host's memory, or from disk, which are fetched if nobody does
        so yet. found: the table of its prefix on the device."""
        state, host, groups = self.state, self.state.kv.host, self.state.kv.layout.groups
        if host is None:
            return False
        columns, transfer = len(found) // groups, transfer_of(state, sequence)
        if transfer is None and look_up(state, host, sequence, columns, most):
            return True
        if transfer is None and may_load(host, sequence):
            table = self._beyond(find_anywhere(host), sequence, columns, most)
            if load_prefix(state, host, sequence, table, columns):
                return True
        if not may_wait(host, sequence):
            return False
        find_place = host.tier.find if transfer is None else transfer_places(sequence, transfer, groups).get
        table = self._beyond(find_place, sequence, columns, most)
        reach = len(table) // groups
        if transfer is None and not worth_fetching(state, host, table, columns):
            return False
        if reach <= columns:  # the device has what was transferred
            sequence.request.transfer = None
            return False
        if joins(state, host, sequence, table):
            return True
        there = [block for block in table if block > NO_BLOCK]
        room = state.kv.pool.available - state.kv.pool.idle_among(there)
        positions = (reach - columns) * state.options.block_size
        if sum([block < 0 for block in table]) > room or not self._fits(sequence, found, positions + 1):
            return False
        self.estimate = None  # of blocks that are held without it
        fetch_prefix(state, sequence, table, transfer)
        return True

    def _beyond(self, find_place: FindPlace, sequence: Sequence, columns: int, most: int) -> list[int]:
        """`find_prefix` of as many blocks as the sequence may begin behind."""
        table = find_prefix(self.state, find_place, sequence, columns, most)
        while (blocks := reusable(self.state, sequence, reach := len(table) // self.state.kv.layout.groups)) < reach:
            table = find_prefix(self.state, find_place, sequence, columns, blocks)
        return table

    def _match(self, sequence: Sequence, most: int) -> list[int]:
        """The table of the longest known prefix of at most `most` blocks that the sequence may begin behind."""
        kv, chain = self.state.kv, sequence.block_hashes
        found = kv.prefix.match_groups(chain, most, kv.layout)
        while (blocks := reusable(self.state, sequence, columns := len(found) // kv.layout.groups)) < columns:
            found = kv.prefix.match_groups(chain, blocks, kv.layout)
        return found

    def _fits(self, sequence: Sequence, found: list[int], count: int) -> bool:
        """Whether the first chunk's blocks are there now and the expected peak stays within the pool."""
        state, layout, pool = self.state, self.state.kv.layout, self.state.kv.pool
        if state.options.encoder:
            return True
        need = columns_of(self._positions(found) + count, layout.block_size) * layout.groups - len(found)
        known = [block for block in found if block != NO_BLOCK] if layout.kinds else found
        shared = len(known) - (idle := pool.idle_among(known))
        if need + idle > pool.available:
            return False
        if state.slots.blocks.committed + blocks_at_end(sequence, layout) <= pool.capacity - copying_blocks(state):
            self.estimate = None
            return True  # even if every sequence runs to its limit
        if self.estimate is None:
            prompts = sum([layout.overhang(len(other.tokens)) for other in state.prefilling]) if layout.kinds else 0
            self.estimate = state.forecast.estimate(state.slots, pool.held, leaving_blocks(state) - prompts)
        tokens = np.array([len(sequence.tokens)])
        orphans = [block for block, alive in zip(known, self._owned(known), strict=True) if not alive] if shared else []
        spare = shared if not layout.kinds else sum(
            [len(own) - pool.idle_among(own) for own in layout.lasting(found)]
        )  # fmt: skip
        further = state.forecast.further(tokens, np.array([sequence.limit]), len(self.estimate.positions))
        candidate = new_estimate(
            layout,
            tokens,
            further,
            np.array([spare]),
            # Counted as leaving, but not if the candidate holds them too.
            pool.lone_among(orphans) + layout.overhang(len(sequence.tokens)),
        )
        both = state.forecast.fits(self.estimate, candidate, pool.capacity, layout.block_size)
        if both is None:
            return False
        self.estimate = None if shared else both
        return True

    def _enter(self, sequence: Sequence, found: list[int]) -> None:
        """Give the sequence its slot and its share of the prefix."""
        state = self.state
        reused = self._positions(found)
        state.queue.enter(sequence, len(sequence.tokens) - reused)
        sequence.blocks = found
        sequence.borrowed = sequence.cached = len(found) // state.kv.layout.groups
        slot = state.slots.enter(sequence)
        forget_waiting(state, sequence)
        if sequence.request.adapter is not None:
            state.adapters.enter(sequence.request.adapter)
        if sequence.request.message.images:
            state.encoder_cache.enter(sequence)
        state.stats.sequences.enter(sequence, state.stats.now)
        state.spec.device_drafts.enter(slot, wanted=sequence.request.message.speculate)
        if found:
            table = np.array(found)
            places = table.nonzero()[0]
            self._account(sequence, slot, table[places], self._lasts(places))
            state.kv.pool.share(table[places].tolist() if state.kv.layout.kinds else found)
        state.stats.totals.reused_tokens += reused
        if sequence.index == 0 and not sequence.began and sequence.last_step == 0:
            sequence.request.cached = min(reused, sequence.request.prompt_tokens)
            state.stats.totals.count_lookup(sequence.request.cached)
        insort(state.prefilling, sequence, key=rank)
        announce_prefix(state, sequence)
        if state.kv.recurrent is not None:
            enter_slot(state, state.kv.recurrent, sequence)
        state.traces.enter(sequence, state.stats.now, reused)

    def _lasts(self, places: Ints) -> npt.NDArray[np.bool_]:
        """Whether each place of a table is of a group that holds everything."""
        layout = self.state.kv.layout
        found: npt.NDArray[np.bool_] = (np.array(layout.windows) == HOLDS_ALL)[places % layout.groups]
        return found

    def _never_fits(self) -> bool:
        """Nothing runs that could free blocks, and it still does not fit: quarantines have made the pool too small."""
        held = self.state.steps.in_flight or len(self.state.slots.occupied()) or copying_blocks(self.state)
        return not held

    def _owned(self, blocks: list[int]) -> list[bool]:
        """Whether each block is accounted to a running sequence."""
        owners = self.state.kv.owners[blocks]
        alive: list[bool] = ((owners > 0) & (self.state.slots.life[owners % self.state.slots.count] == owners)).tolist()
        return alive

    def _account(self, sequence: Sequence, slot: int, found: Ints, lasts: npt.NDArray[np.bool_]) -> None:
        """Account shared blocks to the sharer that is expected to run longest: its end frees them.
        # lasts: [blocks], of a group that holds everything"""
        state, slots = self.state, self.state.slots
        owners = state.kv.owners[found]
        others = owners % slots.count
        alive = (owners > 0) & (slots.life[others] == owners)
        known = np.maximum(slots.num_tokens[others], slots.num_computed_tokens[others] + 1)
        theirs = slots.limit[others] - known
        mine = sequence.limit - len(sequence.tokens)
        stays = alive & (theirs > mine)
        for column, own in ((slots.blocks.borrowed, lasts), (slots.blocks.lent, ~lasts)):
            np.add.at(column, others[alive & ~stays & own], 1)
            column[slot] = int((stays & own).sum())
        state.kv.owners[found[~stays]] = sequence.life


def common_blocks(chain: list[bytes], other: list[bytes]) -> int:
    """How many leading block hashes are equal: equal at one place means equal before it."""
    shorter = range(min(len(chain), len(other)))
    return bisect_left(shorter, True, key=lambda index: chain[index] != other[index])


def reasons(state: SchedulerState) -> dict[str, int]:
    """Waiting sequences by what they wait for. None overtakes, so all wait for what the first one lacks, except those
    that wait for a prefix which somebody else is computing, for blocks from the host's memory or from disk, for their
    adapter, or for their images.

    pause: no step is planned, or not for these. trial: one of those that executors may have died of runs alone. slot:
    --max-num-seqs run. blocks: there is no KV cache for more. step: there is room, and the next step will have it, or
    the one after that.
    """
    waiting = len(state.queue)
    pause = state.steps.pause
    if waiting and (pause.closed or pause.frozen or pause.mode not in (None, PauseMode.WAIT)):
        return {"pause": waiting}
    held = {"pause": len(pause.held)} if pause.held else {}
    if not waiting:
        return held
    first = tuple(islice(state.queue, LOOKAHEAD))
    behind = sum(sequence.waits_for is not None for sequence in first)
    free = [sequence for sequence in first if sequence.waits_for is None]
    fetching = sum(waits_for_blocks(state, sequence) for sequence in free)
    reading = sum(waits_for_storage(state, sequence) for sequence in free)
    lacking = sum(lacks_adapter(state, sequence) for sequence in free)
    blind = sum(awaits_images(state, sequence) and not lacks_adapter(state, sequence) for sequence in free)
    if state.quarantine:
        reason = "trial"
    elif not state.slots.free:
        reason = "slot"
    elif state.refused is not None or state.kv.pressure:
        reason = "blocks"
    else:
        reason = "step"
    return held | {
        name: count
        for name, count in (
            (reason, waiting - behind - fetching - reading - lacking - blind),
            ("prefix", behind),
            ("host", fetching),
            ("disk", reading),
            ("adapter", lacking),
            ("image", blind),
        )
        if count
    }


def waiting_adapters(state: SchedulerState) -> dict[str, int]:
    """The first waiting sequences that have an adapter, by its name."""
    if not state.options.adapter_places:
        return {}
    first = (sequence.request.adapter for sequence in islice(state.queue, LOOKAHEAD))
    return dict(Counter(adapter.name for adapter in first if adapter is not None))
