"""Waiting choices enter free slots, in order, while budget and the forecast allow."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from penstock.engine_core.kv.prefix_index import extend
from penstock.engine_core.scheduling.lifecycle import TOO_SMALL, announce, cancel
from penstock.engine_core.scheduling.peak_estimate import Outlook
from penstock.engine_core.scheduling.preemption import leaving_blocks
from penstock.engine_core.scheduling.request import Choice
from penstock.engine_core.scheduling.request_queue import rank
from penstock.engine_core.scheduling.running_batch import Ints, blocks_at_end
from penstock.engine_core.scheduling.state import State
from penstock.protocol.messages import Finish

LOOKAHEAD = 256  # waiting choices that one plan passes over
HASHES = 2048  # blocks of theirs that one plan hashes, about 2 ms
REASONS = ("trial", "slot", "blocks", "step", "prefix")


@dataclass(slots=True)
class Admissions:
    """One plan's pass over the queue: it carries the outlook from one admission to the next."""

    state: State
    outlook: Outlook | None = None
    hashed: int = 0

    def admit(self, budget: int) -> Iterator[tuple[Choice, int]]:
        """Choices that enter slots now, with the positions of their first chunk, whose blocks the caller takes before
        it asks for the next."""
        state = self.state
        if state.accused:
            yield from self._try_alone(budget)
            return
        walk = state.queue.walk()
        while budget > 0 and state.slots.free and walk.passed < LOOKAHEAD:
            if walk.passed and self.hashed > HASHES:
                break
            choice = walk.next()
            if choice is None or choice is state.refused or choice.last_step > state.applied:
                break  # in order: nobody overtakes one that waits for memory or for its own tokens in flight
            found = self._prefix(choice)
            if found is None:
                walk.skip(choice)
                continue
            count = min(len(choice.tokens) - len(found) * state.options.block_size, budget)
            if not self._fits(choice, found, count):
                if self._hopeless():
                    cancel(state, choice.request, Finish.ERROR, TOO_SMALL)
                    continue
                state.refused = choice
                state.forecast.refuse()
                break
            self._enter(choice, found)
            yield choice, count
            budget -= count

    def _try_alone(self, budget: int) -> Iterator[tuple[Choice, int]]:
        """The next of those that may have killed executors, once nobody else is anywhere."""
        state = self.state
        if state.flights or len(state.slots.occupied()):
            return
        choice = min(state.accused, key=rank)
        found = self._prefix(choice)
        assert found is not None, "nobody computes anything that it could wait for"
        count = min(len(choice.tokens) - len(found) * state.options.block_size, budget)
        if not self._fits(choice, found, count):
            cancel(state, choice.request, Finish.ERROR, TOO_SMALL)
            return
        self._enter(choice, found)
        yield choice, count

    def _prefix(self, choice: Choice) -> list[int] | None:
        """Blocks that hold a prefix of the choice already; None: wait for a prefix that is being computed."""
        state, size, start = self.state, self.state.options.block_size, choice.request.root
        if choice.behind is not None:
            leader, life, blocks = choice.behind
            if leader.life == life and leader.sealed < blocks:
                return None
            choice.behind = None
        if start is None:
            return []
        self.hashed += len(choice.tokens) // size - len(choice.chain)
        extend(choice.chain, start, choice.tokens, len(choice.tokens) // size, size)
        if choice.fresh:
            return []
        most = (len(choice.tokens) - 1) // size  # at least one position is computed, so that there are logits
        found = state.prefix.match(choice.chain, most)
        leader_next = state.coming.get(choice.chain[len(found)]) if len(found) < most else None
        if leader_next is None:
            return found
        choice.behind = (leader_next, leader_next.life, common_blocks(choice.chain[:most], leader_next.chain))
        return None

    def _fits(self, choice: Choice, found: list[int], count: int) -> bool:
        """Whether the first chunk's blocks are there now and the expected peak stays within the pool."""
        state, size, pool = self.state, self.state.options.block_size, self.state.pool
        need = -(-(len(found) * size + count) // size) - len(found)
        shared = len(found) - (idle := pool.idle_among(found))
        if need + idle > pool.available:
            return False
        if state.slots.committed + blocks_at_end(choice, size) <= pool.capacity:
            self.outlook = None
            return True  # whatever each will use, all of it fits
        if self.outlook is None:
            self.outlook = state.forecast.outlook(state.slots, pool.held, leaving_blocks(state), size)
        tokens = np.array([len(choice.tokens)])
        orphans = [block for block, alive in zip(found, self._owned(found), strict=True) if not alive] if shared else []
        newcomer = Outlook(
            tokens,
            state.forecast.further(tokens, np.array([choice.request.limit]), len(self.outlook.positions)),
            np.array([shared]),
            pool.lone_among(orphans),  # counted as leaving, but not if the newcomer holds them too
        )
        both = state.forecast.fits(self.outlook, newcomer, pool.capacity, size)
        if both is None:
            return False
        self.outlook = None if shared else both
        return True

    def _enter(self, choice: Choice, found: list[int]) -> None:
        """Give the choice its slot and its share of the prefix."""
        state = self.state
        reused = len(found) * state.options.block_size
        state.queue.enter(choice, len(choice.tokens) - reused)
        choice.blocks = found
        choice.borrowed = choice.sealed = len(found)
        slot = state.slots.enter(choice, state.options.block_size, choice.request.root is not None)
        state.durations.enter(choice)
        state.guesses.enter(slot, wanted=choice.request.message.speculate)
        if found:
            self._account(choice, slot, np.array(found))
            state.pool.share(found)
        state.totals.reused_tokens += reused
        if choice.index == 0 and not choice.began and choice.last_step == 0:
            choice.request.cached = min(reused, choice.request.prompt_tokens)
            state.totals.count_lookup(choice.request.cached)
        insort(state.prefilling, choice, key=rank)
        announce(state, choice)
        state.traces.enter(choice, state.durations.now, reused)

    def _hopeless(self) -> bool:
        """Nobody is left to give memory back, and it still does not fit: a quarantine has made the pool too small."""
        return not self.state.flights and not len(self.state.slots.occupied())

    def _owned(self, blocks: list[int]) -> list[bool]:
        """Whether each block is accounted to a running choice."""
        owners = self.state.owners[blocks]
        alive: list[bool] = ((owners > 0) & (self.state.slots.life[owners % self.state.slots.count] == owners)).tolist()
        return alive

    def _account(self, choice: Choice, slot: int, found: Ints) -> None:
        """Account shared blocks to whichever sharer is expected to go on longest: they are given back at its end."""
        state, slots = self.state, self.state.slots
        owners = state.owners[found]
        others = owners % slots.count
        alive = (owners > 0) & (slots.life[others] == owners)
        known = np.maximum(slots.known[others], slots.planned[others] + 1)
        theirs = slots.limit[others] - known
        mine = choice.request.limit - len(choice.tokens)
        stays = alive & (theirs > mine)
        np.add.at(slots.lent, others[alive & ~stays], 1)
        slots.lent[slot] = int(stays.sum())
        state.owners[found[~stays]] = choice.life


def common_blocks(chain: list[bytes], other: list[bytes]) -> int:
    """How many leading identities two chains share: equal at one place means equal before it."""
    shorter = range(min(len(chain), len(other)))
    return bisect_left(shorter, True, key=lambda index: chain[index] != other[index])


def reasons(state: State) -> dict[str, int]:
    """Choices in the queue by what they wait for. Nobody overtakes, so all wait for what the first one lacks, but those
    that wait for a prefix which somebody else is computing.

    trial: one of those that executors may have died of runs alone. slot: --max-num-seqs run. blocks: there is no KV
    cache for more. step: there is room, and the next step will have it, or the one after that.
    """
    waiting = len(state.queue)
    if not waiting:
        return {}
    behind = sum(choice.behind is not None for choice in islice(state.queue, LOOKAHEAD))
    if state.accused:
        reason = "trial"
    elif not state.slots.free:
        reason = "slot"
    elif state.refused is not None or state.tight:
        reason = "blocks"
    else:
        reason = "step"
    return {name: count for name, count in ((reason, waiting - behind), ("prefix", behind)) if count}
