"""A tiny real model and a scheduler's worth of hand-made plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from penstock.engine_core import loading
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import SlotStart, StepPlan, StepResult
from tests.engine_core.models.specs import small_spec

VOCABULARY = 97
LENGTH = 128
GREEDY = Sampling(temperature=0.0)


def tiny_spec() -> ModelSpec:
    return small_spec(layers=2, vocab_size=VOCABULARY, max_position=LENGTH, longest=LENGTH)


def tiny_model(*, packed: bool = True) -> Decoder:
    """On the CPU. Packed weights cannot be copied from."""
    model = registry.build(tiny_spec(), torch.float32, torch.device("cpu"), LENGTH)
    with torch.inference_mode():
        loading.load(model, Path(), "dummy", seed=3)
        if packed:
            pack(model.destinations())
    return model


def tiny_runner(model: Decoder, *, block_size: int = 8, slots: int = 8, blocks: int = 100) -> Runner:
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=blocks, block_size=block_size, max_model_len=LENGTH,
        max_num_seqs=slots,
    )  # fmt: skip
    return Runner(model, tiny_spec(), options)


def column(*numbers: int | np.integer[object]) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def tokens_of(result: StepResult) -> list[int]:
    return [int(token) for token in np.frombuffer(result.token_ids, "<i4")]


@dataclass
class Life:
    """One request as a test wants it run."""

    prompt: Sequence[int]
    sampling: Sampling = GREEDY
    seed: int = 1
    slot: int = 0
    adapter: int = 0  # its place
    blocks: Sequence[int] = ()  # its whole block table
    output: list[int] = field(default_factory=list)

    def start(self, computed: int = 0) -> SlotStart:
        return SlotStart(
            slot=self.slot,
            token_ids=column(*self.prompt, *self.output),
            prompt_tokens=len(self.prompt),
            computed=computed,
            blocks=column(*self.blocks),
            sampling=self.sampling,
            seed=self.seed,
            adapter=self.adapter,
        )


def prefill(runner: Runner, lives: Sequence[Life], budget: int = 1000) -> None:
    """Start all lives at once and run their tokens in chunks of `budget`; each gets its next token."""
    left = [(life, 0, len(life.prompt) + len(life.output)) for life in lives]
    starts = tuple(life.start() for life in lives)
    while left:
        chunks, sampling, rest = [], [], []
        for life, first, known in left:
            count = min(budget, known - first)
            chunks.append((life.slot, first, count, int(first + count == known)))
            if first + count == known:
                sampling.append(life)
            else:
                rest.append((life, first + count, known))
        left = rest
        plan = StepPlan(step=0, epoch=0, starts=starts, chunks=np.array(chunks, "<i4").tobytes())
        starts = ()
        for life, token in zip(sampling, tokens_of(runner.collect(runner.launch(plan))), strict=True):
            life.output.append(token)


def decode(runner: Runner, lives: Sequence[Life], steps: int, depth: int = 2) -> None:
    """Decode all lives together with up to `depth` steps in flight."""
    lives = sorted(lives, key=lambda life: life.slot)
    slots = column(*(life.slot for life in lives))
    flight = []
    for step in range(steps):
        flight.append(runner.launch(StepPlan(step=step, epoch=0, decode_on=slots if step == 0 else b"")))
        if len(flight) == depth:
            take(lives, runner.collect(flight.pop(0)))
    for launched in flight:
        take(lives, runner.collect(launched))
    runner.launch(StepPlan(step=steps, epoch=0, decode_off=slots))


def take(lives: Sequence[Life], result: StepResult) -> None:
    for life, token in zip(lives, tokens_of(result), strict=True):
        life.output.append(token)


def block_tables(count: int, each: int, seed: int = 0) -> list[list[int]]:
    """Disjoint block tables in random order from 1 on."""
    order = np.random.default_rng(seed).permutation(count * each) + 1
    return [[int(block) for block in row] for row in order.reshape(count, each)]
