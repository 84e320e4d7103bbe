"""What the benchmark of experts counts and tries, and its layer on a CPU. Its imports stand in the tests: they bring
Triton, whose interpreter other tests choose when they are collected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


def test_work_counts_the_experts_that_tokens_go_to() -> None:
    from benchmarks.expert_kernels import Model, work

    size, flops = work(Model("", 8, 2, 12, 5), tokens=3, pairs=6, used=4, width=12)
    assert size == 2 * (4 * 3 * 12 * 5 + 2 * 3 * 5)
    assert flops == 2 * 6 * 3 * 12 * 5


def test_what_a_rank_has() -> None:
    from benchmarks.expert_kernels import MODELS, share

    assert share(MODELS[0], 4, expert_parallel=True) == (32, 768)
    assert share(MODELS[0], 4, expert_parallel=False) == (128, 192)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 1024, 8192])
def test_candidates_differ_and_fit_the_chip(tokens: int) -> None:
    from benchmarks.expert_kernels import MODELS, candidates, name_of
    from penstock.kernels.chip import CHIPS
    from penstock.kernels.linear_tilings import ExpertTiling

    for model in MODELS:
        found = candidates(tokens, model)
        assert found
        assert len(found) == len({name_of(tiling) for tiling in found})
        for tiling in found:
            if isinstance(tiling, ExpertTiling):
                outputs = 2 * tiling.gate_up.outputs
                assert outputs == tiling.down.outputs
                rows, inputs, stages = tiling.gate_up.rows, tiling.gate_up.inputs, tiling.gate_up.stages
                assert 2 * (rows + outputs) * inputs * stages <= CHIPS["sm_90"].shared_memory


class Counter:
    """Calls once instead of timing."""

    def time(self, call: Callable[[int], object], calls: int) -> float:
        call(calls - 1)
        return 2.0


def test_every_part_of_a_layer_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import expert_kernels
    from benchmarks.expert_kernels import Layer, Model, measure
    from benchmarks.linear_kernels import text
    from penstock.kernels.routing_triton import Schedule

    def plain(layer: Layer, at: int, tiling: object) -> torch.Tensor:
        return layer.run(at)

    monkeypatch.setattr(Layer, "cut", plain)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # oneDNN's products trap on some machines
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    torch.manual_seed(0)
    layer = Layer(Model("tiny", 4, 2, 16, 32), 2, True, "cpu")
    assert (layer.held, layer.width) == (2, 16)
    found = list(measure(Counter(), layer, 3, True))  # type: ignore[arg-type]
    assert [(one.product, one.way) for one in found[:3]] == [
        ("routes", "own"), ("sorting", "own"), ("experts", "own"),
    ]  # fmt: skip
    assert len(found) == 3 + len(expert_kernels.candidates(3, layer.model))
    assert all(one.distance < 1e-6 and one.rows == 3 for one in found)
    assert isinstance(layer.sort(0), Schedule)
    pairs = sum(int((routes.experts < 2).sum()) for routes in layer.routes)
    assert found[2].flops == 6 * (pairs // expert_kernels.ROUNDS) * 16 * 32
    assert "tiny experts" in text(found[2])
