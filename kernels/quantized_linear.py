"""Products with quantized weights on a GPU: each layout's kernels, and the reference where it has none."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from penstock.kernels import gluon
from penstock.kernels.activation import activate, activate_rounded
from penstock.kernels.chip import chip_of
from penstock.kernels.grouped_linear import PlaneWeight
from penstock.kernels.linear_plans import plans_of
from penstock.kernels.linear_tilings import PipelinedTiling, Rescaled, SplitTiling, Tiling, VectorTiling, Way
from penstock.kernels.quantize import quantize, row_format
from penstock.kernels.quantized import (
    Float8Weight,
    Int8Weight,
    QuantizedRows,
    QuantizedWeight,
    RowFormat,
    Rows,
    multiply_reference,
)

ONE_ROW = VectorTiling(2, 2048, 4)  # where blocks of scales are lower than `kernels.scaled_hopper` takes
ROWS_OF_LIBRARY = 8  # a multiple of which cuBLAS takes where scales are of blocks: their columns are aligned then


def multiply_quantized(
    x: Rows,
    weight: QuantizedWeight | PlaneWeight,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    invariant: bool = False,
    rows: RowFormat | None = None,
) -> Rows:
    """`kernels.linear.linear`, or `gated_linear`, with a quantized weight: `[rows, inputs] -> [rows, outputs]`.

    x may come as `kernels.quantize.row_format` of the weight wants it. rows: what the product behind a gate wants, if
    the gate is a kernel of its own, which then gives it.
    """
    if isinstance(weight, PlaneWeight):
        from penstock.kernels.grouped_linear_triton import multiply

        assert isinstance(x, Tensor)
        return multiply(x, weight, bias, gated=gated, invariant=invariant)
    kind = kind_of(weight)
    if kind and chip_of(weight.values.device).runs_triton:
        assert isinstance(weight, Float8Weight | Int8Weight)
        form = row_format(weight)
        x = quantize(x, form) if isinstance(x, Tensor) and form is not None else x
        way = way_of(x, weight, kind, gated=gated, invariant=invariant)
        return multiply_quantized_by(way, x, weight, bias, gated=gated, rows=rows)
    assert isinstance(x, Tensor)
    found = multiply_reference(x, weight, bias)
    return activate(found) if gated else found


def kind_of(weight: QuantizedWeight) -> str:
    """The weight's format as plans know it; empty where it has no kernels here."""
    if isinstance(weight, Int8Weight):
        return "int8"
    if not isinstance(weight, Float8Weight):
        return ""
    if weight.activations == "none":
        return "fp8_weights"
    return "fp8" if weight.block is None else "fp8_blocks"


def way_of(x: Rows, weight: Float8Weight | Int8Weight, kind: str, *, gated: bool, invariant: bool) -> Way:
    """How the product's plan cuts it."""
    outputs, inputs = weight.shape
    values = x if isinstance(x, Tensor) else x.values
    key = outputs // 2 if gated else outputs, inputs, x.dtype, gated, 0, kind, invariant
    return plans_of(values.device).find(key).way(len(values))


def multiply_quantized_by(
    way: Way,
    x: Rows,
    weight: Float8Weight | Int8Weight,
    bias: Tensor | None,
    *,
    gated: bool,
    rows: RowFormat | None = None,
) -> Rows:
    """The product in one way. What a way cannot do, tiles of any product do."""
    from penstock.kernels import scaled_linear_triton as kernels
    from penstock.kernels.linear_triton import pipelined_product, tma_compatible

    if isinstance(way, VectorTiling):
        return kernels.multiply_scaled_vector(x, weight, bias, way, gated=gated)
    aligned = tma_compatible(weight.values) and tma_compatible(x if isinstance(x, Tensor) else x.values)
    if isinstance(way, PipelinedTiling):
        pipelined = pipelined_product()
        if pipelined is not None and aligned and isinstance(x, QuantizedRows) and kind_of(weight) == "fp8":
            return pipelined(x, weight.values, bias, way, gated=gated, scales=weight.scales)
    if isinstance(way, SplitTiling) and aligned and isinstance(x, QuantizedRows):
        hopper = gluon.load("scaled_hopper")
        if hopper is not None and isinstance(weight, Float8Weight) and weight.block in (None, (128, 128)):
            split: Tensor = hopper.multiply_split(x, weight, bias, way, gated=gated)
            return split
    if isinstance(x, QuantizedRows) and aligned and multiplied_by_library(x, weight):
        if isinstance(way, Rescaled) and weight.scales.dim() == 1:
            return kernels.multiply_rescaled(x, weight, bias, gated=gated)
        if way is None:
            return gate(library_product(x, weight, bias), rows) if gated else library_product(x, weight, bias)
    if isinstance(way, SplitTiling) and isinstance(x, QuantizedRows) and len(x.values) == 1 and not gated:
        blocks = weight.block if isinstance(weight, Float8Weight) else None
        if blocks is not None and blocks[0] % ONE_ROW.outputs == 0:
            return kernels.multiply_scaled_vector(x, weight, bias, ONE_ROW, gated=False)
    if not isinstance(way, Tiling):
        way = way_of(x, weight, kind_of(weight), gated=gated, invariant=True)
        assert isinstance(way, Tiling)
    if way.tma and not aligned:
        way = msgspec.structs.replace(way, tma=False)
    found = kernels.multiply_scaled_tiles(x, weight, bias, way, gated=gated and way.gated)
    return gate(found, rows) if gated and not way.gated else found


def gate(found: Tensor, rows: RowFormat | None) -> Rows:
    return activate(found) if rows is None else activate_rounded(found, rows)


def multiplied_by_library(x: QuantizedRows, weight: Float8Weight | Int8Weight) -> bool:
    """Whether cuBLAS and CUTLASS have products of these rows and weights."""
    outputs, inputs = weight.shape
    if not isinstance(weight, Float8Weight) or x.dtype is not torch.bfloat16 or outputs % 16:
        return False
    chip = chip_of(x.values.device)
    if weight.block is None:
        return chip.library_scales
    blocks = weight.block == (128, 128) and x.scales.shape[1] == inputs // 128 and inputs % 128 == outputs % 128 == 0
    return blocks and chip.library_blocks and len(x.values) > 1


def padded(x: QuantizedRows) -> QuantizedRows:
    """The same with as many rows as cuBLAS asks for where scales are of blocks. What is in those behind is unset."""
    rows, inputs = x.values.shape
    size = -(-rows // ROWS_OF_LIBRARY) * ROWS_OF_LIBRARY
    if size == rows:
        return x
    values, scales = x.values.new_empty(size, inputs), x.scales.new_empty(x.scales.shape[1], size)
    values[:rows].copy_(x.values)
    scales[:, :rows].copy_(x.scales.t())
    return QuantizedRows(values, scales.t(), x.dtype)


def library_product(x: QuantizedRows, weight: Float8Weight | Int8Weight, bias: Tensor | None) -> Tensor:
    """By the library, with its short sums where scales are not of blocks."""
    if weight.scales.dim() == 2:
        rows = len(x.values)
        x = padded(x)
        scaled: Tensor = torch._scaled_mm(
            x.values, weight.values.t(), x.scales, weight.scales.t(), out_dtype=x.dtype, use_fast_accum=False
        )
        return scaled[:rows] if bias is None else scaled[:rows].add_(bias)
    found: Tensor = torch._scaled_mm(
        x.values, weight.values.t(), x.scales.contiguous(), weight.scales[None], bias, out_dtype=x.dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return found
