"""Weights in groups of every kind, for the tests of their layout and of their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.quantized import FLOAT8, Float4Weight, GroupedWeight

KINDS = (
    "int4 128 bf16",
    "int4 128 fp16 zeros",
    "int4 64 bf16 order",
    "int4 32 bf16 zeros",
    "int4 32 fp32",
    "int4 0 fp32 zeros",
    "int8 128 bf16",
    "int8 32 fp16 zeros",
    "int8 0 fp32",
    "mxfp4",
    "nvfp4",
)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def grouped(kind: str, outputs: int, inputs: int, device: str = "cpu") -> GroupedWeight | Float4Weight:
    """A random weight whose products with rows of about 1 are about 1. A group of 0 is all inputs."""
    name, *words = kind.split()
    std = inputs**-0.5
    bits = 8 if name == "int8" else 4
    values = torch.randint(0, 256, (outputs, inputs * bits // 8), dtype=torch.uint8).to(device)
    if name == "mxfp4":
        middle = 127 + round(torch.tensor(std / 3).log2().item())
        scales = torch.randint(middle - 2, middle + 2, (outputs, inputs // 32))
        return Float4Weight(values, scales.to(torch.uint8).to(device), 32)
    if name == "nvfp4":
        scales = (torch.rand(outputs, inputs // 16) * 400 + 1).to(FLOAT8)
        return Float4Weight(values, scales.to(device), 16, (std / 600 * (torch.rand(outputs) + 0.5)).to(device))
    group = int(words[0]) or inputs
    scales = ((torch.rand(outputs, inputs // group) + 0.5) * std / 2 ** (bits - 2)).to(TYPES[words[1]])
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8).to(device) if "zeros" in words else None
    order = torch.randperm(inputs).int().to(device) if "order" in words else None
    return GroupedWeight(bits, group, values, scales.to(device), zeros, order)


def exact_product(x: Tensor, weight: GroupedWeight | Float4Weight, bias: Tensor | None, gated: bool) -> Tensor:
    """In double precision; both halves of a gated product are rounded first."""
    if isinstance(weight, GroupedWeight) and weight.order is not None:
        x = x[:, weight.order]
    found = x.double() @ weight.dequantized(torch.float32).double().T
    if bias is not None:
        found += bias.double()
    if gated:
        gate, up = found.to(x.dtype).double().chunk(2, dim=1)
        found = gate / (1 + (-gate).exp()) * up
    return found
