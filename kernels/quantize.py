"""Rows of x as products with 8-bit weights take them: e4m3 or integers, and scales that depend on the row alone."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.quantized import (
    Float8Weight,
    Int8Weight,
    QuantizedRows,
    QuantizedWeight,
    RowFormat,
    quantize_rows,
)


def row_format(weight: QuantizedWeight | Tensor) -> RowFormat | None:
    """What the weight wants its rows to be; None: as they are."""
    if not isinstance(weight, Float8Weight | Int8Weight) or weight.activations == "none":
        return None
    if isinstance(weight, Float8Weight) and weight.block is not None and weight.activations == "block":
        return RowFormat(weight.values.dtype, weight.block[1])
    return RowFormat(weight.values.dtype, scale=weight.input_scale if weight.activations == "static" else None)


def quantize(x: Tensor, form: RowFormat) -> QuantizedRows:
    """`[rows, inputs]` in the format. The kernel's values and scales are the reference's to the bit."""
    if chip_of(x.device).runs_triton:
        from penstock.kernels.quantize_triton import quantize_rows as quantize_on_gpu

        return quantize_on_gpu(x, form)
    values, scales = quantize_rows(x, form.kind, form.block, form.scale)
    return QuantizedRows(values, scales.t().contiguous().t(), x.dtype)
