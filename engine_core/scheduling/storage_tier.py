"""KV blocks in storage, in the schedule: what the host's memory holds is written there, and who waits for what is read.
Storage is the executors' disks, or a store that other servers use as well.

Down: whatever has been copied to the host's memory is written to disk in its order, a few blocks at a time and only
while none are read. What has left the host's memory by then is not. Nothing waits for it.

Back: a sequence that may enter a slot, and whose prefix goes on on disk behind what device and host have, waits until
those blocks are in the host's memory, if that is faster than to compute them. Then it finds them there as it finds any
others. It waits at most twice as long as computing them would take, so that is what a disk costs that has become slow
or hangs. Blocks on the device that the prefix begins with are not held meanwhile: like others they may go to the host's
memory.

The executors' disks outlive them. A group that has come up says what is there (`ListBlocks`); what all of its members
have can be found.

A shared store (Mooncake) lists nothing. A sequence asks it for the blocks that its prefix goes
on with (`FindBlocks`), once each time that it is queued, and waits as long as it would wait for a disk. What all
executors find is remembered in the places, as if it had been listed, and is read like blocks on disk. The store evicts
as it likes: what is no longer there by then is computed.

No token depends on any of this: what cannot be read is computed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.engine_core.kv.block_layout import NO_BLOCK
from penstock.engine_core.kv.host_tier import NO_BLOCK as NO_ROOM
from penstock.engine_core.kv.host_tier import StorageTierStatistics
from penstock.engine_core.kv.prefix_index import in_group
from penstock.engine_core.scheduling.host_tier import OVERHEAD, PATIENCE, RETRY, key_of, mean, next_number
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.state import (
    HostCopies,
    Listing,
    Load,
    Lookup,
    Rest,
    SchedulerState,
    StorageCopies,
    Store,
)
from penstock.protocol.step_columns import integers
from penstock.protocol.storage_blocks import (
    BlocksFound,
    BlocksListed,
    BlocksMoved,
    FindBlocks,
    ForgetBlocks,
    ListBlocks,
    MoveBlocks,
    StorageAnswer,
    pack_keys,
    unpack_keys,
)

MOST_STORES = 2  # messages that ask for blocks to be written, at once
STORE_BLOCKS = 32  # of one of them: a read waits for no more
MOST_LOADS = 8  # messages that ask for blocks to be read, at once: a sequence that is one too many computes
LOAD_SHARE = 2  # the part of the host's memory that is read into at once is 1 / LOAD_SHARE
LEAST_PATIENCE = 0.2  # seconds that a sequence waits for a disk at least
MOST_LOOKUPS = 8  # messages that ask a shared store for keys, at once: further sequences wait until they may ask
MOST_KEYS = 1 << 14  # of one of them


def store_ahead(state: SchedulerState) -> None:
    """Have what has come to the host's memory written to disk, as far as that is idle."""
    host = state.kv.host
    if host is None or not host.storage.tier.total or host.storage.listing is not None or host.storage.loads:
        return
    storage = host.storage
    if state.steps.pause.frozen or state.stats.now < storage.writes.until:
        return
    while storage.queue and len(storage.stores) < MOST_STORES:
        found: list[tuple[int, int, bytes]] = []
        while storage.queue and len(found) < STORE_BLOCKS:
            add_store(host, storage.queue.popleft(), found)
        if found:
            blocks, places, keys = zip(*found, strict=True)
            host.tier.hold(blocks, used=False)
            store = Store(next_number(host), blocks, places, keys)
            storage.stores[store.number] = store
            storage.storing.update(keys)
            move(state, host, store, to_storage=True)


def add_store(host: HostCopies, key: bytes, found: list[tuple[int, int, bytes]]) -> None:
    """Have a block written with these, unless it is there, or on its way."""
    storage, block = host.storage, host.tier.find(key)
    if storage.tier.touch(key) or key in storage.storing or any(key == other for _, _, other in found):
        return
    place = NO_ROOM if block is None else storage.tier.reserve(key)
    if block is None or place == NO_ROOM:
        storage.lost += 1
    else:
        found.append((block, place, key))


def load_prefix(state: SchedulerState, host: HostCopies, sequence: Sequence, table: list[int], known: int) -> bool:
    """Whether the sequence waits for blocks of the disk, which are read into the host's memory if they are not on their
    way. table: as `find_prefix` has it, with the disk's; the first `known` of its columns are on the device."""
    storage, first = host.storage, -host.tier.total
    places = {key_of(sequence, at, state.kv.layout.groups): first - 1 - block
              for at, block in enumerate(table) if block < first}  # fmt: skip
    if not places or not worth_loading(state, host, table, known):
        return False
    columns = len(table) // state.kv.layout.groups - known
    for key in places:
        if load := storage.loading.get(key):
            storage.waiting[sequence] = load
            return True
    if len(storage.loads) >= MOST_LOADS:
        return False
    held = tuple([-1 - block for block in table if first <= block < NO_BLOCK])
    host.tier.hold(held, used=False)
    room = host.tier.total // LOAD_SHARE - sum([len(load.blocks) for load in storage.loads.values()])
    rows = []
    for key, place in list(places.items())[: max(room, 1)]:
        if (block := host.tier.reserve(key)) == NO_ROOM:
            break
        rows.append((block, place, key))
    if not rows:
        host.tier.release(held)
        return False
    blocks, sources, keys = zip(*rows, strict=True)
    storage.tier.hold(sources)
    load = Load(
        next_number(host), sequence, blocks, sources, keys, held, state.stats.now + patience(state, host, columns)
    )
    storage.loads[load.number] = load
    storage.loading.update(dict.fromkeys(keys, load))
    storage.waiting[sequence] = load
    storage.load_count += 1
    move(state, host, load, to_storage=False)
    return True


def look_up(state: SchedulerState, host: HostCopies, sequence: Sequence, known: int, most: int) -> bool:
    """Whether the sequence waits to be told what a shared store has of its prefix, which is asked for once. The first
    `known` of `most` columns are on the device."""
    storage = host.storage
    if not storage.shared or not storage.tier.total or storage.listing is not None or sequence in storage.waiting:
        return False
    if state.stats.now < storage.lookups.rest.until or late(state, storage):
        return False
    seconds, room = computing(state, host, most - known), min(host.tier.total // LOAD_SHARE, MOST_KEYS)
    if seconds and seconds <= 2 * OVERHEAD:
        return False
    if len(storage.lookups.open) >= MOST_LOOKUPS:
        return True
    found = [
        key for identity in sequence.block_hashes[known:most] for group in range(state.kv.layout.groups)
        if host.tier.find(key := in_group(identity, group)) is None and state.kv.prefix.find(identity, group) is None
    ][:max(room, 1)]  # fmt: skip
    if not found:
        return False
    lookup = Lookup(next_number(host), tuple(found), state.stats.now + patience(state, host, most - known))
    storage.lookups.open[lookup.number] = storage.waiting[sequence] = lookup
    storage.lookups.count += 1
    host.messages.append(FindBlocks(lookup.number, state.epoch, pack_keys(found)))
    return True


def computing(state: SchedulerState, host: HostCopies, columns: int) -> float:
    """Seconds that computing so many columns takes; 0: that is not known."""
    return columns * state.options.block_size * host.position_seconds


def late(state: SchedulerState, storage: StorageCopies) -> bool:
    """Whether it is slower than computing: what it still has to answer is waited for no more."""
    return any(state.stats.now >= job.until for jobs in (storage.loads, storage.lookups.open) for job in jobs.values())


def worth_loading(state: SchedulerState, host: HostCopies, table: list[int], known: int) -> bool:
    """Whether reading, behind what is read already, is faster than computing, as far as both were measured."""
    storage, seconds = host.storage, computing(state, host, len(table) // state.kv.layout.groups - known)
    if late(state, storage):
        return False
    if not seconds or not storage.block_seconds or state.stats.now - storage.measured > RETRY:
        return True
    ahead = sum([len(load.blocks) for load in storage.loads.values()])
    reads = ahead + sum([block < -host.tier.total for block in table])
    fetches = sum([block < NO_BLOCK for block in table])
    return seconds > 2 * OVERHEAD + reads * storage.block_seconds + fetches * host.block_seconds


def patience(state: SchedulerState, host: HostCopies, columns: int) -> float:
    """Seconds that a sequence waits for blocks in place of which it would compute so many columns."""
    seconds = computing(state, host, columns)
    return min(PATIENCE, max(LEAST_PATIENCE, 2 * seconds)) if seconds else PATIENCE


def waits_for_storage(state: SchedulerState, sequence: Sequence) -> bool:
    """Whether a waiting sequence waits for blocks from the disk, or for what a shared store has."""
    host = state.kv.host
    job = None if host is None else host.storage.waiting.get(sequence)
    return job is not None and not job.done and state.stats.now < job.until


def may_load(host: HostCopies, sequence: Sequence) -> bool:
    """Whether a sequence that does not wait for the disk may do so: it was not read for it since it was last queued."""
    job = host.storage.waiting.get(sequence)
    fresh = job is None or (job.done and (isinstance(job, Lookup) or job.sequence is not sequence))
    return host.storage.tier.findable > 0 and fresh


def storage_answered(state: SchedulerState, message: StorageAnswer, executor: int) -> None:
    """An executor has done what it was asked for, or says what it has. What belongs to another epoch is ignored."""
    host = state.kv.host
    if host is None:
        return
    if isinstance(message, BlocksListed):
        listed(state, host.storage, message, executor)
    elif isinstance(message, BlocksFound):
        blocks_found(state, host.storage, message, executor)
    elif (load := host.storage.loads.get(message.number)) is not None:
        load.seconds = max(load.seconds, message.seconds)
        if all_moved(state, load, message, executor):
            finish_load(state, host, load)
    elif (store := host.storage.stores.get(message.number)) is not None and all_moved(state, store, message, executor):
        finish_store(state, host, store)
    store_ahead(state)


def blocks_found(state: SchedulerState, storage: StorageCopies, message: BlocksFound, executor: int) -> None:
    """Once every executor has answered, what all of their stores have can be found."""
    if (lookup := storage.lookups.open.get(message.number)) is None:
        return
    lookup.answered.add(executor)
    lookup.missing.update(integers(message.missing).tolist())
    lookup.failed |= message.failed
    if len(lookup.answered) < state.options.copiers:
        return
    del storage.lookups.open[lookup.number]
    lookup.done = True
    state.refused = None
    if lookup.failed:
        storage.lookups.failed += 1
        storage.lookups.rest.note(state.stats.now, failed=True)
    if gone := [lookup.keys[number] for number in lookup.missing if storage.tier.find(lookup.keys[number]) is not None]:
        storage.tier.forget(gone)  # it has been evicted there
    for number, key in enumerate(lookup.keys):
        if number in lookup.missing or storage.tier.find(key) is not None:
            continue
        if (place := storage.tier.reserve(key)) != NO_ROOM:
            storage.tier.publish(place)


def all_moved(state: SchedulerState, job: Load | Store, message: BlocksMoved, executor: int) -> bool:
    job.answered.add(executor)
    job.failed.update(integers(message.failed).tolist())
    return len(job.answered) == state.options.copiers


def finish_load(state: SchedulerState, host: HostCopies, load: Load) -> None:
    """The blocks are in the host's memory and can be found there. What could not be read is found nowhere."""
    storage = host.storage
    del storage.loads[load.number]
    load.done = True
    for row, (key, block) in enumerate(zip(load.keys, load.blocks, strict=True)):
        del storage.loading[key]
        if row in load.failed:
            host.tier.drop(block)
        else:
            host.tier.publish(block)
    storage.tier.release(load.places)
    host.tier.release(load.held)
    storage.tier.forget([load.keys[row] for row in load.failed])
    storage.failed += len(load.failed)
    storage.loaded += len(load.keys) - len(load.failed)
    if len(load.failed) < len(load.keys):
        storage.block_seconds = mean(storage.block_seconds, load.seconds / len(load.keys))
        storage.measured = state.stats.now
    storage.lookups.rest.note(state.stats.now, failed=len(load.failed) == len(load.keys))
    state.refused = None


def finish_store(state: SchedulerState, host: HostCopies, store: Store) -> None:
    """The blocks are on disk and can be found there. Where none is, the disk has a rest, each time twice as long, and
    they are written then if they are still in the host's memory."""
    storage = host.storage
    del storage.stores[store.number]
    storage.storing.difference_update(store.keys)
    host.tier.release(store.blocks)
    for row, place in enumerate(store.places):
        if row in store.failed:
            storage.tier.drop(place)
        else:
            storage.stored += storage.tier.publish(place)
    storage.failed += len(store.failed)
    storage.writes.note(state.stats.now, failed=len(store.failed) == len(store.keys))
    if len(store.failed) == len(store.keys):
        storage.queue.extendleft(reversed(store.keys))


def listed(state: SchedulerState, storage: StorageCopies, message: BlocksListed, executor: int) -> None:
    """Once every executor has said what it has, all that all of them have can be found."""
    listing = storage.listing
    if listing is None or message.number != listing.number:
        return
    places = integers(message.places).tolist()
    listing.found.setdefault(executor, {}).update(zip(places, unpack_keys(message.keys), strict=True))
    if not message.last:
        return
    listing.complete.add(executor)
    if len(listing.complete) < state.options.copiers:
        return
    storage.listing = None
    first, *others = listing.found.values()
    storage.tier.adopt({
        place: key for place, key in first.items()
        if place < storage.tier.total and all(other.get(place) == key for other in others)
    })  # fmt: skip


def distrust_storage(state: SchedulerState, identities: Iterable[bytes]) -> None:
    """Forget what columns of a sequence that failed have on disk."""
    host = state.kv.host
    if host is None or not host.storage.tier.total:
        return
    storage = host.storage
    keys = {in_group(identity, group) for identity in identities for group in range(state.kv.layout.groups)}
    places = [place for key in keys if (place := storage.tier.find(key)) is not None]
    for store in storage.stores.values():
        places += [place for place, key in zip(store.places, store.keys, strict=True) if key in keys]
    storage.tier.forget(keys)
    packed = pack_keys(keys) if storage.shared else b""  # what is not remembered may be there all the same
    if places or packed:
        host.messages.append(ForgetBlocks(state.epoch, np.array(places, np.int32).tobytes(), packed))


def forget_storage(state: SchedulerState) -> None:
    """Nothing on disk can be found any more: what executors compute changes."""
    if clear_storage(state, None) and (host := state.kv.host) is not None:
        host.messages.append(ForgetBlocks(state.epoch, everything=True))


def list_storage(state: SchedulerState, blocks: int | None = None) -> None:
    """New executors say what is on their disks, which have so many places if their number changed."""
    if clear_storage(state, blocks) and (host := state.kv.host) is not None:
        host.storage.listing = Listing(next_number(host))
        host.messages.append(ListBlocks(host.storage.listing.number, state.epoch))


def clear_storage(state: SchedulerState, blocks: int | None) -> bool:
    """The host's memory has been cleared, and no job will be answered. Whether there is a disk."""
    host = state.kv.host
    if host is None:
        return False
    storage = host.storage
    for load in storage.loads.values():
        load.done = True
    for lookup in storage.lookups.open.values():
        lookup.done = True
    storage.tier.clear(storage.tier.total if blocks is None else blocks)
    for one in (storage.loads, storage.stores, storage.lookups.open, storage.loading, storage.storing, storage.queue):
        one.clear()
    storage.listing, storage.writes, storage.lookups.rest = None, Rest(), Rest()
    return storage.tier.total > 0


def check_storage(state: SchedulerState) -> tuple[str, ...]:
    """What is wrong with the accounts of the disk, in words."""
    host = state.kv.host
    if host is None:
        return ()
    holds = [place for load in host.storage.loads.values() for place in load.places]
    return host.storage.tier.check(
        [*holds, *(place for store in host.storage.stores.values() for place in store.places)]
    )


def storage_statistics(state: SchedulerState) -> StorageTierStatistics:
    """Counters as of now."""
    host = state.kv.host
    if host is None:
        return StorageTierStatistics()
    storage, tier = host.storage, host.storage.tier
    total, findable, evicted = (0, 0, 0) if storage.shared else (tier.total, tier.findable, tier.evicted)
    return StorageTierStatistics(
        total, findable, storage.stored, storage.lost, storage.loaded, evicted, storage.failed, storage.load_count,
        storage.lookups.count, storage.lookups.failed,
    )  # fmt: skip


def move(state: SchedulerState, host: HostCopies, job: Load | Store, *, to_storage: bool) -> None:
    table = np.array([job.blocks, job.places], np.int32).T.tobytes()
    host.messages.append(
        MoveBlocks(number=job.number, epoch=state.epoch, to_storage=to_storage, blocks=table, keys=pack_keys(job.keys))
    )
