"""The same runner on a GPU: the CPU's tokens, launches that never wait, memory measured and kept to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine_core import loading
from engine_core.execution.memory import step_peak, used_memory
from engine_core.execution.results import Launched
from engine_core.execution.runner import Runner, RunnerOptions
from engine_core.models import registry
from engine_core.models.decoder import Decoder
from kernels.attention import AttentionBatch
from protocol.messages import Sampling
from protocol.steps import StepPlan
from tests.engine_core.execution.harness import (
    LENGTH,
    VOCABULARY,
    Life,
    block_tables,
    column,
    decode,
    prefill,
    tiny_model,
    tiny_spec,
    tokens_of,
)
from tests.engine_core.execution.test_same_tokens import SAMPLINGS

pytestmark = pytest.mark.gpu

STEPS = 12


def options(device: str) -> RunnerOptions:
    return RunnerOptions(
        device=torch.device(device), dtype=torch.float32, blocks=200, block_size=8, max_model_len=LENGTH,
        max_num_seqs=16,
    )  # fmt: skip


def gpu_model() -> Decoder:
    """The tiny model with the CPU's weights."""
    model = registry.build(tiny_spec(), torch.float32, torch.device("cuda"), LENGTH)
    with torch.inference_mode():
        loading.load(model, Path(), "dummy")
        sources = tiny_model().destinations()
        for name, destination in model.destinations().items():
            source = sources[name].tensor
            assert destination.tensor is not None
            assert source is not None
            destination.tensor.copy_(source)
    return model


def lives() -> list[Life]:
    chance = np.random.default_rng(0)
    tables = block_tables(len(SAMPLINGS), LENGTH // 8)
    found = []
    for at, way in enumerate(SAMPLINGS):
        prompt = [int(token) for token in chance.integers(0, VOCABULARY, 5 + 11 * at)]
        found.append(Life(prompt, way, seed=at, slot=at, blocks=tables[at]))
    return found


class Fast:
    """A network without attention, whose work waits for nothing: logits follow from the last token alone."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        self.table = torch.randn(VOCABULARY, 32, generator=generator, device="cuda")
        self.head = torch.randn(32, VOCABULARY, generator=generator, device="cuda")

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch,
        cache: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:  # fmt: skip
        return self.table[input_ids.long()] + positions[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head


def test_the_same_tokens_as_on_a_cpu() -> None:
    on_cpu, on_gpu = lives(), lives()
    for found, model, device in ((on_cpu, tiny_model(), "cpu"), (on_gpu, gpu_model(), "cuda")):
        runner = Runner(model, tiny_spec(), options(device))
        prefill(runner, found, 32)
        decode(runner, found, STEPS)
    assert [life.output for life in on_gpu] == [life.output for life in on_cpu]


def test_launching_waits_for_nothing() -> None:
    """Two steps behind a long kernel are launched before it ends, whatever their rows ask for."""
    runner = Runner(Fast(), tiny_spec(), options("cuda"))
    found = lives()
    prefill(runner, found, 32)
    on = column(*(life.slot for life in found))
    runner.collect(runner.launch(StepPlan(step=0, epoch=0, decode_on=on)))
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode does not know every operation that waits
            torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(2_000_000_000)  # about a second
        flight: list[Launched] = []
        for step in range(1, 3):
            extra = Life([1, 2, 3], SAMPLINGS[3], slot=10 + step, blocks=[150 + step])
            chunk = column(extra.slot, 0, 3, 1)
            blocks = column(extra.slot, 190 + step)
            flight.append(
                runner.launch(StepPlan(step=step, epoch=0, starts=(extra.start(),), chunks=chunk, blocks=blocks))
            )
        assert not flight[0].finished
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = [runner.collect(launched) for launched in flight]
    assert all(len(tokens_of(result)) == len(found) + 1 and min(tokens_of(result)) >= 0 for result in results)
    assert results[0].busy > 0
    assert results[1].waited < 0.1


def test_the_worst_step_is_measured_with_tables_and_sampler() -> None:
    spec = msgspec.structs.replace(tiny_spec(), vocab_size=100_000)
    model = registry.build(spec, torch.float32, torch.device("cuda"), LENGTH)
    with torch.inference_mode():
        loading.load(model, Path(), "dummy")
    rows = replace(options("cuda"), max_num_seqs=64)
    peak = step_peak(model, spec, rows, 256)
    used, total = used_memory(torch.device("cuda"))
    logits = 64 * 100_000 * 4
    assert 2 * logits < peak < 100 * logits < total - used
    assert abs(step_peak(model, spec, rows, 256) - peak) <= 64 << 20


def test_seeded_draws_over_a_large_vocabulary_agree_with_a_cpu() -> None:
    from kernels.sampling import Draws, draw

    rows, vocabulary = 16, 128256
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)) * 2
    logits -= logits.amax(-1, keepdim=True)
    way = Sampling(temperature=1.0, top_p=0.9, min_p=0.001)

    def tokens(device: str) -> list[int]:
        draws = Draws(
            rows=torch.arange(rows, device=device),
            seeds=torch.arange(rows, device=device) * 7919,
            temperature=torch.ones(rows, device=device),
            min_p=torch.full((rows,), way.min_p, device=device),
            top_k=torch.arange(rows, device=device) * 100,
            top_p=torch.full((rows,), way.top_p, device=device),
            largest_top_k=1500,
            nucleus=True,
        )
        return draw(logits.to(device), draws, torch.arange(rows, device=device)).tolist()

    assert tokens("cuda") == tokens("cpu")
