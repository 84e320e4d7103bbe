"""The pool against a plain model of it, its order of reuse, and what a check does with contradictions."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine_core.kv.block_pool import BlockPool
from penstock.engine_core.kv.prefix_index import PrefixIndex

TOTAL = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables take, share, seal and release in any order; after each move the books agree with the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = PrefixIndex(TOTAL)
        self.pool = BlockPool(TOTAL, self.prefix)
        self.tables: list[list[int]] = []
        self.names: dict[bytes, int] = {}
        self.idle: list[int] = []  # the model's queue, oldest first
        self.count = 0

    @rule(count=st.integers(0, TOTAL))
    def take(self, count: int) -> None:
        if count > self.pool.available:
            return
        fresh = TOTAL - len({block for table in self.tables for block in table}) - len(self.idle)
        blocks = self.pool.take(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & {block for table in self.tables for block in table}
        evicted = self.idle[: max(0, count - fresh)]
        assert set(evicted) <= set(blocks), "blocks without content go first, then the oldest"
        self.idle = self.idle[len(evicted) :]
        self.names = {name: block for name, block in self.names.items() if block not in blocks}
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        if not self.prefix.named(block):
            self.count += 1
            name = str(self.count).encode()
            self.prefix.cache([name], [block])
            self.names[name] = block

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.names)), unique=True, max_size=4))
        blocks = [block for name in names for block in self.prefix.match([name], 1)]
        assert blocks == [self.names[name] for name in names]
        before, idle = self.pool.available, self.pool.idle_among(blocks)
        self.pool.share(blocks)
        assert self.pool.available == before - idle
        self.idle = [block for block in self.idle if block not in blocks]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        before, alone = self.pool.available, self.pool.lone_among(table)
        self.pool.release(table)
        assert self.pool.available == before + alone
        held = {block for table in self.tables for block in table}
        self.idle += [block for block in reversed(table) if block not in held and block in self.names.values()]

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.distrust(table)
        self.names = {name: block for name, block in self.names.items() if block not in table}

    @invariant()
    def books_agree(self) -> None:
        report = self.pool.check(self.tables, thorough=True)
        assert report.ok, report
        stand = self.pool.statistics()
        assert stand.free + stand.idle + stand.held == stand.total == TOTAL
        assert stand.held == len({block for table in self.tables for block in table})
        assert stand.idle == len(self.idle)
        assert self.pool.check(self.tables, thorough=False) == report
        for name, block in self.names.items():
            assert self.prefix.match([name], 1) == [block]


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def sealed_pool(names: str) -> tuple[BlockPool, list[int]]:
    prefix = PrefixIndex(len(names))
    pool = BlockPool(len(names), prefix)
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        prefix.cache([name.encode()], [block])
    return pool, blocks


def test_the_oldest_released_goes_first_and_a_table_gives_its_end_before_its_beginning() -> None:
    pool, blocks = sealed_pool("abcd")
    pool.release(blocks[:2])
    pool.release(blocks[2:])
    assert [pool.take(1)[0] for _ in range(4)] == [blocks[1], blocks[0], blocks[3], blocks[2]]


def test_a_hit_moves_a_block_to_the_back_of_the_queue() -> None:
    pool, blocks = sealed_pool("ab")
    pool.release([blocks[0]])
    pool.release([blocks[1]])
    pool.share([blocks[0]])
    pool.release([blocks[0]])
    assert pool.take(1) == [blocks[1]]


def test_block_zero_is_never_handed_out() -> None:
    assert sorted(BlockPool(5, PrefixIndex(5)).take(5)) == [1, 2, 3, 4, 5]


def test_distrust_empties_an_idle_block() -> None:
    pool, blocks = sealed_pool("a")
    pool.release(blocks)
    assert pool.statistics().idle == 1
    pool.distrust(blocks)
    assert (pool.statistics().free, pool.statistics().idle) == (1, 0)
    assert pool.prefix.match([b"a"], 1) == []


@pytest.mark.parametrize("thorough", [False, True])
def test_a_leaked_block_is_told_and_quarantined_and_serving_goes_on(thorough: bool) -> None:
    pool, blocks = sealed_pool("abc")
    report = pool.check([blocks[:2]], thorough=thorough)
    assert not report.ok
    assert report.blocks == (blocks[2],)
    stand = pool.statistics()
    assert stand.free + stand.idle + stand.held + stand.quarantined == stand.total == 3
    assert pool.capacity == 2
    assert pool.check([blocks[:2]], thorough=True).ok
    pool.release(blocks[:2])
    assert sorted(pool.take(2)) == sorted(blocks[:2])
    assert pool.available == 0


def test_a_block_in_one_table_too_many_is_released_as_often_as_the_tables_say() -> None:
    pool, blocks = sealed_pool("ab")
    report = pool.check([blocks, [blocks[0]]], thorough=False)
    assert report.blocks == (blocks[0],)
    assert pool.held == 2
    pool.release([blocks[0]])
    pool.release(blocks)
    stand = pool.statistics()
    assert (stand.held, stand.quarantined, pool.available) == (0, 1, 1)
    assert pool.check([], thorough=True).ok


def test_a_quarantined_block_named_later_is_not_found() -> None:
    pool, blocks = sealed_pool("ab")
    pool.check([blocks, [blocks[0]]], thorough=False)
    pool.prefix.cache([b"again"], blocks[:1])
    pool.release([blocks[0]])
    pool.release(blocks)
    assert pool.prefix.match([b"again"], 1) == []


def test_clear_makes_every_block_free_and_may_change_their_number() -> None:
    pool, blocks = sealed_pool("ab")
    pool.release(blocks)
    pool.clear(5)
    assert pool.available == pool.capacity == pool.total == 5
    assert pool.prefix.match([b"a"], 1) == []
    assert pool.check([], thorough=True).ok
