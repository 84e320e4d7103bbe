"""The loads of benchmarks/executor.py: what its plans ask of a runner."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.executor import BLOCK, WAYS, Event, Load, by_kernel, for_each, idle_share, plans
from penstock.protocol.step_columns import integers
from penstock.protocol.steps import StepPlan


def appended(stream: list[StepPlan]) -> dict[int, list[int]]:
    """Blocks that each slot has in the end, in their order; a slot that starts anew begins with what it is given."""
    held: dict[int, list[int]] = {}
    for plan in stream:
        for start in plan.starts:
            held[start.slot] = integers(start.blocks).tolist()
        for slot, block in integers(plan.blocks).reshape(-1, 2).tolist():
            held[slot].append(block)
    return held


@pytest.mark.parametrize(("batch", "prompt", "shared"), [(3, 0, 0), (3, 40, 0), (0, 128, 0), (5, 17, 1)])
def test_no_request_stands_in_the_blocks_of_another(batch: int, prompt: int, shared: int) -> None:
    load = Load(batch, 20, 30, WAYS["greedy"], shared, prompt)
    held = appended(list(plans(load)))
    assert len(held) == batch + (prompt > 0)
    own = [block for slot, blocks in held.items() for block in (blocks[shared:] if slot < batch else blocks)]
    assert len(own) == len(set(own))
    assert min(own) == 1 + shared
    for slot in range(batch):
        assert held[slot][:shared] == list(range(1, 1 + shared))
        assert len(held[slot]) * BLOCK >= load.context + slot % BLOCK + load.steps


def test_a_prompt_is_new_with_each_step() -> None:
    *steps, last = plans(Load(2, 20, 12, WAYS["greedy"], 0, 40))
    for step, plan in enumerate(steps):
        start = plan.starts[-1]
        assert (start.slot, start.computed, start.prompt_tokens) == (2, 0, 40)
        assert len(set(integers(start.token_ids).tolist())) == 40
        assert integers(plan.chunks).tolist() == [2, 0, 40, 1]
        assert len(plan.starts) == (3 if step == 0 else 1)
    assert integers(last.decode_off).tolist() == [0, 1]
    assert not last.starts


def test_without_a_prompt_nothing_starts_after_the_first_step() -> None:
    first, *others = plans(Load(4, 20, 12, WAYS["greedy"]))
    assert np.array_equal(integers(first.decode_on), np.arange(4))
    assert not any(plan.starts or plan.chunks or plan.decode_on for plan in others)


def test_a_value_for_all_batches_or_for_each() -> None:
    assert for_each([128], [0, 64, 255]) == [128, 128, 128]
    assert for_each([1, 2], [7, 8]) == [1, 2]


def test_what_a_kernel_costs_is_the_time_between_ends() -> None:
    events: list[Event] = [("a", 0.0, 10.0), ("b", 4.0, 15.0), ("a", 20.0, 30.0)]
    assert by_kernel(events) == [("a", 2, 20.0, 25.0), ("b", 1, 11.0, 5.0)]
    assert idle_share([event[1:] for event in events]) == pytest.approx(5 / 30)
    assert idle_share([]) == 1.0
