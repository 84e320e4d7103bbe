"""Dense matrices rounded to the nearest of a format: what `--quantization` does while it loads."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.kernels.quantized import (
    EXPONENT_BIAS,
    FLOAT4,
    FLOAT8,
    LARGEST,
    SMALLEST,
    Float4Weight,
    Float8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    packed_pairs,
    spread_blocks,
)

MIDDLES = tuple((low + high) / 2 for low, high in itertools.pairwise(FLOAT4))
LARGEST_EXPONENT = 2  # of E2M1
GIVEN = 0.125  # scale of x where a format wants one and nobody has measured it: random weights alone


def round_matrix(form: WeightFormat, dense: Tensor) -> QuantizedWeight:
    """`[..., outputs, inputs]` in a format's layout: scales from the largest number that each stretches over."""
    if form.kind == "grouped":
        return round_groups(form, dense)
    if form.kind == "float4":
        return round_float4(form, dense)
    given = torch.tensor([GIVEN], device=dense.device) if form.activations == "static" else None
    if form.kind == "float8":
        return round_float8(form, dense, given)
    scales = (largest(dense.float()) / LARGEST[torch.int8]).clamp_min(SMALLEST)
    values = (dense.float() / scales[..., None]).round().to(torch.int8)
    return Int8Weight(values, scales, form.activations, given)


def round_float8(form: WeightFormat, dense: Tensor, given: Tensor | None) -> Float8Weight:
    """With a scale for each output, block, or for all. given: the scale of x."""
    if form.block is None:
        found = largest(dense.float())
        found = found.amax(-1, keepdim=True).expand(found.shape) if form.per_tensor else found
        scales = (found / LARGEST[FLOAT8]).clamp_min(SMALLEST).contiguous()
        divisors = scales[..., None]
    else:
        rows, columns = form.block
        outputs, inputs = dense.shape[-2:]
        padded = pad(dense.float(), (0, -inputs % columns, 0, -outputs % rows))
        shape = (*dense.shape[:-2], padded.shape[-2] // rows, rows, padded.shape[-1] // columns, columns)
        tiles = padded.view(shape)
        scales = (tiles.abs().amax((-3, -1)) / LARGEST[FLOAT8]).clamp_min(SMALLEST)
        divisors = spread_blocks(scales, form.block, dense.shape)
    most = LARGEST[FLOAT8]  # a quotient of the largest number may be a little more
    values = (dense.float() / divisors).clamp(-most, most).to(FLOAT8)
    return Float8Weight(values, scales, form.block, form.activations, given)


def round_groups(form: WeightFormat, dense: Tensor) -> GroupedWeight:
    """Integers from 0; the middle is zero, or the zero point."""
    group, steps = form.group or dense.shape[-1], 2**form.bits - 1
    rows = dense.float().reshape(*dense.shape[:-1], -1, group)  # [..., outputs, groups, group]
    zeros: Tensor | None = None
    if form.symmetric:
        scales = largest(rows) * 2 / steps
        middle: Tensor | float = 2.0 ** (form.bits - 1)
    else:
        low, high = rows.amin(-1).clamp_max(0.0), rows.amax(-1).clamp_min(0.0)
        scales = (high - low) / steps
        zeros = (-low / scales.clamp_min(SMALLEST)).round().clamp(0, steps).to(torch.uint8)
        middle = zeros.float()[..., None]
    scales = scales if dense.dtype is torch.float32 else scales.to(dense.dtype)
    divisors = scales.float().clamp_min(SMALLEST)[..., None]
    codes = ((rows / divisors).round() + middle).clamp(0, steps).to(torch.uint8).flatten(-2)
    return GroupedWeight(form.bits, group, packed_pairs(codes) if form.bits == 4 else codes, scales, zeros)


def round_float4(form: WeightFormat, dense: Tensor) -> Float4Weight:
    """To the nearest value under the scale of its group."""
    rows = dense.float().reshape(*dense.shape[:-1], -1, form.group)
    most = largest(rows)  # [..., outputs, groups]
    factors: Tensor | None = None
    if form.group == 32:  # MXFP4: the power of two below the largest, OCP Microscaling Formats 1.0, section 6.3
        exponents = torch.floor(torch.log2(most.clamp_min(SMALLEST))) - LARGEST_EXPONENT
        scales = (exponents + EXPONENT_BIAS).to(torch.uint8)
        divisors = torch.exp2(exponents)
    else:  # NVFP4
        whole = (most.amax((-2, -1), keepdim=True) / (LARGEST[FLOAT8] * FLOAT4[-1])).clamp_min(SMALLEST)
        scales = (most / FLOAT4[-1] / whole).to(FLOAT8)
        divisors = (scales.float() * whole).clamp_min(SMALLEST)
        factors = whole[..., 0].expand(dense.shape[:-1]).contiguous()
    scaled = rows / divisors[..., None]
    codes = torch.bucketize(scaled.abs(), torch.tensor(MIDDLES, device=dense.device))
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8).flatten(-2)
    return Float4Weight(packed_pairs(codes), scales, form.group, factors)


def largest(rows: Tensor) -> Tensor:
    """The largest magnitude along the last axis."""
    return rows.abs().amax(-1)
