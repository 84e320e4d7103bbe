"""What a server of a model will launch, compiled before it starts."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

from engine_core.execution.runner import Runner, RunnerOptions
from engine_core.execution.trial import crowded_steps, warm_steps, worst_step
from engine_core.models.decoder import Decoder


def compile_steps(model: Decoder, options: RunnerOptions, tokens: int, compilers: Executor | None = None) -> None:
    """Have the kernels of steps of at most `tokens`, and of the graphs, compiled or loaded; nothing on a CPU.

    They are rehearsed over one layer of each kind and the scratch block, since other layers launch nothing else.
    `compilers` are processes that take part, see `engine_core.execution.compilation`.
    """
    if options.device.type == "cpu":
        return
    short = model.shallow()
    runner = Runner(short, short.spec, replace(options, blocks=0))
    sizes = runner.sizes
    plans = [worst_step(sizes, tokens), *crowded_steps(sizes, tokens), *warm_steps(sizes, tokens)]
    runner.compile(plans, compilers)
