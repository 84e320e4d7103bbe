"""What the largest steps take of a GPU is measured once in the life of a process, by all members of a group or none.
How many snapshots of states a CPU holds beside given bytes of KV cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine_core.distributed.group import ALONE
from penstock.engine_core.kv.block_layout import BlockLayout
from penstock.engine_core.models.memory_estimate import CacheShape, snapshot_bytes
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig
from penstock.services.executor import cache_size
from penstock.services.executor.cache_size import StepMemory, count_blocks
from penstock.services.executor.sleep import Measured
from tests.engine_core.execution.harness import tiny_spec
from tests.engine_core.execution.test_recurrent_state import hybrid

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


@pytest.mark.parametrize(("spec", "most"), [(hybrid(), 5), (tiny_spec(), 0)], ids=["recurrent", "attention alone"])
def test_snapshots_take_a_quarter_of_the_bytes_that_are_given(spec: ModelSpec, most: int) -> None:
    """A block is smaller than a snapshot, and what a block takes says nothing of snapshots."""
    given, nothing = 4 * 5 * snapshot_bytes(hybrid(), 4), None
    options: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, group=ALONE, max_num_seqs=8)
    shape = CacheShape(256, BlockLayout(16, (0,)), 64, 8, length_given=True)
    config = Config(executor=ExecutorConfig(kv_cache_memory=given))
    assert count_blocks(config, shape, nothing, spec, options, None, 64, StepMemory())[1] == most  # type: ignore[arg-type]
