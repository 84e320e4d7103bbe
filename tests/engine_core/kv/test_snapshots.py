"""Snapshots of states: what is found, what goes first, and what no planned step may lose."""

from __future__ import annotations

import random

import pytest

from penstock.engine_core.kv.snapshots import NO_PLACE, Snapshots
from penstock.protocol.steps import HOST_PLACES

CHAIN = [bytes([number]) * 16 for number in range(1, 9)]


def keep(snapshots: Snapshots, identity: bytes, gain: int = 1, parent: int = NO_PLACE, step: int = 0) -> int:
    place = snapshots.reserve(identity, gain, parent, step, step)
    snapshots.publish(place, identity)
    return place


def test_the_longest_one_is_found():
    snapshots = Snapshots(4)
    assert snapshots.longest(CHAIN, 8, 2) == (0, NO_PLACE)
    second = keep(snapshots, CHAIN[1])
    sixth = keep(snapshots, CHAIN[5])
    assert snapshots.longest(CHAIN, 8, 2) == (6, sixth)
    assert snapshots.longest(CHAIN, 5, 2) == (2, second)
    assert snapshots.longest(CHAIN, 7, 3) == (6, sixth)
    assert snapshots.check() == ()


def test_it_is_found_once_its_step_was_applied():
    snapshots = Snapshots(1)
    place = snapshots.reserve(CHAIN[0], 1, NO_PLACE, 5, 4)
    assert snapshots.find(CHAIN[0]) == NO_PLACE
    assert snapshots.reserve(CHAIN[1], 1, NO_PLACE, 6, 4) == NO_PLACE, "step 5 writes the only place"
    snapshots.publish(place, CHAIN[0])
    assert snapshots.find(CHAIN[0]) == place
    assert snapshots.reserve(CHAIN[1], 1, NO_PLACE, 6, 5) == place
    assert snapshots.find(CHAIN[0]) == NO_PLACE
    assert snapshots.statistics().evicted == 1


def test_what_a_planned_step_reads_stays():
    snapshots = Snapshots(1)
    place = keep(snapshots, CHAIN[0])
    snapshots.read(place, 9)
    assert snapshots.reserve(CHAIN[1], 1, NO_PLACE, 10, 8) == NO_PLACE
    assert snapshots.reserve(CHAIN[1], 1, NO_PLACE, 10, 8, own=place) == NO_PLACE
    assert snapshots.reserve(CHAIN[1], 1, NO_PLACE, 10, 9) == place


def test_the_smallest_gain_goes_first_and_large_ones_age():
    snapshots = Snapshots(2)
    keep(snapshots, CHAIN[0], gain=100)
    for number in range(1, 8):
        keep(snapshots, CHAIN[number], gain=30)
        found = [identity for identity in CHAIN if snapshots.find(identity) != NO_PLACE]
        assert found == ([CHAIN[0], CHAIN[number]] if number < 5 else [CHAIN[number - 1], CHAIN[number]])


def test_a_hit_makes_it_young():
    snapshots = Snapshots(2)
    first = keep(snapshots, CHAIN[0], gain=30)
    for number in range(1, 8):
        keep(snapshots, CHAIN[number], gain=30)
        snapshots.read(first, 0)
    assert snapshots.find(CHAIN[0]) == first
    assert snapshots.statistics().hits == 7


def test_what_stood_behind_an_evicted_one_gains_its_share():
    snapshots = Snapshots(3)
    first = keep(snapshots, CHAIN[0], gain=10)
    second = keep(snapshots, CHAIN[1], gain=20, parent=first)
    keep(snapshots, CHAIN[2], gain=25)
    keep(snapshots, CHAIN[3], gain=100)  # the first goes, and the second would save its positions too
    assert snapshots.find(CHAIN[0]) == NO_PLACE
    keep(snapshots, CHAIN[4], gain=100)
    assert snapshots.find(CHAIN[1]) == second
    assert snapshots.find(CHAIN[2]) == NO_PLACE


def test_a_place_moves_up_until_something_began_from_it():
    snapshots = Snapshots(3)
    place = keep(snapshots, CHAIN[0])
    assert snapshots.moves(place, CHAIN[0])
    assert snapshots.reserve(CHAIN[1], 1, place, 1, 1, own=place) == place
    snapshots.publish(place, CHAIN[1])
    assert not snapshots.moves(place, CHAIN[0])
    snapshots.read(place, 1)
    assert not snapshots.moves(place, CHAIN[1])
    assert snapshots.statistics().evicted == 0


def test_distrust_reaches_what_is_being_written():
    snapshots = Snapshots(3)
    keep(snapshots, CHAIN[0])
    second = keep(snapshots, CHAIN[1])
    third = snapshots.reserve(CHAIN[2], 1, second, 2, 1)
    snapshots.distrust(CHAIN[1:])
    snapshots.publish(third, CHAIN[2])
    assert [identity for identity in CHAIN if snapshots.find(identity) != NO_PLACE] == CHAIN[:1]
    assert snapshots.check() == ()


def test_the_second_of_two_equal_ones_gives_its_place_back():
    snapshots = Snapshots(2)
    places = [snapshots.reserve(CHAIN[0], 1, NO_PLACE, step, 0) for step in (1, 2)]
    for place in places:
        snapshots.publish(place, CHAIN[0])
    assert snapshots.find(CHAIN[0]) == places[0]
    assert snapshots.reserve(CHAIN[1], 1, NO_PLACE, 3, 2) == places[1]
    assert snapshots.statistics().evicted == 0


def test_without_places_nothing_is_kept():
    snapshots = Snapshots(0)
    assert snapshots.reserve(CHAIN[0], 1, NO_PLACE, 1, 0) == NO_PLACE
    assert snapshots.statistics().total == 0


def test_clear_forgets_all_and_may_change_the_number():
    snapshots = Snapshots(2)
    keep(snapshots, CHAIN[0])
    snapshots.clear(1)
    assert snapshots.find(CHAIN[0]) == NO_PLACE
    assert (snapshots.statistics().total, snapshots.statistics().held, snapshots.statistics().kept) == (1, 0, 1)


def test_what_goes_from_the_device_is_found_in_the_hosts_memory():
    snapshots = Snapshots(1, 2)
    keep(snapshots, CHAIN[0])
    assert snapshots.spilled == NO_PLACE
    for number, host in ((1, 0), (2, 1), (3, 0)):
        assert keep(snapshots, CHAIN[number], step=number) == 0
        assert snapshots.spilled == host
    assert [snapshots.find(identity) for identity in CHAIN[:4]] == [NO_PLACE, 2, 1, 0], "the oldest gave way"
    assert [snapshots.number(place) for place in (0, 1, 2)] == [0, HOST_PLACES, HOST_PLACES + 1]
    snapshots.read(1, 4)
    stand = snapshots.statistics()
    assert (stand.held, stand.host_held, stand.host_total, stand.total) == (1, 2, 2, 1)
    assert (stand.hits, stand.host_hits, stand.spilled, stand.evicted) == (1, 1, 3, 1)
    assert snapshots.check() == ()


def test_a_hit_in_the_hosts_memory_makes_it_young():
    snapshots = Snapshots(1, 2)
    for number in range(8):
        keep(snapshots, CHAIN[number], gain=30, step=number)
        if number:
            snapshots.read(snapshots.find(CHAIN[0]), number)
    assert snapshots.find(CHAIN[0]) > 0
    assert snapshots.find(CHAIN[6]) > 0
    assert snapshots.find(CHAIN[5]) == NO_PLACE


def test_what_a_planned_step_touches_in_the_hosts_memory_stays():
    snapshots = Snapshots(2, 1)
    keep(snapshots, CHAIN[0])
    keep(snapshots, CHAIN[1])
    keep(snapshots, CHAIN[2], step=1)  # the first goes to the host's
    snapshots.read(snapshots.find(CHAIN[0]), 9)
    snapshots.publish(snapshots.reserve(CHAIN[3], 1, NO_PLACE, 10, 8), CHAIN[3])
    assert snapshots.find(CHAIN[0]) == 2
    assert snapshots.find(CHAIN[1]) == NO_PLACE, "forgotten, since its place is read"
    assert snapshots.spilled == NO_PLACE
    assert snapshots.statistics().evicted == 1
    keep(snapshots, CHAIN[4], step=11)
    assert snapshots.find(CHAIN[0]) == NO_PLACE
    assert snapshots.find(CHAIN[2]) == 2
    snapshots.reserve(CHAIN[5], 1, NO_PLACE, 12, 10)
    assert snapshots.find(CHAIN[2]) == 2, "step 11 writes it"


def test_a_chain_goes_on_behind_what_went_to_the_hosts_memory():
    """And behind what was forgotten there it gains that one's share."""
    snapshots = Snapshots(2, 1)
    first = keep(snapshots, CHAIN[0], gain=10)
    second = keep(snapshots, CHAIN[1], gain=20, parent=first)
    assert keep(snapshots, CHAIN[2], gain=40, parent=second, step=1) == first
    assert snapshots._parent.tolist() == [second, 2, NO_PLACE]
    assert keep(snapshots, CHAIN[3], gain=50, parent=second, step=2) == second
    assert snapshots._parent.tolist() == [2, 2, NO_PLACE]
    assert snapshots._gain.tolist() == [40, 50, 30]
    assert snapshots.find(CHAIN[0]) == NO_PLACE
    assert snapshots.check() == ()


def test_what_moves_up_does_not_go_to_the_hosts_memory():
    snapshots = Snapshots(2, 2)
    place = keep(snapshots, CHAIN[0])
    snapshots.reserve(CHAIN[1], 1, NO_PLACE, 1, 1, own=place)
    assert snapshots.spilled == NO_PLACE


def test_distrust_and_new_executors_reach_the_hosts_memory():
    snapshots = Snapshots(1, 2)
    for number in range(3):
        keep(snapshots, CHAIN[number], step=number)
    snapshots.distrust(CHAIN[:1])
    assert [snapshots.find(identity) for identity in CHAIN[:2]] == [NO_PLACE, 2]
    snapshots.clear(1, 1)
    assert snapshots.find(CHAIN[1]) == NO_PLACE
    assert (snapshots.statistics().host_total, snapshots.statistics().host_held) == (1, 0)


@pytest.mark.parametrize("host", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_accounts_balance_whatever_happens(seed, host):
    rng, snapshots = random.Random(seed), Snapshots(5, host)
    identities = [bytes([number]) * 16 for number in range(40)]
    written: list[tuple[int, bytes]] = []
    for step in range(1, 400):
        identity = rng.choice(identities)
        if (place := snapshots.find(identity)) != NO_PLACE:
            snapshots.read(place, step)
        elif all(identity != other for _, other in written):
            parent = snapshots.find(rng.choice(identities))
            place = snapshots.reserve(identity, rng.randrange(1, 9), parent, step, step - 3)
            written += [(place, identity)] if place != NO_PLACE else []
        if rng.random() < 0.1:
            snapshots.distrust(rng.sample(identities, 3))
        if len(written) > 2:
            snapshots.publish(*written.pop(0))
        assert snapshots.check() == ()
    assert snapshots.statistics().evicted > 20
    assert (snapshots.statistics().spilled > 20) == (host > 0)
