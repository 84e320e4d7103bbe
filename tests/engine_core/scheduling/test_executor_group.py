from __future__ import annotations

import pytest
from msgspec import structs

from penstock.engine_core.scheduling.executor_group import LOADS, MEMBERS_LIMIT, MISSING_LIMIT, ExecutorGroup
from penstock.protocol.links import Hello, Role
from penstock.protocol.messages import BlocksAddress
from penstock.protocol.steps import ExecutorReady
from penstock.services.links.link import Peer


def peer(index: int = 0) -> Peer:
    hello = Hello(version=1, role=Role.EXECUTOR, index=index, incarnation=1, pid=0, config=0)
    return Peer(f"executor-{index}".encode(), hello, 16, 0.0)


def said(blocks: int = 64, device: str = "cpu") -> ExecutorReady:
    return ExecutorReady(
        epoch=0, blocks=blocks, block_size=16, step_tokens=64 + blocks, device=device, dtype="float32",
        weight_bytes=1, cache_bytes=1, load_seconds=0.1,
    )  # fmt: skip


def test_a_group_is_complete_when_each_has_loaded():
    group = ExecutorGroup(2, 7, 0.0)
    assert not group.complete
    one, two = peer(1), peer(0)
    assert not group.add(one, said(50, "cuda:1"), 1.0)
    assert group.add(two, said(60, "cuda:0"), 2.0)
    assert group.blocks == 50
    assert group.step_tokens == 114
    assert group.first.device == "cuda:0"
    assert group.epoch == 7
    assert set(group.peers) == {one, two}


def test_the_first_stage_encodes_images():
    group = ExecutorGroup(4, 7, 0.0, answering=2, stage=2)
    members = [peer(index) for index in range(4, 8)]
    for one, rows in zip((3, 1, 2, 0), (0, 30, 0, 20), strict=True):
        group.add(members[one], structs.replace(said(), encoder_rows=rows), 1.0)
    assert group.encoding == tuple(members[:2])
    assert group.encoder_rows == 20


def test_a_broken_group_gives_its_epoch_up_once():
    group = ExecutorGroup(2, 7, 0.0)
    one, two = peer(0), peer(1)
    group.add(one, said(), 1.0)
    group.add(two, said(), 1.0)
    assert group.remove(one, 5.0)
    assert (group.epoch, group.missing_since) == (8, 5.0)
    assert not group.remove(two, 6.0)
    assert (group.epoch, group.missing_since) == (8, 5.0)


def test_members_are_in_step_that_ran_the_same_plans():
    group = ExecutorGroup(2, 7, 0.0)
    one, two = peer(0), peer(1)
    group.add(one, structs.replace(said(), plans=12), 1.0)
    assert group.in_step, "nobody else has said anything"
    group.add(two, structs.replace(said(), plans=11), 1.0)
    assert not group.in_step
    group.remove(two, 2.0)
    group.add(peer(1), structs.replace(said(), plans=12), 3.0)
    assert group.in_step


def test_some_that_wait_for_the_others_for_too_long_are_stuck():
    group = ExecutorGroup(3, 7, 0.0)
    one, two, three = peer(0), peer(1), peer(2)
    assert not group.stuck(1e9), "all may load for as long as they need"
    group.add(one, said(), 100.0)
    group.add(two, said(), 110.0)
    assert not group.stuck(100.0 + MEMBERS_LIMIT - 0.1)
    assert group.stuck(100.0 + MEMBERS_LIMIT)
    group.add(three, said(), 120.0)
    assert not group.stuck(1e9)
    group.remove(two, 200.0)
    assert not group.stuck(200.0 + MEMBERS_LIMIT - 0.1)
    assert group.stuck(200.0 + MEMBERS_LIMIT)
    group.remove(one, 201.0)
    group.remove(three, 202.0)
    assert not group.stuck(1e9)


def test_an_executor_alone_is_never_stuck():
    group = ExecutorGroup(1, 7, 0.0)
    one = peer()
    group.add(one, said(), 1.0)
    group.remove(one, 2.0)
    assert not group.stuck(1e9)


def test_one_that_leaves_before_it_loaded_breaks_nothing():
    group = ExecutorGroup(1, 7, 0.0)
    assert not group.remove(peer(), 1.0)
    assert (group.epoch, group.missing_since) == (7, 0.0)


def test_one_that_says_ready_twice_begins_an_epoch():
    group = ExecutorGroup(1, 7, 0.0)
    one = peer()
    assert group.add(one, said(), 1.0)
    assert group.add(one, said(32), 2.0)
    assert group.epoch == 8
    assert group.blocks == 32


def test_two_of_one_index_are_our_mistake():
    group = ExecutorGroup(2, 7, 0.0)
    group.add(peer(0), said(), 1.0)
    with pytest.raises(AssertionError):
        group.add(peer(0), said(), 1.0)


def test_the_answering_executor_is_known_by_its_place_in_the_group():
    """Of the second replica's two stages of two ranks: numbers 4 to 7, of which 6 samples."""
    group = ExecutorGroup(4, 7, 0.0, answering=2)
    peers = [peer(index) for index in (6, 4, 7, 5)]
    for at, one in enumerate(peers):
        group.add(one, said(device="NVIDIA H200"), float(at))
    assert group.answering == (peers[0],)
    assert group.devices == "4 x NVIDIA H200"


def test_one_executor_answers_itself():
    group = ExecutorGroup(1, 7, 0.0)
    one = peer()
    group.add(one, said(), 1.0)
    assert group.answering == (one,)
    assert group.devices == "cpu"


def test_places_for_states_are_those_of_every_member_that_has_any():
    group = ExecutorGroup(3, 0, 0.0)
    for index, (size, places, host) in enumerate([(100, 9, 20), (0, 0, 0), (100, 7, 30)]):
        places_of = {"state_bytes": size, "state_places": places, "state_host_places": host}
        group.add(peer(index), structs.replace(said(), **places_of), 0.0)
    assert group.state_places == (7, 20)
    dense = ExecutorGroup(1, 0, 0.0)
    dense.add(peer(), said(), 0.0)
    assert dense.state_places == (0, 0)


def test_blocks_of_the_hosts_memory_are_those_of_every_member_that_has_any():
    group = ExecutorGroup(3, 0, 0.0)
    for index, (size, blocks) in enumerate([(100, 9), (0, 0), (100, 7)]):
        group.add(
            peer(index), structs.replace(said(), cache_bytes=size, host_blocks=blocks, disk_blocks=2 * blocks), 0.0
        )
    assert (group.host_blocks, group.disk_blocks) == (7, 14)
    assert [member.index for member in group.caching] == [0, 2]


def test_addresses_stand_by_the_places_of_members():
    group = ExecutorGroup(2, 0, 0.0)
    address = BlocksAddress(b"agent", "cpu", 64, 8, 1, 2)
    last = peer(5)
    group.add(last, structs.replace(said(), address=address), 0.0)
    group.add(peer(4), said(), 0.0)
    assert group.addresses == group.room[-1] == (None, address)
    group.add(last, said(), 0.0)
    assert group.addresses == ()


def complete(idle_timeout: float = 10.0, size: int = 1) -> tuple[ExecutorGroup[Peer], list[Peer]]:
    """A group that became complete at 100 s, and its members."""
    group: ExecutorGroup[Peer] = ExecutorGroup(size, 7, 90.0, idle_timeout=idle_timeout)
    members = [peer(index) for index in range(size)]
    for one in members:
        group.add(one, said(), 100.0)
    return group, members


def test_sleep_is_due_after_the_idle_timeout_alone() -> None:
    group, _ = complete()
    assert not group.sleep_due(109.9)
    assert group.sleep_due(110.0)
    group.busy(109.0)
    assert not group.sleep_due(118.9)
    assert group.sleep_due(119.0)
    never, _ = complete(0.0)
    assert not never.sleep_due(1e9)
    loading: ExecutorGroup[Peer] = ExecutorGroup(1, 7, 0.0, idle_timeout=10.0)
    assert not loading.sleep_due(1e9), "there is nothing to give back"


def test_a_group_sleeps_and_wakes() -> None:
    group, members = complete(size=2)
    assert group.sleep(110.0) == tuple(members)
    assert (group.complete, group.serves, group.epoch, group.devices) == (False, True, 8, "2 x cpu")
    assert not group.remove(members[0], 110.1), "its epoch has been given up already"
    waiting = peer(0), peer(1)
    assert not group.fall_asleep(waiting[0])
    assert not group.all_asleep
    assert not group.fall_asleep(waiting[1])
    assert group.all_asleep
    assert not group.given_up(1e9)
    assert set(group.wake(500.0)) == set(waiting)
    assert group.serves
    for one, loaded in zip(waiting, members, strict=True):
        group.remove(one, 500.1)
        group.add(loaded, said(), 505.0)
    assert group.complete
    assert group.epoch == 8
    group.end_wake(505.0)
    assert not group.sleep_due(514.9)
    assert group.sleep_due(515.0)


def test_one_that_falls_asleep_late_is_woken_at_once() -> None:
    group, _ = complete()
    group.sleep(110.0)
    assert group.wake(110.001) == ()
    assert group.fall_asleep(peer(0))


def test_requests_wait_for_one_that_was_woken_as_long_as_its_like_took() -> None:
    group, members = complete()
    group.sleep(110.0)
    group.remove(members[0], 110.1)
    group.wake(200.0)
    group.add(members[0], structs.replace(said(), load_seconds=100.0), 300.0)
    group.end_wake(300.0)
    group.sleep(310.0)
    group.wake(1000.0)
    limit = MISSING_LIMIT + LOADS * 100.0
    assert not group.given_up(1000.0 + limit - 0.1)
    assert group.given_up(1000.0 + limit)
    group.end_wake(1000.0 + limit)
    assert not group.serves
    group.crash_loop = "it fails"
    assert group.given_up(1000.0)
