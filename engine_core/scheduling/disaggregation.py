"""Prefill and decode at different replicas: what one hands over, and what the other finds of it.

A request with `prefill` ends here with its next token. Its blocks are copied to the host's memory while its prompt is
computed, as every block is that steps of a prefill replica have filled (host_tier.py). Once the last copy is there,
`Prefilled` tells which blocks of that memory they are. They are held until the tokenizer says that they have been read,
LEASE seconds at most. Whatever of them is gone by then, or has no room, is computed by the replica that decodes.

No right token depends on the hold: executors of the other replica compare stamps behind a copy, so blocks may be given
away at any time, and their executor or its scheduler may die.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from penstock.engine_core.kv.block_layout import BlockLayout, first_column
from penstock.engine_core.kv.prefix_index import in_group
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.state import Handover, HostCopies, SchedulerState
from penstock.engine_core.scheduling.statistics import TransferCounters, TransferStatistics
from penstock.protocol.messages import KVTransfer, Prefilled

PATIENCE = 2.0  # seconds that a request waits for the copies of its blocks; then it goes on with those that are there
LEASE = 30.0  # seconds that blocks are held for a request that has not been heard of
NO_PLACE = -1


def hand_over(state: SchedulerState, sequence: Sequence) -> None:
    """The last sequence of a request has its token, and the request goes on elsewhere."""
    host, request = state.kv.host, sequence.request
    if host is None:
        state.outboxes[request.source].tell(Prefilled(request.message.id))
        return
    release_transfer(state, request.message.id)
    # What several sequences have in common is the prompt. The last token's keys and values are not there.
    known = request.prompt_tokens if request.message.n > 1 else len(sequence.tokens) - 1
    chain = sequence.block_hashes[: known // state.options.block_size]
    host.transfers.handovers[request.message.id] = Handover(request.message.id, request.source, chain, state.stats.now)


def needed(layout: BlockLayout, chain: list[bytes]) -> Iterator[tuple[bytes, int]]:
    """Columns and groups of the blocks that a position behind all of these reads."""
    for group, window in enumerate(layout.windows):
        for identity in chain[first_column(len(chain) * layout.block_size, window, layout.block_size) :]:
            yield identity, group


def blocks_to_copy(state: SchedulerState, host: HostCopies) -> Iterator[int]:
    """Blocks that requests wait for, and that have not been copied as they were filled: they may have been there before
    them."""
    for handover in host.transfers.handovers.values():
        for identity, group in needed(state.kv.layout, handover.chain) if handover.held is None else ():
            block = state.kv.prefix.find(identity, group)
            if block is not None and host.tier.find(in_group(identity, group)) is None and is_full(state, host, block):
                yield block


def is_full(state: SchedulerState, host: HostCopies, block: int) -> bool:
    """Whether the step that fills a block, which can be found as soon as that is planned, has been applied."""
    return host.written.get(block, 0) <= state.steps.applied


def advance_handovers(state: SchedulerState, host: HostCopies, *, full: bool) -> None:
    """Tell of requests that wait for no copy any more. full: as many copies are on their way as may be."""
    for handover in [one for one in host.transfers.handovers.values() if one.held is None]:
        if not any(awaited(state, host, *block, full=full) for block in needed(state.kv.layout, handover.chain)):
            tell(state, host, handover)


def awaited(state: SchedulerState, host: HostCopies, identity: bytes, group: int, *, full: bool) -> bool:
    """Whether a copy of this block is on its way, or will be."""
    key = in_group(identity, group)
    if host.tier.find(key) is not None:
        return False
    block = state.kv.prefix.find(identity, group)
    return key in host.spilling or (block is not None and (full or not is_full(state, host, block)))


def tell(state: SchedulerState, host: HostCopies, handover: Handover) -> None:
    """Tell where the blocks are, from the first one up to the first that is missing, and hold them."""

    def find(identity: bytes, group: int) -> int | None:
        place = host.tier.find(in_group(identity, group))
        return None if place is None else -1 - place  # 0 is what nothing reads

    table = state.kv.prefix.match_groups(handover.chain, len(handover.chain), state.kv.layout, find)
    places = [-1 - block if block else NO_PLACE for block in table]
    handover.held = [place for place in places if place != NO_PLACE]
    host.tier.hold(handover.held)
    host.transfers.counters.hand_over(state.stats.now - handover.since)
    handover.since, transfer = state.stats.now, None
    if handover.held:
        stamps = [host.transfers.stamps[place] if place != NO_PLACE else 0 for place in places]
        transfer = KVTransfer(
            state.options.replica,
            state.steps.weights,
            np.array(places, np.int32).tobytes(),
            np.array(stamps, np.int64).tobytes(),
        )
    else:
        del host.transfers.handovers[handover.request]
    state.outboxes[handover.source].tell(Prefilled(handover.request, transfer))


def release_transfer(state: SchedulerState, request: int) -> None:
    """Nobody will read its blocks any more. One that is not told yet is told nevertheless."""
    host = state.kv.host
    if host is None:
        return
    handover = host.transfers.handovers.get(request)
    if handover is not None and handover.held is not None:
        del host.transfers.handovers[request]
        host.tier.release(reversed(handover.held))


def expire_handovers(state: SchedulerState) -> None:
    """Several times a second: tell of those that have waited too long, release what was held for too long."""
    host, now = state.kv.host, state.stats.now
    if host is None:
        return
    for handover in list(host.transfers.handovers.values()):
        if handover.held is None:
            if now - handover.since >= PATIENCE:
                tell(state, host, handover)
        elif now - handover.since >= LEASE:
            release_transfer(state, handover.request)


def forget_handovers(state: SchedulerState, source: int) -> None:
    """Nobody hears of the source's requests any more."""
    host = state.kv.host
    if host is None:
        return
    for handover in [one for one in host.transfers.handovers.values() if one.source == source]:
        release_transfer(state, handover.request)
        host.transfers.handovers.pop(handover.request, None)


def clear_handovers(state: SchedulerState, host: HostCopies) -> None:
    """What is in the host's memory is gone: what waits for copies is computed again elsewhere."""
    for handover in host.transfers.handovers.values():
        if handover.held is None:
            state.outboxes[handover.source].tell(Prefilled(handover.request))
    host.transfers.handovers.clear()
    host.transfers.stamps.clear()


def transfer_of(state: SchedulerState, sequence: Sequence) -> KVTransfer | None:
    """Where blocks of its request are at a prefill replica, unless other weights have made them."""
    found = sequence.request.transfer
    return found if found is not None and found.weights == state.steps.weights else None


def transfer_places(sequence: Sequence, transfer: KVTransfer, groups: int) -> Mapping[bytes, int]:
    """The places of its blocks by what they are found by. Its hashes are known."""
    places: list[int] = np.frombuffer(transfer.places, np.int32).tolist()
    columns = zip(
        sequence.block_hashes, (places[at : at + groups] for at in range(0, len(places), groups)), strict=False
    )
    return {
        in_group(identity, group): place
        for identity, column in columns
        for group, place in enumerate(column)
        if place != NO_PLACE
    }


def stamps_of(transfer: KVTransfer, sources: Iterable[int]) -> bytes:
    """The stamps of these places. # int64 [sources]"""
    places, stamps = np.frombuffer(transfer.places, np.int32), np.frombuffer(transfer.stamps, np.int64)
    found = dict(zip(places.tolist(), stamps.tolist(), strict=True))
    return np.array([found[source] for source in sources], np.int64).tobytes()


def transfer_statistics(state: SchedulerState) -> TransferStatistics:
    host = state.kv.host
    if host is None:
        return TransferCounters().statistics(0, 0)
    held = sum([len(handover.held or ()) for handover in host.transfers.handovers.values()])
    waiting = sum([handover.held is None for handover in host.transfers.handovers.values()])
    return host.transfers.counters.statistics(held, waiting)
