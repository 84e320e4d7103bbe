"""The plans, the accounts of time and a whole run on a CPU of benchmarks/executor.py."""

from __future__ import annotations

import pytest

from benchmarks.executor import (
    BLOCK,
    WARM,
    WAYS,
    Figure,
    Load,
    build,
    by_kernel,
    idle_share,
    line,
    measure,
    plans,
    steady,
)
from engine_core.execution.rows import integers


@pytest.mark.parametrize(("batch", "context"), [(1, 100), (5, 31), (40, 16)])
def test_plans_give_every_position_a_block_of_its_own(batch: int, context: int) -> None:
    load = Load(batch, context, 40, WAYS["greedy"])
    stream = list(plans(load))
    assert len(stream) == load.steps + 1
    tables = {start.slot: integers(start.blocks).tolist() for start in stream[0].starts}
    known = {start.slot: len(integers(start.token_ids)) for start in stream[0].starts}
    assert sorted(known) == list(range(batch))
    for plan in stream[:-1]:
        for slot, block in integers(plan.blocks).reshape(-1, 2).tolist():
            tables[slot].append(block)
        for slot, tokens in known.items():
            assert len(tables[slot]) == (tokens - 1) // BLOCK + 1, "a block too many or too few"
            known[slot] = tokens + 1
    blocks = [block for table in tables.values() for block in table]
    assert len(blocks) == len(set(blocks))
    assert min(blocks) == 1
    assert all(integers(plan.decode_on).size == (batch if at == 0 else 0) for at, plan in enumerate(stream))
    assert integers(stream[-1].decode_off).tolist() == list(range(batch))


def test_requests_need_blocks_at_different_steps() -> None:
    counts = [len(integers(plan.blocks)) // 2 for plan in plans(Load(64, 512, 64, WAYS["greedy"]))]
    assert set(counts[1:-1]) == {64 // BLOCK}


def test_idle_is_what_no_kernel_covers() -> None:
    assert idle_share([(0, 10), (10, 20)]) == 0.0
    assert idle_share([(0, 10), (15, 20)]) == 0.25
    assert idle_share([(15, 20), (0, 10), (2, 9), (5, 12)]) == pytest.approx(0.15)
    assert idle_share([]) == 1.0


def test_kernels_are_summed_and_the_longest_comes_first() -> None:
    events = [("a", 0.0, 1.0), ("b", 1.0, 5.0), ("a", 5.0, 7.0)]
    assert by_kernel(events) == [("b", 1, 4.0), ("a", 2, 3.0)]


def test_the_edges_of_a_profile_are_left_out() -> None:
    events = [("k", float(at), at + 0.5) for at in range(100)]
    middle = steady(events, 20)
    assert middle[0][1] == pytest.approx(10, abs=1)
    assert middle[-1][2] == pytest.approx(90, abs=1)
    assert steady([], 20) == []


def test_a_line_of_the_table() -> None:
    figure = Figure(batch=8, context=512, step_ms=1.25, busy_ms=1.2, launch_us=80.0, collect_us=9.5, idle=0.031)
    assert line(figure).split() == ["8", "512", "1.250", "1.200", "80.0", "9.5", "3.1%"]
    assert line(Figure(batch=8, context=512, step_ms=1, busy_ms=1, launch_us=1, collect_us=1, idle=-1)).endswith("-")


def test_a_run_on_a_cpu() -> None:
    runner = build("smoke", 256, 100, eager=True, device="cpu")
    before = runner.statistics()
    figure = measure(runner, Load(2, 20, WARM + 4, WAYS["sampled"]))
    after = runner.statistics()
    assert (figure.batch, figure.context) == (2, 20)
    assert figure.step_ms > 0
    assert after.sampled - before.sampled == 2 * (WARM + 4)
