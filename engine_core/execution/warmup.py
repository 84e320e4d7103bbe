"""The peak memory of a model's steps on a GPU, and the compilation of their kernels."""

from __future__ import annotations

import gc
from concurrent.futures import Executor
from dataclasses import replace

import torch

from penstock.engine_core.execution.cuda_graphs import kept_tokens
from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.dummy_runs import (
    encoder_steps,
    image_steps,
    largest_step,
    little_chunk,
    long_context_steps,
    mixed_steps,
    warmup_steps,
)
from penstock.engine_core.execution.forward import Network
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.eagle import EagleHead
from penstock.engine_core.models.memory_estimate import image_sizes
from penstock.engine_core.models.spec import ModelSpec


def step_peak(model: Network, spec: ModelSpec, options: RunnerOptions, tokens: int, draft: Draft | None = None) -> int:
    """Bytes of GPU memory that slot tables, worst-case steps, drafting behind them, graphs and the largest image take
    beyond what is allocated now. The steps are one of `tokens`, a small chunk and some at the end of the longest
    sequence.

    It is measured by running such steps, and capturing the largest graphs, over a cache of the scratch block alone.
    """
    device = options.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    trial = Runner(model, spec, replace(options, blocks=0), draft)
    sizes = trial.sizes
    for plan in trial.drafted([largest_step(sizes, tokens), little_chunk(sizes, tokens), *long_context_steps(sizes)]):
        trial.collect(trial.launch(plan))
    trial.prepare(largest=True)
    if options.encoder is not None:  # beside a step
        options.encoder.dummy_run(image_sizes(options.encoder.tower.spec)[-1])
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    if options.encoder is not None:
        peak += options.encoder.graph_bytes
    for graphs, hidden in trial.graph_states():
        peak += kept_tokens(graphs) * hidden * options.dtype.itemsize
    del trial
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def used_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the GPU that are taken now, by anyone, and all that it has."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def compile_steps(
    model: Decoder,
    options: RunnerOptions,
    tokens: int,
    draft: Draft | None = None,
    compilers: Executor | None = None,
    *,
    again: bool = False,
) -> None:
    """Compile or load the kernels of steps of at most `tokens`, of drafting and of the graphs; nothing on a CPU.

    Dummy runs take one layer of each kind and the scratch block, since other layers launch nothing else. `compilers`
    are worker processes, see `engine_core.execution.compilation`. again: as of `Runner.compile`.
    """
    if options.device.type == "cpu":
        return
    short = model.shallow()
    few = None if draft is None else shallow_draft(draft, short)
    runner = Runner(short, short.spec, replace(options, blocks=0), few)
    sizes = runner.sizes
    if short.spec.encoder:
        plans = encoder_steps(sizes, tokens, classifies=short.spec.classifier is not None)
    else:
        plans = [largest_step(sizes, tokens), *mixed_steps(sizes, tokens), *warmup_steps(sizes, tokens)]
    if short.spec.vision is not None:
        plans = [*image_steps(sizes, short.spec.vision, tokens), *plans]
    runner.compile(runner.drafted(plans), compilers, again=again)


def shallow_draft(draft: Draft, model: Decoder) -> Draft:
    """The same with one layer of each kind, beside the model with one of each kind."""
    draft = replace(draft, aux_layers=(0,) * len(draft.aux_layers))
    if draft.model is None:
        return draft
    if isinstance(draft.model, EagleHead):
        return replace(draft, model=draft.model.over(model))
    assert isinstance(draft.model, Decoder)
    short = draft.model.shallow()
    return replace(draft, model=short, spec=short.spec)
