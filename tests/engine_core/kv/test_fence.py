from __future__ import annotations

from penstock.engine_core.kv.block_pool import Fence, Fenced


def test_what_a_step_touched_comes_back_with_its_result_and_not_before() -> None:
    fence = Fence()
    one, two, three = Fenced([1, 2], 0), Fenced([3], 1), Fenced([4], 2)
    fence.hold(7, one)
    fence.hold(8, two)
    fence.hold(7, three)
    assert len(fence) == 3
    assert sorted(block for table in fence.tables() for block in table) == [1, 2, 3, 4]
    assert fence.open(6) == []
    assert fence.open(7) == [one, three]
    assert fence.open(7) == []
    assert fence.open(8) == [two]
    assert len(fence) == 0


def test_clear_drops_what_waits() -> None:
    fence = Fence()
    fence.hold(1, Fenced([1], 0))
    fence.clear()
    assert len(fence) == 0
    assert fence.open(1) == []
