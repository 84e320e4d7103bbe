"""Prefill and decode at different replicas: what one hands over, and what the other finds of it.

A request with `prefill` ends here with its next token. Its blocks are copied to the host's memory while its prompt is
computed, as every block is that steps of a prefill replica have filled (host_tier.py). With the last token the last
copies are asked for, and `Prefilled` tells which blocks of that memory all of them are, or will be. They are held until
the tokenizer says that they have been read, LEASE seconds at most. Whatever of them is gone by then, or has no room, is
computed by the replica that decodes.

No right token depends on the hold: executors of the other replica compare stamps before a copy and behind it, so blocks
may be given away at any time, and their executor or its scheduler may die.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.engine_core.kv.block_layout import first_column
from penstock.engine_core.kv.prefix_index import in_group
from penstock.engine_core.scheduling.host_tier import MOST_BLOCKS, add_pair, ask_copies
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.state import Handover, HostCopies, SchedulerState
from penstock.engine_core.scheduling.statistics import TransferCounters, TransferStatistics
from penstock.protocol.messages import KVTransfer, Prefilled

LEASE = 30.0  # seconds that blocks are held for a request that has not been heard of
NO_PLACE = -1


def hand_over(state: SchedulerState, sequence: Sequence) -> None:
    """The last sequence of a request has its token, and the request goes on elsewhere."""
    host, request, transfer = state.kv.host, sequence.request, None
    if host is not None:
        # What several sequences have in common is the prompt. The last token's keys and values are not there.
        known = request.prompt_tokens if request.message.n > 1 else len(sequence.tokens) - 1
        chain = sequence.block_hashes[: known // state.options.block_size]
        release_transfer(state, request.message.id)
        if not state.steps.pause.frozen:
            copy_rest(state, host, chain)  # which may take the place of others
        places = places_of(state, host, chain)
        host.transfers.counters.handed_over += 1
        held = [place for place in places if place != NO_PLACE]
        if held:
            host.tier.hold(held)
            host.transfers.handovers[request.message.id] = Handover(request.source, state.stats.now, held)
            stamps = [host.transfers.stamps[place] if place != NO_PLACE else 0 for place in places]
            transfer = KVTransfer(
                state.options.replica,
                state.steps.weights,
                np.array(places, np.int32).tobytes(),
                np.array(stamps, np.int64).tobytes(),
                host.transfers.addresses,
            )
    state.outboxes[request.source].tell(Prefilled(request.message.id, transfer))


def copy_rest(state: SchedulerState, host: HostCopies, chain: list[bytes]) -> None:
    """Have those blocks of a chain copied that are not. The last step has filled them, or they have been there before
    the request."""
    kv, size = state.kv, state.options.block_size
    pairs: list[tuple[int, int]] = []
    for group, window in enumerate(kv.layout.windows):
        for identity in chain[first_column(len(chain) * size, window, size) :]:
            block = kv.prefix.find(identity, group)
            if block is None or host.tier.find(in_group(identity, group)) is not None:
                continue
            if host.written.get(block, 0) <= state.steps.applied:  # the step that fills it is over
                add_pair(kv, host, block, pairs)
    for first in range(0, len(pairs), MOST_BLOCKS):
        ask_copies(state, host, pairs[first : first + MOST_BLOCKS])


def places_of(state: SchedulerState, host: HostCopies, chain: list[bytes]) -> list[int]:
    """Where the blocks are, or will be, from the first one up to the first that is missing. What is still to be copied
    is given to nobody before."""
    kv = state.kv
    coming: dict[int, int] = {}  # blocks on the device by place

    def find(identity: bytes, group: int) -> int | None:
        key, block = in_group(identity, group), kv.prefix.find(identity, group)
        place = host.tier.find(key)
        if place is None and block is not None and block in kv.prefix.copying:
            place = host.spilling[key]
            coming[place] = block
        return None if place is None else -1 - place  # 0 is what nothing reads

    table = kv.prefix.match_groups(chain, len(chain), kv.layout, find)
    places = [-1 - block if block else NO_PLACE for block in table]
    for block in [coming[place] for place in places if place in coming]:
        kv.pool.share((block,))
        host.spills[kv.prefix.copying[block]].held.append(block)
    return places


def release_transfer(state: SchedulerState, request: int) -> None:
    """Nobody will read its blocks any more."""
    host = state.kv.host
    handover = None if host is None else host.transfers.handovers.pop(request, None)
    if host is not None and handover is not None:
        host.tier.release(reversed(handover.held))


def expire_handovers(state: SchedulerState, source: int | None = None) -> None:
    """Release what was held for too long, or for a source of whose requests nobody hears any more."""
    handovers = {} if state.kv.host is None else state.kv.host.transfers.handovers
    for request, one in list(handovers.items()):
        if one.source == source or state.stats.now - one.since >= LEASE:
            release_transfer(state, request)


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


def transfer_statistics(state: SchedulerState) -> TransferStatistics:
    if state.kv.host is None:
        return TransferCounters().statistics(0)
    transfers = state.kv.host.transfers
    return transfers.counters.statistics(sum([len(handover.held) for handover in transfers.handovers.values()]))
