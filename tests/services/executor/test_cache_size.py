"""What the largest steps take of a GPU is measured once in the life of a process, by all members of a group or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine_core.distributed.group import ALONE
from penstock.services.executor import cache_size
from penstock.services.executor.cache_size import StepMemory
from penstock.services.executor.sleep import Measured

EARLIER = Measured(peak=70, lasting=9)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trials so far; each takes 50 bytes and leaves 5 behind."""
    found: list[int] = []

    def trial(*_: object) -> int:
        found.append(1)
        return 50

    monkeypatch.setattr(cache_size, "step_peak", trial)
    monkeypatch.setattr(cache_size, "used_memory", lambda _: (100 + 5 * len(found), 1000))
    return found


def measured(memory: StepMemory, others: int = 1) -> Measured:
    """others: whether the other members of the group know it."""
    nothing: Any = None
    group = ALONE if others else SimpleNamespace(all_min=lambda own: min(own, others))
    options: Any = SimpleNamespace(device=None, group=group)
    return memory.measure(nothing, nothing, options, 64, None)


def test_an_earlier_image_has_measured(runs: list[int]) -> None:
    memory = StepMemory(EARLIER)
    assert measured(memory) == EARLIER
    assert memory.measured == EARLIER, "it is handed on"
    assert runs == []


@pytest.mark.parametrize(("earlier", "others"), [(None, 1), (EARLIER, 0)], ids=["first", "alone"])
def test_steps_are_run_where_it_is_not_known(earlier: Measured | None, others: int, runs: list[int]) -> None:
    memory = StepMemory(earlier)
    assert measured(memory, others) == memory.measured == Measured(50, 5)
    assert runs == [1]
