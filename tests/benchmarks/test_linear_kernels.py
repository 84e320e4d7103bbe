"""The parts of linear_kernels.py and linear_shapes.py that need no GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.linear_kernels import call, figure, notable, text, without_overlap
from benchmarks.linear_shapes import MODELS, Product, candidates, products, work
from penstock.kernels import linear_triton, norm_triton
from penstock.kernels.chip import chip_of
from penstock.kernels.linear_tilings import Tiling, VectorTiling, describe


def test_products_of_a_model() -> None:
    eight, small = ({product.name: product for product in products(model)} for model in MODELS)
    assert (eight["qkv"].outputs, eight["qkv"].inputs) == (6144, 4096)
    assert (eight["gate and up"].outputs, eight["gate and up"].width) == (28672, 14336)
    assert (small["output"].outputs, small["output"].inputs) == (1024, 2048)
    assert small["logits"].outputs == 151936
    weights = MODELS[0].layers * sum(product.outputs * product.inputs for product in products(MODELS[0])[:-1])
    assert 2 * weights == pytest.approx(13.96e9, rel=0.01)


def test_work_counts_each_operand_once() -> None:
    size, flops = work(Product("", 10, 4, gated=True), rows=3)
    assert size == 2 * (20 * 4 + 3 * 4 + 3 * 10)
    assert flops == 2 * 3 * 20 * 4


def test_share_of_the_nearer_limit() -> None:
    named = {"model": "m", "product": "p", "rows": 1, "way": "w", "chosen": True}
    slow = figure((4_600_000, 1), 2.0, **named)
    assert (slow.limit, slow.share) == ("read", 0.5)
    busy = figure((1, 790_000_000), 4.0, **named)
    assert (busy.limit, busy.share) == ("matrix", 0.25)
    assert "25.0 % of matrix" in text(busy)
    assert text(busy).startswith("*")


def test_what_is_printed_of_a_sweep() -> None:
    def way(name: str, chosen: bool = False) -> bool:
        return notable(
            figure((1, 1), 1.0, model="m", product="p", rows=1, way=name, chosen=chosen)
        )  # fmt: skip

    assert way("cuBLAS")
    assert way("8x16x128 invariant")
    assert way("8x16x128", chosen=True)
    assert not way("8x16x128")


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 65, 256, 1024, 8192])
def test_candidates_differ_and_hold_the_rows(rows: int) -> None:
    for gated in (False, True):
        found = candidates(rows, gated)
        assert len(found) == len(set(found)) == len({describe(tiling) for tiling in found})
        assert any(isinstance(tiling, VectorTiling) for tiling in found) == (rows == 1)
        if rows <= 64:
            assert all(tiling.rows >= min(rows, 64) for tiling in found if isinstance(tiling, Tiling))


@pytest.mark.parametrize("gated", [False, True])
def test_every_way_gives_the_product(gated: bool) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1, 96, device=device)
    product = Product("", 32, 96, gated)
    weight = torch.randn(product.outputs, 96, device=device) / 10
    ways = VectorTiling(2, 32, 4), Tiling(16, 16, 32, 4, 2), Tiling(16, 16, 32, 4, 2, tma=True, gated=False)
    plain = torch.nn.functional.linear(x, weight)
    if gated:
        plain = torch.nn.functional.silu(plain[:, :32]) * plain[:, 32:]
    for way in ways:
        torch.testing.assert_close(call(product, x, weight, way), plain, rtol=1e-4, atol=1e-5)


def test_launches_without_overlap() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with without_overlap():
        assert not norm_triton.chip_of(device).pdl
        assert not linear_triton.chip_of(device).pdl
    assert linear_triton.chip_of is chip_of
