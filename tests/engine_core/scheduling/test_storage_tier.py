"""Blocks on disk, one rule at a time: what is written and when, who waits for what, and what is of no more use."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.engine_core.kv.host_tier import StorageTierStatistics
from penstock.engine_core.scheduling import storage_tier
from penstock.engine_core.scheduling.host_tier import OVERHEAD, RETRY
from penstock.engine_core.scheduling.state import HostCopies, StorageCopies
from penstock.engine_core.scheduling.storage_tier import LEAST_PATIENCE, distrust_storage
from penstock.protocol.messages import Finish
from penstock.protocol.step_columns import move_table
from penstock.protocol.storage_blocks import (
    BlocksFound,
    BlocksListed,
    BlocksMoved,
    FindBlocks,
    ForgetBlocks,
    ListBlocks,
    MoveBlocks,
    pack_keys,
    unpack_keys,
)
from tests.engine_core.scheduling.test_host_tier import FIRST, SECOND, THIRD, WORLD, ask, cached, finish
from tests.sim.adapters import GROUP
from tests.sim.server import Server, chunks


def server(**fields: object) -> Server:
    made = Server(replace(WORLD, disk_blocks=100, **fields))  # type: ignore[arg-type]
    made.copy()
    return made


def stand(made: Server) -> StorageTierStatistics:
    return made.scheduler.statistics().storage_tier


def host(made: Server) -> HostCopies:
    found = made.scheduler._state.kv.host
    assert found is not None
    return found


def storage(made: Server) -> StorageCopies:
    return host(made).storage


def die(made: Server, **fields: object) -> None:
    """The executors are gone, and their successors are there."""
    made.world = replace(made.world, **fields)  # type: ignore[arg-type]
    epoch = made.scheduler.epoch + 1
    made.scheduler.restart(epoch, made.now, disk_blocks=made.world.disk_blocks)
    made.executor = made.new_executor(epoch)
    made.results.clear()


def dead(**fields: object) -> Server:
    """A server whose executors have died and come again: device and host hold nothing, and the disk the first prompt's
    beginning."""
    made = server(**fields)
    for prompt in (FIRST, SECOND, THIRD):
        ask(made, prompt)
    assert stand(made).stored > 8
    die(made)
    made.copy()
    assert made.world.kv_store or stand(made).findable > 8
    return made


def asked(made: Server) -> list[MoveBlocks]:
    """What executors are to read or write, and have not been told."""
    return [message for message in made.scheduler.copy_messages() if isinstance(message, MoveBlocks)]


def take(made: Server) -> None:
    """Executors have got what there is to do."""
    made.executor.host.take(made.scheduler, random.Random(0))


def test_what_comes_to_the_hosts_memory_is_written() -> None:
    made = server(blocks=24)
    ask(made, FIRST)
    assert stand(made).stored == 0
    ask(made, SECOND)
    assert stand(made).stored == made.scheduler.statistics().host_tier.copied > 0


def test_nothing_is_written_twice() -> None:
    made = server()
    for prompt in (FIRST, SECOND, THIRD, FIRST, SECOND, THIRD):
        ask(made, prompt)
    assert made.storage.stored == GROUP * stand(made).stored
    assert stand(made).stored == stand(made).findable


def test_a_prefix_comes_back_from_another_life_and_counts_as_cached() -> None:
    made = dead()
    number = made.submit([*FIRST, 1, 2])
    assert made.plan() is None, "it waits for its blocks"
    assert made.scheduler.statistics().reasons == {"disk": 1}
    assert made.scheduler.statistics().pool.held == 0, "the device has them once they are in the host's memory"
    made.copy()
    assert made.plan() is None
    assert made.scheduler.statistics().reasons == {"host": 1}
    made.copy()
    assert chunks(made.step()) == [(0, 40, 2, 1)]
    finish(made)
    assert cached(made, number) == 40
    assert (stand(made).loads, stand(made).loaded, stand(made).failed) == (1, 10, 0)
    made.record.verify(made.lives[number], made.world, False, False)


def test_others_are_planned_past_it() -> None:
    made = dead()
    made.submit([*FIRST, 1, 2])
    other = made.submit([9, 9, 9])
    assert [chunk[2] for chunk in chunks(made.step())] == [3]
    assert made.seen(other).tokens
    finish(made)


def test_two_that_need_the_same_wait_for_one_read() -> None:
    made = dead()
    numbers = [made.submit([*FIRST, extra]) for extra in (1, 2)]
    assert made.plan() is None
    finish(made)
    assert stand(made).loads == 1
    assert [cached(made, number) for number in numbers] == [40, 40]


def test_the_answer_of_every_executor_is_awaited() -> None:
    made = dead()
    made.submit([*FIRST, 1])
    assert made.plan() is None
    (load,) = storage(made).loads.values()
    take(made)
    for executor in range(GROUP - 1):
        made.scheduler.blocks_copied(BlocksMoved(load.number), executor, 0.0)
        made.scheduler.blocks_copied(BlocksMoved(load.number), executor, 0.0)
        assert not load.done
        assert made.scheduler.plan(0.0) is None
    made.scheduler.blocks_copied(BlocksMoved(load.number), GROUP - 1, 0.0)
    assert load.done


def test_what_one_executor_cannot_read_is_computed() -> None:
    made = dead()
    number = made.submit([*FIRST, 1, 2])
    assert made.plan() is None
    (load,) = storage(made).loads.values()
    take(made)
    rows = np.array([4, 7], np.int32).tobytes()
    for executor in range(GROUP):
        made.scheduler.blocks_copied(BlocksMoved(load.number, 0.1, rows if executor == 1 else b""), executor, 0.0)
    made.executor.host.storage.jobs.clear()
    for block, key in zip(load.blocks, load.keys, strict=True):
        made.executor.host.blocks[block] = next(
            (record.content for record in made.storage.records[0].values() if record.key == key), None
        )
    assert (stand(made).loaded, stand(made).failed) == (8, 2)
    assert not any(storage(made).tier.find(load.keys[row]) for row in (4, 7)), "they are not read again"
    finish(made)
    assert cached(made, number) == 16, "up to the first that is not there"


def test_where_no_answer_comes_it_computes() -> None:
    made = dead()
    host(made).position_seconds = 0.02
    number = made.submit([*FIRST, 1])
    assert made.plan() is None
    made.now += 1.5
    assert made.plan() is None
    made.now += 0.2
    assert chunks(made.step())[0][1] == 0, "it has waited twice as long as computing takes"
    finish(made)
    assert made.seen(number).finish == Finish.LENGTH


def test_a_fast_device_has_a_disk_some_time() -> None:
    made = dead()
    host(made).position_seconds = 1e-3
    made.submit([*FIRST, 1])
    assert made.plan() is None
    made.now += LEAST_PATIENCE - 0.01
    assert made.plan() is None
    made.now += 0.02
    assert made.plan() is not None


def test_a_disk_that_is_slower_than_computing_is_left_alone_for_a_while() -> None:
    made = dead()
    host(made).position_seconds, storage(made).block_seconds = 2e-3, 9e-3
    number = made.submit([*FIRST, 1])
    assert made.plan() is not None
    made.apply()
    finish(made)
    assert cached(made, number) == 0
    assert stand(made).loads == 0
    die(made)
    made.copy()
    made.now += RETRY + 1
    made.submit([*FIRST, 2])
    assert made.plan() is None, "it may be faster by now"
    finish(made)


def test_a_disk_that_has_not_answered_in_time_is_asked_for_nothing_more() -> None:
    made = dead()
    host(made).position_seconds = 1e-3
    made.submit([*FIRST, 1])
    assert made.plan() is None
    made.now += LEAST_PATIENCE + 0.01
    assert made.plan() is not None
    made.apply()
    made.submit([*SECOND, 1])
    assert made.plan() is not None, "it computes at once"
    assert stand(made).loads == 1


def test_what_is_read_before_counts() -> None:
    made = dead()
    host(made).position_seconds, storage(made).block_seconds, storage(made).measured = 2e-3, 5e-3, made.now
    state, table = made.scheduler._state, [-1 - host(made).tier.total] * 10
    assert 40 * 2e-3 > 2 * OVERHEAD + 10 * 5e-3 > 40 * 2e-3 - 10 * 5e-3
    assert storage_tier.worth_loading(state, host(made), table, 0)
    made.submit([*FIRST, 1])
    assert made.plan() is None
    assert not storage_tier.worth_loading(state, host(made), table, 0)
    finish(made)


def test_so_many_wait_for_a_disk_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_tier, "MOST_LOADS", 1)
    made = dead()
    first, second = made.submit([*FIRST, 1]), made.submit([*SECOND, 1])
    assert [chunk[1] for chunk in chunks(made.step())] == [0], "the second one computes"
    finish(made)
    assert (cached(made, first), cached(made, second)) == (40, 0)


def test_blocks_are_written_while_none_are_read() -> None:
    made = dead()
    made.submit([*FIRST, 1])
    assert made.plan() is None
    storage(made).queue.append(next(iter(storage(made).tier._blocks)))
    storage_tier.store_ahead(made.scheduler._state)
    assert [move.to_storage for move in asked(made)] == [False]
    finish(made)


def test_a_disk_that_takes_nothing_has_a_rest() -> None:
    made = server(storage_trouble=1.0)
    for prompt in (FIRST, SECOND):
        ask(made, prompt)
    assert stand(made).failed > 0
    assert storage(made).queue, "the rest waits"
    failed = stand(made).failed
    ask(made, THIRD)
    assert stand(made).failed == failed
    made.now += 2.0
    ask(made, FIRST)
    assert stand(made).failed > failed
    made.now += 2.0
    assert made.now < storage(made).writes.until, "twice as long"
    assert stand(made).stored == stand(made).findable == 0


def test_what_has_left_the_hosts_memory_is_not_written() -> None:
    made = server()
    made.executor.host.storage.jobs.clear()
    storage(made).writes.until = 100.0
    for prompt in (FIRST, SECOND):
        ask(made, prompt)
    waiting = list(storage(made).queue)
    host(made).tier.forget(waiting)
    storage(made).writes.until = 0.0
    storage_tier.store_ahead(made.scheduler._state)
    assert not asked(made)
    assert stand(made).lost == len(waiting) > 0


def test_only_what_all_executors_have_is_found() -> None:
    made = server()
    keys = [bytes([number]) * 16 for number in range(4)]
    said = [{0: 0, 1: 1, 2: 2}, {1: 1, 2: 3, 0: 0}, {3: 3, 0: 0, 1: 1}][:GROUP]
    die(made)
    take(made)
    made.executor.host.storage.jobs.clear()
    listing = storage(made).listing
    assert listing is not None
    for executor, places in enumerate(said):
        assert stand(made).findable == 0
        for last, part in enumerate((list(places)[:1], list(places)[1:])):
            message = BlocksListed(
                number=listing.number, places=np.array(part, np.int32).tobytes(),
                keys=pack_keys([keys[places[place]] for place in part]), last=bool(last),
            )  # fmt: skip
            made.scheduler.blocks_copied(message, executor, 0.0)
    common = set.intersection(*(set(places.items()) for places in said))
    assert dict(storage(made).tier._blocks) == {keys[key]: place for place, key in common}
    assert storage(made).listing is None


def test_nothing_is_written_before_the_list_is_there() -> None:
    """It would overwrite what has not been told yet."""
    made = Server(replace(WORLD, disk_blocks=100))
    assert [type(message) for message in made.scheduler.copy_messages()] == [ListBlocks]
    take(made)
    jobs, made.executor.host.storage.jobs = made.executor.host.storage.jobs, []
    for prompt in (FIRST, SECOND, THIRD):
        ask(made, prompt)
    assert stand(made).stored == 0
    made.executor.host.storage.jobs = jobs
    made.copy()
    assert stand(made).stored > 8


def test_a_list_of_another_life_is_none() -> None:
    made = dead()
    old = storage(made).listing
    die(made)
    number = -1 if old is None else old.number
    made.scheduler.blocks_copied(BlocksListed(number=number, places=b"", keys=b"", last=True), 0, 0.0)
    assert storage(made).listing is not None
    made.copy()
    assert stand(made).findable > 8


def test_a_disk_with_less_room() -> None:
    made = dead()
    places = set(storage(made).tier._blocks.values())
    die(made, disk_blocks=5)
    made.copy()
    assert stand(made).total == 5
    assert set(storage(made).tier._blocks.values()) == {place for place in places if place < 5}
    die(made, disk_blocks=0)
    made.copy()
    assert stand(made).total == stand(made).findable == 0
    ask(made, FIRST)


def test_new_executors_have_their_host_memory_to_themselves() -> None:
    """What was to be read into it is not any more, and sequences that waited for it compute, or read it again."""
    made = dead()
    number = made.submit([*FIRST, 1])
    assert made.plan() is None
    (load,) = storage(made).loads.values()
    die(made)
    assert load.done
    assert host(made).tier.statistics().free == host(made).tier.total
    for executor in range(GROUP):
        made.scheduler.blocks_copied(BlocksMoved(load.number), executor, 0.0)
    assert host(made).tier.findable == 0
    finish(made)
    assert made.seen(number).finish == Finish.LENGTH


def test_nothing_of_other_weights_is_found() -> None:
    made = dead()
    made.submit([*FIRST, 1])
    assert made.plan() is None
    take(made)
    made.scheduler.freeze(frozen=True)
    assert made.scheduler.settled, "no block of the device is touched"
    made.scheduler.forget_computed(0.0, "2")
    assert [message for message in made.scheduler.copy_messages() if isinstance(message, ForgetBlocks)] == [
        ForgetBlocks(made.scheduler.epoch, everything=True)
    ]
    made.scheduler.freeze(frozen=False)
    assert stand(made).findable == 0
    made.copy()
    assert chunks(made.step())[0][1] == 0
    finish(made)
    assert not any(len(records) > stand(made).findable for records in made.storage.records)


def test_nothing_is_written_while_weights_change() -> None:
    made = server()
    storage(made).writes.until = 100.0
    for prompt in (FIRST, SECOND):
        ask(made, prompt)
    storage(made).writes.until = 0.0
    made.scheduler.freeze(frozen=True)
    storage_tier.store_ahead(made.scheduler._state)
    assert not asked(made)
    made.scheduler.freeze(frozen=False)
    storage_tier.store_ahead(made.scheduler._state)
    assert asked(made)
    made.copy()


def test_what_a_failed_sequence_computed_is_forgotten_in_every_life() -> None:
    made = dead()
    found = dict(storage(made).tier._blocks)
    distrust_storage(made.scheduler._state, [key for key in found if len(key) == 16][:3])
    made.copy()
    die(made)
    made.copy()
    assert stand(made).findable == len(found) - 3


def test_what_is_being_written_then_as_well() -> None:
    made = server()
    storage(made).writes.until = 100.0
    for prompt in (FIRST, SECOND):
        ask(made, prompt)
    storage(made).writes.until = 0.0
    storage_tier.store_ahead(made.scheduler._state)
    (store, *_) = storage(made).stores.values()
    distrust_storage(made.scheduler._state, store.keys[:2])
    made.copy()
    assert not any(storage(made).tier.find(key) for key in store.keys[:2])
    keys = {record.key for records in made.storage.records for record in records.values()}
    assert not keys.intersection(store.keys[:2])
    assert keys.issuperset(store.keys[2:])


def test_a_prefix_that_is_larger_than_half_of_the_hosts_memory_comes_in_part() -> None:
    made = dead()
    die(made)
    host(made).tier.clear(8)
    made.executor.host.blocks[:] = [None] * 8
    made.copy()
    number = made.submit([*FIRST, 1])
    assert made.plan() is None
    (move,) = asked(made)
    assert len(move_table(move.blocks)) == 4
    finish(made)
    assert cached(made, number) == 16


def test_a_sequence_that_fails_takes_its_blocks_along() -> None:
    """It has computed again what is on disk, since it reports on its prompt."""
    made = dead()
    number = made.submit([*FIRST, 1], prompt_logprobs=0, fails_at=0)
    finish(made)
    assert made.seen(number).finish == Finish.ERROR
    assert cached(made, ask(made, [*FIRST, 2])) == 0


def sharing(**fields: object) -> Server:
    """A server whose shared store holds the three prompts' beginnings, and which remembers nothing of them."""
    made = dead(kv_store=True, **fields)
    assert not storage(made).tier.findable
    storage(made).lookups.count = 0
    return made


def lookups(made: Server) -> list[FindBlocks]:
    return [message for message in made.scheduler.copy_messages() if isinstance(message, FindBlocks)]


def test_what_others_have_stored_is_asked_for_and_read() -> None:
    made = sharing()
    number = made.submit([*FIRST, 1, 2])
    assert made.plan() is None
    (asked_for,) = lookups(made)
    assert len(unpack_keys(asked_for.keys)) == 10
    assert made.scheduler.statistics().reasons == {"disk": 1}
    finish(made)
    assert cached(made, number) == 40
    assert (stand(made).lookups, stand(made).loads, stand(made).loaded) == (1, 1, 10)
    assert (stand(made).total, stand(made).findable, stand(made).evicted) == (0, 0, 0), "they are the store's own"
    made.record.verify(made.lives[number], made.world, False, False)


def test_a_store_is_asked_once_for_what_it_lacks() -> None:
    made = sharing()
    number = made.submit([7] * 42)
    assert made.plan() is None
    other = made.submit([9, 9, 9])
    assert [chunk[2] for chunk in chunks(made.step())] == [3], "nobody waits for the answer but who asks"
    made.copy()
    assert chunks(made.step())[0][1] == 0
    finish(made)
    assert (cached(made, number), cached(made, other)) == (0, 0)
    assert (stand(made).lookups, stand(made).loads) == (1, 0)


def test_what_is_computed_is_written_at_once() -> None:
    made = server(kv_store=True, blocks=60)
    ask(made, FIRST)
    assert stand(made).stored >= 9, "others wait for it: it is not kept until memory is short"


def test_a_block_that_one_executor_lacks_is_not_read() -> None:
    made = sharing()
    made.submit([*FIRST, 1])
    assert made.plan() is None
    (lookup,) = storage(made).lookups.open.values()
    take(made)
    made.executor.host.storage.jobs.clear()
    for executor in range(GROUP):
        for _ in range(2):
            missing = np.array([3] if executor == 1 else [], np.int32).tobytes()
            made.scheduler.blocks_copied(BlocksFound(lookup.number, missing), executor, 0.0)
        assert lookup.done == (executor == GROUP - 1)
    assert storage(made).tier.find(lookup.keys[3]) is None
    assert made.plan() is None
    (load,) = storage(made).loads.values()
    assert load.keys == lookup.keys[:3]
    finish(made)


def test_what_a_store_has_evicted_is_remembered_no_more() -> None:
    made = sharing()
    number = made.submit([*FIRST, 1])
    assert made.plan() is None
    (lookup,), tier = storage(made).lookups.open.values(), storage(made).tier
    for key in lookup.keys[:4]:
        tier.publish(tier.reserve(key))
    for executor in range(GROUP):
        made.scheduler.blocks_copied(BlocksFound(lookup.number, np.arange(10, dtype=np.int32).tobytes()), executor, 0.0)
    assert not tier.findable
    finish(made)
    assert (cached(made, number), stand(made).loads) == (0, 0)


def test_a_store_that_does_not_answer_is_left_alone_for_a_while() -> None:
    made = sharing()
    made.storage.trouble = 1.0
    for extra in (1, 2):
        assert cached(made, ask(made, [extra, *FIRST])) == 0
    assert (stand(made).lookups, stand(made).failed_lookups) == (1, 1)
    made.now += 2.5
    ask(made, [3, *FIRST])
    assert stand(made).lookups == 2


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    made = sharing()
    host(made).position_seconds = 0.02
    number = made.submit([*FIRST, 1])
    assert made.plan() is None
    made.now += 1.7
    assert chunks(made.step())[0][1] == 0
    made.submit([*SECOND, 1])
    assert made.step() is not None, "the next one does not even ask"
    assert stand(made).lookups == 1
    finish(made)
    assert made.seen(number).finish == Finish.LENGTH


def test_what_is_computed_sooner_than_asked_for_is_not_asked_for() -> None:
    made = sharing()
    host(made).position_seconds = OVERHEAD / 100
    ask(made, [*FIRST, 1])
    assert stand(made).lookups == 0


def test_so_many_ask_and_further_ones_wait_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_tier, "MOST_LOOKUPS", 1)
    made = sharing()
    numbers = [made.submit([*prompt, 1]) for prompt in (FIRST, SECOND)]
    assert made.plan() is None
    assert len(lookups(made)) == 1
    finish(made)
    assert stand(made).lookups == 2
    assert [cached(made, number) for number in numbers] == [40, 40]


def test_a_failed_sequence_is_forgotten_by_the_store_whether_remembered_or_not() -> None:
    made = sharing()
    distrust_storage(made.scheduler._state, [keys := [bytes([7]) * 16]][0])
    (message,) = [message for message in made.scheduler.copy_messages() if isinstance(message, ForgetBlocks)]
    assert unpack_keys(message.keys) == keys


def test_questions_of_another_life_are_not_answered() -> None:
    made = sharing()
    number = made.submit([*FIRST, 1])
    assert made.plan() is None
    (lookup,) = storage(made).lookups.open.values()
    die(made)
    assert lookup.done
    for executor in range(GROUP):
        made.scheduler.blocks_copied(BlocksFound(lookup.number), executor, 0.0)
    assert not storage(made).tier.findable
    finish(made)
    assert made.seen(number).finish == Finish.LENGTH
