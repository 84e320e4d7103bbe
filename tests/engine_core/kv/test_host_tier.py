"""Blocks of the host's memory: what is found, what goes first, what is held, and sums that hold."""

from __future__ import annotations

import random

import pytest

from penstock.engine_core.kv.host_tier import MOST_USES, NO_BLOCK, HostTier

KEYS = [bytes([number]) * 16 for number in range(1, 20)]


def keep(tier: HostTier, *keys: bytes) -> list[int]:
    blocks = [tier.reserve(key) for key in keys]
    for block in blocks:
        tier.publish(block)
    return blocks


def fetch(tier: HostTier, *keys: bytes) -> None:
    blocks = [tier.find(key) for key in keys]
    tier.hold(blocks)  # type: ignore[arg-type]
    tier.release(blocks)  # type: ignore[arg-type]


def held(tier: HostTier) -> list[bytes]:
    return [key for key in KEYS if tier.find(key) is not None]


def test_a_block_is_found_once_it_is_written() -> None:
    tier = HostTier(2)
    block = tier.reserve(KEYS[0])
    assert tier.find(KEYS[0]) is None
    assert tier.publish(block)
    assert tier.find(KEYS[0]) == block
    assert tier.check(()) == ()


def test_one_that_is_dropped_is_free_again() -> None:
    tier = HostTier(1)
    tier.drop(tier.reserve(KEYS[0]))
    assert keep(tier, KEYS[1]) == [0]
    assert held(tier) == [KEYS[1]]
    assert tier.statistics().evicted == 0


def test_the_one_that_was_not_wanted_for_longest_goes_first() -> None:
    tier = HostTier(3)
    keep(tier, *KEYS[:3])
    assert tier.touch(KEYS[0])
    assert not tier.touch(KEYS[9])
    keep(tier, KEYS[3])
    assert held(tier) == [KEYS[0], KEYS[2], KEYS[3]]
    assert tier.statistics().evicted == 1


def test_what_is_fetched_again_and_again_outlives_what_is_not_and_ages() -> None:
    tier = HostTier(2)
    keep(tier, KEYS[0])
    for _ in range(3 * MOST_USES):
        fetch(tier, KEYS[0])
    for number in range(1, MOST_USES):  # each goes for the next, and the clock with it
        keep(tier, KEYS[number])
        assert held(tier) == [KEYS[0], KEYS[number]]
    for number in (MOST_USES, MOST_USES + 1):
        keep(tier, KEYS[number])
    assert KEYS[0] not in held(tier)


def test_what_is_held_stays() -> None:
    tier = HostTier(2)
    first, _ = keep(tier, *KEYS[:2])
    tier.hold([first])
    tier.hold([first])
    assert keep(tier, KEYS[2]) == [1]
    tier.release([first])
    writing = tier.reserve(KEYS[3])
    assert writing == 1, "it is held once still"
    assert tier.reserve(KEYS[4]) == NO_BLOCK
    tier.release([first])
    assert tier.reserve(KEYS[4]) == first


def test_what_is_forgotten_is_not_found_however_it_stands() -> None:
    """Findable, being read, and being written."""
    tier = HostTier(4)
    blocks = keep(tier, *KEYS[:3])
    tier.hold(blocks[1:2])
    writing = tier.reserve(KEYS[3])
    tier.forget([KEYS[0], KEYS[1], KEYS[3]])
    assert held(tier) == [KEYS[2]]
    assert not tier.publish(writing)
    assert tier.check(blocks[1:2]) == ()
    tier.release(blocks[1:2])
    assert tier.statistics().free == 3
    assert tier.check(()) == ()


def test_of_two_alike_the_first_stays() -> None:
    tier = HostTier(2)
    first, second = tier.reserve(KEYS[0]), tier.reserve(KEYS[0])
    assert tier.publish(second)
    assert not tier.publish(first)
    assert tier.find(KEYS[0]) == second


def test_accounts_that_are_wrong_are_told() -> None:
    tier = HostTier(2)
    keep(tier, KEYS[0])
    assert "held by others" in tier.check([0])[0]
    tier._keys[0] = KEYS[1]
    assert any("holds something else" in fault for fault in tier.check(()))


@pytest.mark.parametrize("seed", range(20))
def test_sums_hold_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    tier = HostTier(rng.choice((0, 1, 3, 8)))
    writing: list[int] = []
    reading: list[int] = []
    for _ in range(400):
        key, turn = rng.choice(KEYS), rng.randrange(6)
        found = tier.find(key)
        if turn == 0 and found is None and (block := tier.reserve(key)) != NO_BLOCK:
            writing.append(block)
        elif turn == 1 and writing:
            (tier.publish if rng.random() < 0.8 else tier.drop)(writing.pop(rng.randrange(len(writing))))
        elif turn == 2 and found is not None:
            tier.hold([found])
            reading.append(found)
        elif turn == 3 and reading:
            tier.release([reading.pop(rng.randrange(len(reading)))])
        elif turn == 4:
            assert tier.touch(key) == (found is not None)
        elif rng.random() < 0.1:
            tier.forget([key])
            assert tier.find(key) is None
        assert tier.check([*writing, *reading]) == ()
        stand = tier.statistics()
        assert stand.total == stand.free + stand.held + (tier.total - stand.free - stand.held)
        assert stand.held == len({*writing, *reading})


def test_what_was_there_before_is_adopted_and_goes_in_its_order() -> None:
    tier = HostTier(4)
    tier.adopt({2: KEYS[0], 1: KEYS[1], 3: KEYS[0]})
    assert tier.findable == 2
    assert held(tier) == [KEYS[0], KEYS[1]], "one block for each key"
    assert tier.check(()) == ()
    assert sorted(keep(tier, KEYS[2], KEYS[3])) == [0, 3]
    keep(tier, KEYS[4])
    assert held(tier) == KEYS[1:5]


def test_who_holds_a_block_without_a_use_does_not_keep_it() -> None:
    tier = HostTier(2)
    first, _ = keep(tier, *KEYS[:2])
    fetch(tier, KEYS[1])
    tier.hold([first], used=False)
    tier.release([first])
    keep(tier, KEYS[2])
    assert held(tier) == [KEYS[1], KEYS[2]]
