"""Experts' products whose rows lie expert by expert: what surrounds the kernel anywhere, the kernel itself on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.kernels import gluon
from penstock.kernels.activation import SILU
from penstock.kernels.experts import route
from penstock.kernels.experts_triton import multiply_sorted
from penstock.kernels.linear_tilings import SCALED_BY_MEAN, ExpertTiling, Tiling
from penstock.kernels.quantize import quantize
from penstock.kernels.quantized import Float8Weight, QuantizedRows, RowFormat, spread_blocks
from penstock.kernels.records import NO_BIASES, Activation, ExpertBiases, Routes, Routing
from penstock.kernels.routing_triton import Schedule
from tests.kernels.quantized_experts import quantized
from tests.kernels.test_activation import CLAMPED

ROWS = 8  # of a group, in the kernel's place
TILES = ExpertTiling(Tiling(16, 128, 128, 4, 2), Tiling(16, 128, 128, 4, 2), sorted=True)


def dequantized(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    return values.double() * spread_blocks(scales, block, values.shape).double()


def multiply_blocks(
    x: QuantizedRows, weight: Float8Weight, schedule: Schedule, form: RowFormat | None
) -> Tensor | QuantizedRows:
    """The kernel's products, tile by tile."""
    found = torch.full((len(x.values), weight.shape[1]), torch.nan, dtype=torch.float64)
    for expert, begin, size in schedule.tiles[: int(schedule.total)].tolist():
        rows = slice(begin, begin + size)
        lines = dequantized(weight.values[expert], weight.scales[expert], (128, 128))
        found[rows] = dequantized(x.values[rows], x.scales[rows], (1, 128)) @ lines.T
    if form is None:
        return found.to(x.dtype)
    gate, up = found.to(x.dtype).double().chunk(2, 1)
    return quantize((gate * gate.sigmoid() * up).to(x.dtype), form)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the reference in the kernel's place; the rows of each product."""
    rows: list[int] = []

    def counted(x: QuantizedRows, *others: object) -> Tensor | QuantizedRows:
        rows.append(len(x.values))
        return multiply_blocks(x, *others)  # type: ignore[arg-type]

    kernel = SimpleNamespace(GROUPS=2, ROWS=ROWS, BLOCK=SimpleNamespace(value=128), multiply_blocks=counted)
    monkeypatch.setattr(gluon, "load", {"experts_hopper": kernel}.get)
    return rows


def operands(tokens: int, layout: str = "fp8_block") -> tuple[Tensor, Routes, Float8Weight, Float8Weight]:
    torch.manual_seed(tokens)
    gate_up, down = quantized(layout, (6, 256, 256)), quantized(layout, (6, 256, 128))
    assert isinstance(gate_up, Float8Weight)
    assert isinstance(down, Float8Weight)
    routes = route(torch.randn(tokens, 6), Routing(2, normalised=True))
    return torch.randn(tokens, 256) * torch.exp(torch.randn(tokens, 256)), routes, gate_up, down


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is tested")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("first", [0, 2])
def test_rows_reach_their_experts_and_their_tokens(first: int, launched: list[int]) -> None:
    """first: experts of another rank before those that are held."""
    x, routes, gate_up, down = operands(37)
    held = tuple(
        Float8Weight(one.values[: 6 - first].contiguous(), one.scales[: 6 - first].contiguous(), (128, 128), "block")
        for one in (gate_up, down)
    )
    found = multiply_sorted(x, routes, *held, first, TILES)
    assert launched == [74, 74]
    expected = multiply_sorted(x, routes, *held, first, replace(TILES, sorted=False))
    assert launched == [74, 74]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is tested")
@pytest.mark.parametrize("why", ["lines", "biases", "activation", "no gates", "no kernel"])
def test_what_the_kernel_does_not_do_is_done_by_tiles(
    why: str, launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, routes, gate_up, down = operands(3, "fp8_lines" if why == "lines" else "fp8_block")
    biases, activation, gated = NO_BIASES, SILU, why != "no gates"
    if why == "biases":
        biases = ExpertBiases(None, torch.zeros(6, 256))
    elif why == "activation":
        activation = Activation(*CLAMPED)
    elif why == "no gates":
        gate_up = Float8Weight(
            gate_up.values[:, :128].contiguous(), gate_up.scales[:, :1].contiguous(), (128, 128), "block"
        )
    elif why == "no kernel":
        monkeypatch.setattr(gluon, "load", lambda name: None)
    found = multiply_sorted(x, routes, gate_up, down, 0, TILES, biases, activation, gated=gated)
    assert launched == []
    assert found.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "chosen", "hidden", "width"), [(128, 8, 2048, 768), (4, 2, 256, 128), (8, 2, 1024, 3584)]
)
def test_a_gpu_s_kernel_gives_the_bits_of_tiles(count: int, chosen: int, hidden: int, width: int) -> None:
    """Of experts with tiles of one group's rows or both's, with more than one, and without any."""
    if gluon.load("experts_hopper") is None or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this is no GPU of Hopper's generation")
    with torch.device("cuda"):
        gate_up, down = (
            quantized("fp8_block", (count, 2 * width, hidden)),
            quantized("fp8_block", (count, hidden, width)),
        )
    way = SCALED_BY_MEAN[-1][1]
    assert way.sorted
    for tokens in (1, 3, 100, 900, 4096):
        x = (torch.randn(tokens, hidden, device="cuda") * torch.randn(tokens, hidden, device="cuda").exp()).bfloat16()
        logits = torch.randn(tokens, count, device="cuda") + torch.linspace(0, 3, count, device="cuda")
        routes = route(logits, Routing(chosen, normalised=True))
        expected = multiply_sorted(x, routes, gate_up, down, 0, replace(way, sorted=False))
        for _ in range(2):
            assert torch.equal(multiply_sorted(x, routes, gate_up, down, 0, way), expected), tokens
        assert expected.isfinite().all()
