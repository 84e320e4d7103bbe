"""Products whose weights are fetched ahead: compiled anywhere, and on a GPU held to double precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from penstock.kernels.linear_tilings import PIPELINED_ROWS, PipelinedTiling
from penstock.kernels.linear_triton import pipelined_product

CUDA = torch.device("cuda")


@pytest.mark.parametrize("gated", [False, True])
def test_it_compiles_for_the_chip(gated: bool) -> None:
    """Without a GPU too: the program fits, and is made of the chip's own instructions."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.pipelined_compilation", str(int(gated))]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shared"] <= 227 << 10
    assert found["instructions"] == ["mma.sync", "cp.async.bulk.tensor", "griddepcontrol.wait"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("width", "inputs"), [(4096, 4096), (200, 512), (1000, 1096), (3072, 1024), (40, 72), (1024, 14336)]
)
def test_products_of_any_size(width: int, inputs: int, gated: bool, dtype: torch.dtype) -> None:
    """The same bits at each call, whatever the ring holds; rows are independent of each other."""
    multiply = pipelined_product()
    if multiply is None:
        pytest.skip("this is no GPU of Hopper's generation")
    torch.manual_seed(width + inputs)
    weight = torch.randn(width * (1 + gated), inputs, device="cuda").mul_(inputs**-0.5).to(dtype)
    whole = torch.randn(PIPELINED_ROWS, inputs, device="cuda").to(dtype)
    for bias in (None, torch.randn(len(weight), device="cuda").to(dtype)):
        product = whole.double() @ weight.double().T + (0 if bias is None else bias.double())
        if gated:
            gate, up = product.chunk(2, dim=1)
            product = gate * gate.sigmoid() * up
        first = None
        for warps, stages in ((1, 8), (1, 2), (2, 3), (4, 2)):
            for rows in (1, 3, PIPELINED_ROWS):
                tiling = PipelinedTiling(PIPELINED_ROWS, warps, stages)
                found = multiply(whole[:rows], weight, bias, tiling, gated=gated)
                first = found if first is None else first
                assert torch.equal(found[:1], first[:1])
                error = (found.double() - product[:rows]).norm() / product[:rows].norm()
                assert error < 5e-3, (warps, stages, rows)


@pytest.mark.gpu
def test_what_lies_behind_the_rows_is_not_read() -> None:
    multiply = pipelined_product()
    if multiply is None:
        pytest.skip("this is no GPU of Hopper's generation")
    wide = torch.full((PIPELINED_ROWS, 1024), torch.nan, device="cuda").bfloat16()
    wide[:3, :512] = 1
    weight = torch.ones(64, 512, device="cuda").bfloat16()
    found = multiply(wide[:3, :512], weight, None, PipelinedTiling(PIPELINED_ROWS, 1, 4), gated=False)
    assert torch.equal(found, torch.full((3, 64), 512.0, device="cuda").bfloat16())
