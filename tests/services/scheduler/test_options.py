"""How many steps are in flight; what else the scheduler is built with is seen in test_loop.py."""

from __future__ import annotations

import pytest

from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.services.scheduler.options import ahead, depth


@pytest.mark.parametrize(("stages", "overlap", "steps"), [(1, True, 2), (1, False, 1), (2, True, 3), (4, False, 4)])
def test_each_stage_has_a_step_and_with_overlap_one_more_waits(stages: int, overlap: bool, steps: int) -> None:
    config = Config(model=ModelConfig(pipeline_parallel_size=stages), scheduler=SchedulerConfig(overlap=overlap))
    assert depth(config) == steps
    assert ahead(config) == 1 + overlap
