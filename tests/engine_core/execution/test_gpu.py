"""The same runner on a GPU: the CPU's tokens, launches that never wait, memory measured and kept to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine_core import loading
from penstock.engine_core.execution.cuda_graphs import graph_sizes
from penstock.engine_core.execution.forward import Network
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.execution.step_output import Launched
from penstock.engine_core.execution.warmup import step_peak, used_memory
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.kernels.records import AttentionBatch
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import StepMasks, StepPlan
from tests.cuda import no_synchronization
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
from tests.engine_core.execution.test_drafts import Guess, any_number, drafted, half, mask, right
from tests.engine_core.execution.test_same_tokens import SAMPLINGS

pytestmark = pytest.mark.gpu

STEPS = 12


def options(device: str, *, graphs: bool = False) -> RunnerOptions:
    return RunnerOptions(
        device=torch.device(device), dtype=torch.float32, blocks=200, block_size=8, max_model_len=LENGTH,
        max_num_seqs=16, graphs=graph_sizes(2, 1, 16, 1000, LENGTH) if graphs else None,
    )  # fmt: skip


def gpu_runner(model: Network, *, graphs: bool) -> Runner:
    runner = Runner(model, tiny_spec(), options("cuda", graphs=graphs))
    runner.compile(())
    runner.prepare()
    return runner


def gpu_model() -> Decoder:
    """The tiny model with the CPU's weights."""
    model = registry.build(tiny_spec(), torch.float32, torch.device("cuda"), LENGTH)
    with torch.inference_mode():
        loading.load(model, Path(), "dummy")
        sources = tiny_model(packed=False).destinations()
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


@pytest.fixture(scope="module")
def on_cpu() -> list[list[int]]:
    found = lives()
    runner = Runner(tiny_model(), tiny_spec(), options("cpu"))
    prefill(runner, found, 32)
    decode(runner, found, STEPS + 8)
    return [life.output for life in found]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("budget", [32, 1000])
def test_the_same_tokens_as_on_a_cpu(on_cpu: list[list[int]], budget: int, graphs: bool) -> None:
    found = lives()
    runner = gpu_runner(gpu_model(), graphs=graphs)
    prefill(runner, found, budget)
    decode(runner, found, STEPS)
    assert [life.output for life in found] == [output[: STEPS + 1] for output in on_cpu]
    if runner.graphs is not None:
        assert runner.graphs.forward.replays == runner.statistics().steps - 1  # the last has no rows


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("guess", [right, half, any_number])
def test_drafts_change_no_token(on_cpu: list[list[int]], guess: Guess, graphs: bool) -> None:
    found = lives()
    runner = gpu_runner(gpu_model(), graphs=graphs)
    prefill(runner, found)
    drafted(runner, found, on_cpu, guess, 3, 2)
    length = min(len(life.output) for life in found)
    assert length >= STEPS
    assert [life.output[:length] for life in found] == [output[:length] for output in on_cpu]


@pytest.mark.parametrize("graphs", [False, True])
def test_masks_restrict_the_entries_they_are_of(graphs: bool) -> None:
    """The second step names masks that stand; the third has none, and nothing is left of them."""
    tables = block_tables(3, LENGTH // 8)
    found = [Life([5, 17, 2, at], Sampling(temperature=1.0), seed=at, slot=at, blocks=tables[at]) for at in range(3)]
    free = [replace(life, output=[]) for life in found]
    runner = gpu_runner(gpu_model(), graphs=graphs)
    prefill(runner, free)
    decode(runner, free, 3)
    runner = gpu_runner(gpu_model(), graphs=graphs)
    prefill(runner, found)
    for step in range(3):
        plan = StepPlan(step=step, epoch=0, decode_on=column(0, 1, 2) if step == 0 else b"", masked=column(0, 2))
        masks = None
        if step < 2:
            fresh = (column(8, 9), mask(20, 21) + mask(30)) if step == 0 else (b"", b"")
            masks = StepMasks(
                step=step, epoch=0, entries=column(0, 2), slots=column(9, 8), new_slots=fresh[0], bits=fresh[1]
            )
        for life, token in zip(found, tokens_of(runner.collect(runner.finish(runner.begin(plan), masks))), strict=True):
            life.output.append(token)
    assert found[0].output[1:3] == [30, 30]
    assert set(found[2].output[1:3]) <= {20, 21}
    assert found[1].output == free[1].output
    assert found[0].output[3] not in (30,) or found[2].output[3] not in (20, 21)


@pytest.mark.parametrize("graphs", [False, True])
def test_launching_waits_for_nothing(graphs: bool) -> None:
    """Two steps behind a long kernel are launched before it ends, whatever their rows ask for."""
    runner = gpu_runner(Fast(), graphs=graphs)
    found = lives()
    prefill(runner, found, 32)
    on = column(*(life.slot for life in found))
    runner.collect(runner.launch(StepPlan(step=0, epoch=0, decode_on=on)))
    torch.cuda.synchronize()
    with no_synchronization():
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
