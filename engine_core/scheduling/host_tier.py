"""KV blocks in the host's memory, in the schedule: which are copied there, and who waits for which to come back.

Out: only where blocks are short are any copied at all: `reserve` of them, free ones included, can go at once without a
loss. Idle blocks that go next are copied first, then those that running sequences have filled: under load a block is
idle for less time than its copy takes. While nothing runs, all idle ones are. Nothing ever waits for a copy: a block
whose copy is not done may be taken all the same, and the copy is dropped. Only blocks whose copies other replicas read
as they are made are held until then.

Back: a sequence that may enter a slot, and whose prefix goes on in the host's memory behind what the device has, waits
for those blocks if that is faster than to compute them. Others are planned past it meanwhile. The blocks are held until
all executors have answered, and so is what they stand behind; then they are idle like those of a sequence that ended,
and the sequence finds them as it finds any prefix. It has blocks fetched once: where they are gone by the time it has
its turn, or where no answer comes, it computes.

No token depends on any of this: what is lost with an executor, dropped or not found is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict

import msgspec
import numpy as np

from penstock.engine_core.kv.block_layout import NO_BLOCK
from penstock.engine_core.kv.host_tier import NO_BLOCK as NO_ROOM
from penstock.engine_core.kv.host_tier import HostTierStatistics
from penstock.engine_core.kv.prefix_index import in_group
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.state import Fetch, HostCopies, InFlightStep, KVState, SchedulerState, Spill
from penstock.protocol.messages import BlocksAddresses, KVTransfer
from penstock.protocol.steps import BlocksCopied, CopyBlocks, copy_stamp

MOST_SPILLS = 2  # messages that ask for copies to the host's memory, at once: links have room for few
MOST_BLOCKS = 512  # of one of them
FEW = 64  # the part of the reserve below which blocks that sequences have filled wait for more
PATIENCE = 5.0  # seconds that a sequence waits for blocks
OVERHEAD = 0.002  # seconds that a fetch takes beside its copies: messages, and the steps that it waits for
LONG_CHUNKS = 256  # positions of prompts that a step has to have for its time to tell what one of them takes
RETRY = 30.0  # seconds after which a measurement says nothing any more: what was too slow is tried again
MEMORY = 1 / 8  # weight of one measurement in a running mean
FindPlace = Callable[[bytes], int | None]  # a block in the host's memory by what it is found by


def copy_ahead(state: SchedulerState) -> None:
    """Have the blocks that go next copied to the host's memory, as far as they are not there, and what sequences have
    filled."""
    kv, host = state.kv, state.kv.host
    if host is None or state.steps.pause.frozen or len(host.spills) >= MOST_SPILLS:
        return
    pairs: list[tuple[int, int]] = []
    eager = host.transfers.eager or host.storage.shared  # others read what sequences have filled
    rests = not state.requests and not state.steps.in_flight
    wanted = MOST_BLOCKS if rests and kv.pool.free < host.reserve else host.reserve - kv.pool.ready
    for block in kv.pool.leave(min(wanted, MOST_BLOCKS)):
        if not host.tier.touch(kv.prefix.key(block)):
            add_pair(kv, host, block, pairs)
    if eager or (kv.pool.ready < host.reserve and len(host.filled) > host.reserve // FEW):
        add_filled(kv, host, state.steps.applied, pairs)
    ask_copies(state, host, pairs)


def ask_copies(state: SchedulerState, host: HostCopies, pairs: list[tuple[int, int]]) -> None:
    """Have these copies made, if there are any, by one message."""
    if not pairs:
        return
    kv, blocks = state.kv, [block for block, _ in pairs]
    spill = Spill(next_number(host), tuple(pairs), tuple([kv.prefix.key(block) for block in blocks]))
    kv.prefix.copying.update(dict.fromkeys(blocks, spill.number))
    host.spills[spill.number] = spill
    if host.transfers.eager:
        stamp = copy_stamp(state.epoch, spill.number)
        host.transfers.stamps.update([(place, stamp) for _, place in pairs])
    send(state, host, spill.number, pairs, to_host=True)


def add_filled(kv: KVState, host: HostCopies, applied: int, pairs: list[tuple[int, int]]) -> None:
    """Have blocks copied with these that steps up to `applied` have filled, and that are not there."""
    filled = host.filled
    while len(pairs) < MOST_BLOCKS and filled and filled[0][0] <= applied:
        step, block = filled.popleft()
        if host.written[block] != step:
            continue  # it has been given away and filled again, which may not be over
        if kv.prefix.named(block) and host.tier.find(kv.prefix.key(block)) is None:
            add_pair(kv, host, block, pairs)


def note_filled(host: HostCopies, step: int, blocks: Iterable[int]) -> None:
    """These blocks are full once this step has been applied; none of their positions is written later."""
    for block in blocks:
        if block != NO_BLOCK:
            host.written[block] = step
            host.filled.append((step, block))


def add_pair(kv: KVState, host: HostCopies, block: int, pairs: list[tuple[int, int]]) -> None:
    """Have a block copied with these, unless its like is on the way already, or there is no room."""
    key = kv.prefix.key(block)
    if key in host.spilling:
        return
    place = host.tier.reserve(key)
    if place == NO_ROOM:
        host.totals.lost += 1
    else:
        host.spilling[key] = place
        pairs.append((block, place))


def fetch_prefix(
    state: SchedulerState, sequence: Sequence, table: list[int], transfer: KVTransfer | None = None
) -> None:
    """Have the host's blocks of a table, as `find_prefix` has it, copied to the device, behind those that are there.
    The sequence waits for them. There is room. transfer: they are those of another replica's host."""
    kv, host = state.kv, state.kv.host
    assert host is not None
    places = [place for place, block in enumerate(table) if block < 0]
    sources = [-1 - table[place] for place in places]
    keys = tuple([key_of(sequence, at, kv.layout.groups) for at in places])
    kv.pool.share([block for block in table if block > NO_BLOCK])
    blocks = kv.pool.take(len(places))
    kv.owners[blocks] = 0
    for place, block in zip(places, blocks, strict=True):
        table[place] = block
    if transfer is None:
        host.tier.hold(sources)
    held = [block for block in table if block != NO_BLOCK]
    fetch = Fetch(next_number(host), sequence, tuple(blocks), tuple(sources), keys, held, state.stats.now, transfer)
    host.fetches[fetch.number] = fetch
    host.fetching.update(dict.fromkeys(keys, fetch))
    host.waiting[sequence] = fetch
    host.totals.fetches += transfer is None
    send(state, host, fetch.number, list(zip(blocks, sources, strict=True)), to_host=False, transfer=transfer)


def find_anywhere(host: HostCopies) -> FindPlace:
    """Finds blocks in the host's memory, or on disk, whose places are counted behind the host's blocks."""

    def find(key: bytes) -> int | None:
        place = host.tier.find(key)
        if place is None and (stored := host.storage.tier.find(key)) is not None:
            return host.tier.total + stored
        return place

    return find


def find_prefix(state: SchedulerState, find_place: FindPlace, sequence: Sequence, known: int, most: int) -> list[int]:
    """The table of the longest prefix of at most `most` blocks that is on the device or where `find_place` finds it,
    as -1 - place. Its first `known` columns are on the device."""
    kv = state.kv

    def find(identity: bytes, group: int) -> int | None:
        block = kv.prefix.find(identity, group)
        if block is None and (place := find_place(in_group(identity, group))) is not None:
            return -1 - place
        return block

    found = kv.prefix.match_groups(sequence.block_hashes, most, kv.layout, find, known)
    if kv.recurrent is None:
        return found
    unit = kv.recurrent.unit // state.options.block_size
    return found[: kv.recurrent.snapshots.longest(sequence.block_hashes, len(found), unit)[0]]


def key_of(sequence: Sequence, at: int, groups: int) -> bytes:
    """What the block at a place of a table is found by."""
    return in_group(sequence.block_hashes[at // groups], at % groups)


def joins(state: SchedulerState, host: HostCopies, sequence: Sequence, table: list[int]) -> bool:
    """Whether a block of the table is being fetched for another sequence: then this one waits for it as well."""
    for at, block in enumerate(table):
        if block < 0 and (fetch := host.fetching.get(key_of(sequence, at, state.kv.layout.groups))):
            host.waiting[sequence] = fetch
            return True
    return False


def worth_fetching(state: SchedulerState, host: HostCopies, table: list[int], known: int) -> bool:
    """Whether fetching is faster than computing, as far as both were measured. known: columns that are there."""
    blocks = sum([block < 0 for block in table])
    positions = (len(table) // state.kv.layout.groups - known) * state.options.block_size
    if not blocks or positions <= 0:
        return False
    copies = blocks * host.block_seconds if state.stats.now - host.measured <= RETRY else 0.0
    return not host.position_seconds or positions * host.position_seconds > OVERHEAD + copies


def waits_for_blocks(state: SchedulerState, sequence: Sequence) -> bool:
    """Whether a waiting sequence waits for blocks from the host's memory."""
    host = state.kv.host
    fetch = None if host is None else host.waiting.get(sequence)
    return fetch is not None and not fetch.done and state.stats.now - fetch.since < PATIENCE


def may_wait(host: HostCopies, sequence: Sequence) -> bool:
    """Whether a sequence that does not wait for blocks may do so: none were fetched for it since it was last queued."""
    fetch = host.waiting.get(sequence)
    return fetch is None or (fetch.done and fetch.sequence is not sequence)


def copying_tables(state: SchedulerState) -> list[list[int]]:
    """Blocks on the device that copies hold."""
    host = state.kv.host
    if host is None:
        return []
    return [fetch.table for fetch in host.fetches.values()] + [spill.held for spill in host.spills.values()]


def copying_blocks(state: SchedulerState) -> int:
    """How many these are, at most."""
    return sum([len(table) for table in copying_tables(state)])


def forget_waiting(state: SchedulerState, sequence: Sequence) -> None:
    """The sequence waits no longer: it has a slot, or has ended."""
    if state.kv.host is not None:
        state.kv.host.waiting.pop(sequence, None)
        state.kv.host.storage.waiting.pop(sequence, None)


def blocks_copied(state: SchedulerState, message: BlocksCopied, executor: int) -> None:
    """An executor has made copies; once all have, they can be used. What is said of another epoch is ignored."""
    host = state.kv.host
    copy = None if host is None else host.fetches.get(message.number) or host.spills.get(message.number)
    if host is None or copy is None:
        return
    copy.answered.add(executor)
    if isinstance(copy, Fetch):
        copy.stale |= message.stale
    if len(copy.answered) < state.options.copiers:
        return
    if isinstance(copy, Fetch):
        if copy.transfer is None:
            host.block_seconds = mean(host.block_seconds, message.seconds / len(copy.blocks))
            host.measured = state.stats.now
        else:
            host.transfers.counters.fetch(len(copy.blocks), state.stats.now - copy.since, stale=copy.stale)
        finish_fetch(state.kv, host, copy)
    else:
        finish_spill(state.kv, host, copy)
    state.refused = None
    copy_ahead(state)


def finish_fetch(kv: KVState, host: HostCopies, fetch: Fetch) -> None:
    """The blocks are there: they can be found, and are idle."""
    del host.fetches[fetch.number]
    fetch.done, own = True, fetch.transfer is None
    for key, block, source in zip(fetch.keys, fetch.blocks, fetch.sources, strict=True):
        del host.fetching[key]
        if host.tier.find(key) == source if own else not fetch.stale:  # it has not been forgotten meanwhile
            kv.prefix.name(key, block)
    if own:
        host.tier.release(reversed(fetch.sources))
        host.totals.fetched += len(fetch.blocks)
    else:
        fetch.sequence.request.transfer = None
    kv.pool.release(fetch.table)


def finish_spill(kv: KVState, host: HostCopies, spill: Spill) -> None:
    """The copies are there, and worth something if their blocks held the same all the time."""
    del host.spills[spill.number]
    for (block, place), key in zip(spill.blocks, spill.keys, strict=True):
        del host.spilling[key]
        if kv.prefix.copying.get(block) != spill.number:
            host.tier.drop(place)
            host.totals.lost += 1
            continue
        del kv.prefix.copying[block]
        if host.tier.publish(place):
            host.totals.copied += 1
            if host.storage.tier.total:
                host.storage.queue.append(key)
    kv.pool.release(spill.held)


def distrust_copies(state: SchedulerState, identities: Iterable[bytes]) -> None:
    """Forget what columns of a sequence that failed have in the host's memory."""
    if state.kv.host is not None:
        groups = range(state.kv.layout.groups)
        state.kv.host.tier.forget([in_group(identity, group) for identity in identities for group in groups])


def clear_copies(state: SchedulerState, blocks: int | None = None, addresses: BlocksAddresses | None = None) -> None:
    """The host's memory is empty: its executors began anew, with so many blocks if their number changed, or what they
    have computed changes. No copy will be answered."""
    host = state.kv.host
    if host is None:
        return
    for fetch in host.fetches.values():
        fetch.done = True
    host.tier.clear(host.tier.total if blocks is None else blocks)
    for one in (host.fetches, host.spills, host.fetching, host.spilling, host.messages, host.filled, host.written):
        one.clear()
    host.transfers.handovers.clear()
    host.transfers.stamps.clear()
    if addresses is not None:
        host.transfers.addresses = addresses


def observe(host: HostCopies, inflight: InFlightStep, seconds: float) -> None:
    """What a step with much of prompts took on the device."""
    positions = sum([chunk.count for chunk in inflight.chunks])
    if seconds and positions >= LONG_CHUNKS:
        host.position_seconds = mean(host.position_seconds, seconds / positions)


def check_copies(state: SchedulerState) -> tuple[str, ...]:
    """What is wrong with the accounts of the host's memory, in words."""
    host = state.kv.host
    if host is None:
        return ()
    holds = [source for fetch in host.fetches.values() if fetch.transfer is None for source in fetch.sources]
    holds += [place for spill in host.spills.values() for _, place in spill.blocks]
    holds += [block for load in host.storage.loads.values() for block in (*load.blocks, *load.held)]
    holds += [block for store in host.storage.stores.values() for block in store.blocks]
    holds += [place for handover in host.transfers.handovers.values() for place in handover.held]
    return host.tier.check(holds)


def host_statistics(state: SchedulerState) -> HostTierStatistics:
    host = state.kv.host
    if host is None:
        return HostTierStatistics()
    return msgspec.structs.replace(host.tier.statistics(), **asdict(host.totals))


def send(
    state: SchedulerState, host: HostCopies, number: int, blocks: list[tuple[int, int]], *, to_host: bool,
    transfer: KVTransfer | None = None,
) -> None:  # fmt: skip
    message = CopyBlocks(number=number, epoch=state.epoch, to_host=to_host, blocks=np.array(blocks, np.int32).tobytes())
    if transfer is not None:
        stamps = stamps_of(transfer, [place for _, place in blocks])
        message = msgspec.structs.replace(
            message, replica=transfer.replica, stamps=stamps, addresses=transfer.addresses
        )
    host.messages.append(message)


def stamps_of(transfer: KVTransfer, sources: Iterable[int]) -> bytes:
    """The stamps of these places. # int64 [sources]"""
    places, stamps = np.frombuffer(transfer.places, np.int32), np.frombuffer(transfer.stamps, np.int64)
    found = dict(zip(places.tolist(), stamps.tolist(), strict=True))
    return np.array([found[source] for source in sources], np.int64).tobytes()


def next_number(host: HostCopies) -> int:
    host.number += 1
    return host.number


def mean(before: float, found: float) -> float:
    """A running mean, which begins with the first measurement."""
    return before + MEMORY * (found - before) if before else found
