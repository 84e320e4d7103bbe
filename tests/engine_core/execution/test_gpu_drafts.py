"""Drafting on a GPU by drafting.py and draft_graphs.py: a CPU's tokens, by graphs and by launches; no waiting."""

from __future__ import annotations

import pytest
import torch

from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.model_runner import Runner
from penstock.engine_core.models.decoder import Decoder
from penstock.protocol.steps import StepPlan
from tests.cuda import no_synchronization
from tests.engine_core.execution.harness import Life, column, decode, prefill, tiny_model, tiny_spec
from tests.engine_core.execution.test_draft_model import MOST, Bench
from tests.engine_core.execution.test_gpu import Fast, gpu_model, lives, options

pytestmark = pytest.mark.gpu

STEPS = 12


@pytest.fixture(scope="module")
def on_cpu() -> list[list[int]]:
    found = lives()
    runner = Runner(tiny_model(), tiny_spec(), options("cpu"))
    prefill(runner, found, 32)
    decode(runner, found, STEPS + 2 * MOST)
    return [life.output for life in found]


def drafting_runner(model: Decoder | Fast, *, graphs: bool) -> Runner:
    runner = Runner(model, tiny_spec(), options("cuda", graphs=graphs), Draft(model, tiny_spec(), MOST))
    runner.compile(())
    runner.prepare()
    return runner


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("count", [1, MOST])
@pytest.mark.parametrize("budget", [7, 1000])
def test_the_same_tokens_as_on_a_cpu(on_cpu: list[list[int]], budget: int, count: int, graphs: bool) -> None:
    bench = Bench(drafting_runner(gpu_model(), graphs=graphs), lives())
    bench.prefill(count, budget)
    while min(len(life.output) for life in bench.lives) < STEPS:
        bench.decode(count, 2, count)
    for life, said in zip(bench.lives, on_cpu, strict=True):
        assert life.output[: len(said)] == said[: len(life.output)]
    assert bench.accepted >= 0.8 * bench.entries, "it drafts for itself"
    assert (bench.runner.draft_graphs is not None) == graphs
    if (drafting := bench.runner.draft_graphs) is not None:
        assert drafting.replays >= count * len(bench.lives)
        assert drafting.first.replays >= len(bench.lives)


@pytest.mark.parametrize("graphs", [False, True])
def test_launching_waits_for_nothing(graphs: bool) -> None:
    runner = drafting_runner(Fast(), graphs=graphs)
    found: list[Life] = lives()
    bench = Bench(runner, found)
    bench.prefill(MOST)
    bench.decode(MOST, 2, MOST)
    rows = [number for life in found for number in (life.slot, -2, 2, MOST, 0)]
    drafts = [number for life in found for number in (life.slot, MOST)]
    plan = StepPlan(
        step=0, epoch=0, drafts=column(*drafts), draft_ids=column(*[-3] * MOST * len(found)), drafting=column(*rows)
    )
    torch.cuda.synchronize()
    with no_synchronization():
        torch.cuda._sleep(2_000_000_000)  # about a second
        flight = [runner.launch(plan) for _ in range(2)]
        assert not flight[0].finished
    results = [runner.collect(launched) for launched in flight]
    assert 0.0 < results[1].busy < 0.2
    assert results[1].waited < 0.1
