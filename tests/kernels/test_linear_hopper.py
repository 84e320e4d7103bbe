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
from penstock.kernels.low_rank import output_tiles
from penstock.kernels.low_rank_triton import shrink_rows, sort_rows
from penstock.kernels.quantize import quantize
from penstock.kernels.quantized import FLOAT8, QuantizedRows, RowFormat
from penstock.kernels.records import LowRankWeight

pytestmark = pytest.mark.sweep

CUDA = torch.device("cuda")


@pytest.mark.long  # that it compiles and fits is held by tests/benchmarks/test_chips.py, from its source as it is
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_it_compiles_for_the_chip(gated: bool, eight: bool, adapted: bool) -> None:
    """Without a GPU too: the program fits, and is made of the chip's own instructions."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "tests.kernels.pipelined_compilation",
        *(str(int(each)) for each in (gated, eight, adapted)),
    ]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shared"] <= 227 << 10
    assert found["instructions"] == ["mma.sync", "cp.async.bulk.tensor", "griddepcontrol.wait"]


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 48])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("places", [[2], [0, 3, 1], [1, 1, 0, 2, 1, 3, 3, 0]])
def test_adapters_of_each_row(places: list[int], gated: bool, rank: int) -> None:
    """They are added before the gate is taken; a base row's bits are those of a step without adapters."""
    multiply, inputs, tiling = pipelined_product(), 1096, PipelinedTiling(PIPELINED_ROWS, 2, 3)
    if multiply is None:
        pytest.skip("this is no GPU of Hopper's generation")
    torch.manual_seed(rank)
    parts = (slice(0, 96), slice(96, 192)) if gated else (slice(0, 128), slice(128, 160), slice(160, 200))
    outputs = parts[-1].stop

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").mul_(shape[-1] ** -0.5).bfloat16()

    x, weight = numbers(len(places), inputs) * 32, numbers(outputs, inputs)
    adapters = LowRankWeight(numbers(3, len(parts) * rank, inputs), numbers(3, outputs, rank), parts,
                             output_tiles(parts, rank, CUDA))  # fmt: skip
    rows = sort_rows(torch.tensor(places, dtype=torch.int32, device="cuda"), 3, invariant=False)
    found = multiply(x, weight, None, tiling, gated=gated, addition=shrink_rows(x, rows, adapters))
    plain = multiply(x, weight, None, tiling, gated=gated)
    for row, place in enumerate(places):
        exact = weight.double() @ x[row].double()
        for at, part in enumerate(parts if place else ()):
            shrunk = adapters.a[place - 1, at * rank : (at + 1) * rank].double() @ x[row].double()
            exact[part] += adapters.b[place - 1, part].double() @ shrunk
        if gated:
            gate, up = exact.chunk(2)
            exact = gate * gate.sigmoid() * up
        torch.testing.assert_close(found[row].double(), exact, rtol=2e-2, atol=2e-2)
        assert place or torch.equal(found[row], plain[row])
        assert not place or (found[row].double() - exact).norm() < 0.1 * (plain[row].double() - exact).norm()


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


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("width", "inputs"), [(4096, 4096), (200, 512), (1000, 1104), (48, 80), (1024, 14336)])
def test_products_of_8_bits(width: int, inputs: int, gated: bool, static: bool) -> None:
    """As above, with scales; the sums are fp32 throughout."""
    multiply = pipelined_product()
    if multiply is None:
        pytest.skip("this is no GPU of Hopper's generation")
    torch.manual_seed(width + inputs)
    scales = torch.rand(width * (1 + gated), device="cuda") * 0.01 + 0.001
    weight = (torch.randn(len(scales), inputs, device="cuda") * 16).to(FLOAT8)
    given = torch.tensor([0.02], device="cuda") if static else None
    rows = quantize(torch.randn(16, inputs, device="cuda").bfloat16(), RowFormat(FLOAT8, 0, given))
    product = (rows.values.double() * rows.scales.double()) @ (weight.double() * scales[:, None].double()).T
    if gated:
        gate, up = product.chunk(2, dim=1)
        product = gate * gate.sigmoid() * up
    first = None
    for height, warps, stages in ((8, 1, 8), (8, 2, 3), (16, 1, 2), (16, 4, 2)):
        for count in (1, 7, height):
            tiling = PipelinedTiling(height, warps, stages)
            some = QuantizedRows(rows.values[:count], rows.scales[:count], rows.dtype)
            found = multiply(some, weight, None, tiling, gated=gated, scales=scales)
            first = found if first is None else first
            assert torch.equal(found[:1], first[:1])
            error = (found.double() - product[:count]).norm() / product[:count].norm()
            assert error < 6e-3, (tiling, count)
