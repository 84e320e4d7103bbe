"""Experts with quantized weights of every layout, for the tests of the reference and of the kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.quantized import (
    FLOAT8,
    LARGEST,
    Float4Weight,
    Float8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
)

LAYOUTS = (
    "fp8_block",
    "fp8_lines",
    "fp8_row",
    "fp8_static",
    "fp8_weights",
    "int8_row",
    "mxfp4",
    "nvfp4",
    "int4",
    "int4_zeros",
    "int8_group",
)


def quantized(layout: str, shape: tuple[int, int, int], block: int = 128) -> QuantizedWeight:
    """Random experts `[experts, outputs, inputs]` whose products with rows of about 1 are about 1."""
    experts, outputs, inputs = shape
    std = inputs**-0.5
    if layout.startswith(("fp8", "int8_row")):
        return eight_bits(layout, torch.randn(shape) * std * torch.exp(torch.randn(experts, outputs, 1) / 2), block)
    if layout in ("mxfp4", "nvfp4"):
        values = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8)
        if layout == "mxfp4":
            middle = 127 + round(torch.tensor(std / 3).log2().item())
            return Float4Weight(
                values, torch.randint(middle - 2, middle + 2, (*shape[:2], inputs // 32)).to(torch.uint8), 32
            )
        scales = (torch.rand(*shape[:2], inputs // 16) * 400 + 1).to(FLOAT8)
        return Float4Weight(values, scales, 16, std / 600 * (torch.rand(experts, outputs) + 0.5))
    bits, group = (8, 32) if layout == "int8_group" else (4, 64)
    scales = (torch.rand(*shape[:2], inputs // group) + 0.5) * std / 2 ** (bits - 2)
    zeros = None
    if layout == "int4_zeros":
        zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
    values = torch.randint(0, 256, (experts, outputs, inputs * bits // 8), dtype=torch.uint8)
    return GroupedWeight(bits, group, values, scales.bfloat16(), zeros)


def eight_bits(layout: str, dense: Tensor, block: int) -> Float8Weight | Int8Weight:
    """A dense weight rounded to 8 bits."""
    if layout == "fp8_lines":  # blocks of one output, where parts of a weight end within a block
        found = eight_bits("fp8_block", dense, block)
        assert isinstance(found, Float8Weight)
        scales = found.scales.repeat_interleave(block, 1)[:, : dense.shape[1]]
        return replace(found, scales=scales.contiguous(), block=(1, block))
    if layout == "fp8_block":
        experts, outputs, inputs = dense.shape
        rows, columns = -(-outputs // block), -(-inputs // block)
        scales = (0.5 + torch.rand(experts, rows, columns)) * dense.abs().max() / LARGEST[FLOAT8]
        spread = scales.repeat_interleave(block, 1)[:, :outputs].repeat_interleave(block, 2)[:, :, :inputs]
        return Float8Weight((dense / spread).clamp(-448, 448).to(FLOAT8), scales, (block, block), "block")
    kind = torch.int8 if layout == "int8_row" else FLOAT8
    scales = dense.abs().amax(2) / LARGEST[kind]
    values = dense / scales[..., None]
    if kind is torch.int8:
        return Int8Weight(values.round().to(kind), scales)
    static = torch.tensor([4.0 / 448]) if layout == "fp8_static" else None
    activations = "static" if static is not None else "none" if layout == "fp8_weights" else "row"
    return Float8Weight(values.to(kind), scales, None, activations, static)
