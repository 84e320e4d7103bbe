"""What is compiled before a start is what a start launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.engine_core.execution.compilation import prewarm
from penstock.engine_core.execution.dummy_runs import warmup_steps
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.execution.warmup import compile_steps


def test_a_cpu_compiles_nothing() -> None:
    model: Any = None  # is not looked at
    compile_steps(model, RunnerOptions(torch.device("cpu"), torch.float32, 4, 16, 64, 2), 64)


@pytest.mark.gpu
def test_nothing_is_left_to_compile_for_the_whole_model() -> None:
    from tests.engine_core.execution.test_gpu import gpu_model, gpu_runner

    model = gpu_model()
    options = replace(gpu_runner(model, graphs=True).options)
    compile_steps(model, options, 100)
    runner = Runner(model, model.spec, options)
    assert runner.graphs is not None
    with prewarm() as uncompiled:
        runner.graphs.dummy_run(runner.graphs.order.all)
        for plan in warmup_steps(runner.sizes, 100):
            runner.collect(runner.launch(plan))
    assert uncompiled == []
