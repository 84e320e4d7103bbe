"""Products of 65 to 256 rows whose weights are fetched ahead: compiled anywhere, on a GPU held to double precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from benchmarks.linear_shapes import wide_of
from kernels.linear_tilings import MEMORY, WideTiling

on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="of Hopper's generation alone"
)


@pytest.mark.parametrize(("rows", "outputs", "splits", "gated"), [(128, 128, 1, True), (256, 64, 2, False)])
def test_it_compiles_for_the_chip(rows: int, outputs: int, splits: int, gated: bool) -> None:
    """Without a GPU too: the program fits, and is made of the chip's own instructions."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    sizes = [str(int(size)) for size in (rows, outputs, splits, gated)]
    command = [sys.executable, "-m", "tests.kernels.wide_compilation", *sizes]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shared"] <= MEMORY
    assert found["instructions"] == ["wgmma.mma_async", "cp.async.bulk.tensor", "griddepcontrol.wait"]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if not gated:
        return product
    gate, up = product.chunk(2, dim=1)
    return gate * gate.sigmoid() * up


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("width", "inputs"), [(4096, 4096), (200, 512), (1000, 1096), (3072, 1024), (40, 264)])
def test_products_of_any_size(width: int, inputs: int, gated: bool, dtype: torch.dtype) -> None:
    """The same bits at each call, and rows are independent of each other."""
    from kernels.linear_wide import multiply_wide

    torch.manual_seed(width + inputs)
    weight = torch.randn(width * (1 + gated), inputs, device="cuda").mul_(inputs**-0.5).to(dtype)
    whole = torch.randn(256, inputs, device="cuda").to(dtype)
    for bias in (None, torch.randn(len(weight), device="cuda").to(dtype)):
        product = exact(whole, weight, bias, gated=gated)
        for height in (128, 256):
            for tiling in wide_of(height, gated):
                if tiling.splits * 64 > inputs:
                    continue
                first = multiply_wide(whole[:65], weight, bias, tiling, gated=gated)
                for rows in (65, height - 1, height):
                    found = multiply_wide(whole[:rows], weight, bias, tiling, gated=gated)
                    assert torch.equal(found[:65], first), (tiling, rows)
                    error = (found.double() - product[:rows]).norm() / product[:rows].norm()
                    assert error < 5e-3, (tiling, rows)


@pytest.mark.gpu
@on_gpu
def test_what_lies_behind_the_rows_is_not_read() -> None:
    from kernels.linear_wide import multiply_wide

    wide = torch.full((128, 1024), torch.nan, device="cuda").bfloat16()
    wide[:70, :512] = 1
    weight = torch.ones(64, 512, device="cuda").bfloat16()
    for splits in (1, 2):
        found = multiply_wide(wide[:70, :512], weight, None, WideTiling(128, 64, splits, 4), gated=False)
        assert torch.equal(found, torch.full((70, 64), 512.0, device="cuda").bfloat16())
