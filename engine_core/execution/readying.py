"""What a server of a model will launch, compiled before it starts."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

from penstock.engine_core.execution.drafting import Draft
from penstock.engine_core.execution.runner import Runner, RunnerOptions
from penstock.engine_core.execution.trial import crowded_steps, warm_steps, worst_step
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.eagle import EagleHead


def compile_steps(
    model: Decoder,
    options: RunnerOptions,
    tokens: int,
    draft: Draft | None = None,
    compilers: Executor | None = None,
) -> None:
    """Have the kernels of steps of at most `tokens`, of drafting behind them and of the graphs compiled or loaded;
    nothing on a CPU.

    They are rehearsed over one layer of each kind and the scratch block, since other layers launch nothing else.
    `compilers` are processes that take part, see `engine_core.execution.compilation`.
    """
    if options.device.type == "cpu":
        return
    short = model.shallow()
    few = None if draft is None else shallow_draft(draft, short)
    runner = Runner(short, short.spec, replace(options, blocks=0), few)
    sizes = runner.sizes
    plans = [worst_step(sizes, tokens), *crowded_steps(sizes, tokens), *warm_steps(sizes, tokens)]
    runner.compile(runner.drafted(plans), compilers)


def shallow_draft(draft: Draft, model: Decoder) -> Draft:
    """The same with one layer of each kind, beside the model with one of each kind."""
    draft = replace(draft, taps=(0,) * len(draft.taps))
    if draft.model is None:
        return draft
    if isinstance(draft.model, EagleHead):
        return replace(draft, model=draft.model.over(model))
    assert isinstance(draft.model, Decoder)
    short = draft.model.shallow()
    return replace(draft, model=short, spec=short.spec)
