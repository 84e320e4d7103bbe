"""Products with a weight `[outputs, inputs]`, and the gate of the MLP fused to one.

On a GPU sizes alone choose between cuBLAS and the kernels of `kernels.linear_triton`, so a captured graph keeps its
form. `invariant` asks for products whose rows do not depend on how many other rows there are, to the last bit.

On a CPU oneDNN multiplies, by weights in a layout of its own (`packed`). Its products of few rows take a half to a
seventh of the time that MKL's do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation import activate
from penstock.kernels.chip import chip_of
from penstock.kernels.grouped_linear import PlaneWeight, planes_or_dense
from penstock.kernels.low_rank import expand, shrink
from penstock.kernels.quantize import row_format
from penstock.kernels.quantized import (
    Float4Weight,
    Float8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedRows,
    QuantizedWeight,
    RowFormat,
    Rows,
    held_bytes,
    multiply_reference,
    rounded_rows,
)
from penstock.kernels.records import LowRankInputs


@dataclass(frozen=True, eq=False)
class DequantizedWeight:
    """A quantized weight as a CPU multiplies by it: dense, in fp32 where rows are rounded, too."""

    dense: Tensor  # perhaps packed
    layout: QuantizedWeight  # says how rows are treated; its values are given back

    @property
    def shape(self) -> torch.Size:
        return self.dense.shape


Operand: TypeAlias = Tensor | QuantizedWeight | PlaneWeight | DequantizedWeight


def linear(
    x: Rows, weight: Operand, bias: Tensor | None = None, *, invariant: bool = False,
    addition: LowRankInputs | None = None,
) -> Tensor:  # fmt: skip
    """`x @ weight.T + bias`: `[rows, inputs] -> [rows, outputs]`, summed in fp32, returned in x's type; with what
    adapters add to it."""
    if isinstance(x, QuantizedRows) or chip_of(x.device).runs_triton:
        found = device_linear(x, weight, bias, gated=False, invariant=invariant, addition=addition)
        assert isinstance(found, Tensor)
        return found
    out = host_linear(x, weight, bias)
    if addition is not None:
        expand(out, shrink(*addition))
    return out


def gated_linear(
    x: Rows,
    weight: Operand,
    bias: Tensor | None = None,
    *,
    invariant: bool = False,
    rows: RowFormat | None = None,
    addition: LowRankInputs | None = None,
) -> Rows:
    """silu(gate) * up of a fused weight `[2 * width, inputs]`, gate first: `[rows, inputs] -> [rows, width]`. It may
    come as `rows` says, on a GPU."""
    if isinstance(x, QuantizedRows) or chip_of(x.device).runs_triton:
        return device_linear(x, weight, bias, gated=True, invariant=invariant, rows=rows, addition=addition)
    return activate(linear(x, weight, bias, addition=addition))


def device_linear(
    x: Rows, weight: Operand, bias: Tensor | None, *, gated: bool, invariant: bool, rows: RowFormat | None = None,
    addition: LowRankInputs | None = None,
) -> Rows:  # fmt: skip
    """The product on a GPU."""
    if addition is not None:
        return add_adapters(x, weight, bias, addition, gated=gated, invariant=invariant)
    if isinstance(weight, Tensor):
        from penstock.kernels.linear_triton import multiply

        assert isinstance(x, Tensor)
        return multiply(x, weight, bias, gated=gated, invariant=invariant)
    from penstock.kernels.quantized_linear import multiply_quantized

    assert not isinstance(weight, DequantizedWeight), "a CPU's"
    return multiply_quantized(x, weight, bias, gated=gated, invariant=invariant, rows=rows)


def add_adapters(
    x: Rows, weight: Operand, bias: Tensor | None, addition: LowRankInputs, *, gated: bool, invariant: bool
) -> Tensor:
    """The product on a GPU with what adapters add to it: in its own kernel, or in one behind it."""
    if isinstance(weight, Tensor):
        from penstock.kernels.low_rank_triton import multiply_adapted

        assert isinstance(x, Tensor)
        found = multiply_adapted(x, weight, bias, addition, gated=gated, invariant=invariant)
        if found is not None:
            return found
    shrunk = shrink(*addition)
    out = device_linear(x, weight, bias, gated=False, invariant=invariant)
    assert isinstance(out, Tensor)
    expand(out, shrunk)
    return activate(out) if gated else out


def rows_wanted(weight: Operand) -> RowFormat | None:
    """What a kernel before a product with the weight may round its rows to; None: nothing."""
    if isinstance(weight, Tensor | PlaneWeight | DequantizedWeight):
        return None
    return row_format(weight) if chip_of(weight.values.device).runs_triton else None


def host_linear(x: Tensor, weight: Operand, bias: Tensor | None) -> Tensor:
    """The product on a CPU; the weight may be packed."""
    if isinstance(weight, DequantizedWeight):
        rows = rounded_rows(x, weight.layout).to(weight.dense.dtype)
        return host_linear(rows, weight.dense, None if bias is None else bias.to(rows.dtype)).to(x.dtype)
    if not isinstance(weight, Tensor):
        assert not isinstance(weight, PlaneWeight), "a GPU's"
        return multiply_reference(x, weight, bias)
    if weight.is_mkldnn:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return found
    return functional.linear(x, weight, bias)


def prepared(weight: Operand, dtype: torch.dtype) -> Operand:
    """A loaded weight as products of rows of `dtype` want it: packed on a CPU, where a quantized one is dequantized; on
    a GPU in the order in which its kernels read it."""
    if isinstance(weight, DequantizedWeight | PlaneWeight):
        return weight
    if isinstance(weight, Tensor):
        return packed(weight)
    if isinstance(weight, GroupedWeight | Float4Weight) and chip_of(weight.values.device).runs_triton:
        return planes_or_dense(weight, dtype)
    return dequantized(weight, dtype)


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> Operand:
    """The weight as a CPU multiplies by it; itself on a GPU."""
    if chip_of(weight.values.device).vendor != "cpu":
        return weight
    rounds = isinstance(weight, Float8Weight | Int8Weight) and weight.activations != "none"
    dense = packed(weight.dequantized(torch.float32 if rounds else dtype))
    return DequantizedWeight(dense, replace(weight, values=weight.values.to("meta"), scales=weight.scales.to("meta")))


def operand_bytes(weight: Operand) -> int:
    if isinstance(weight, DequantizedWeight):
        return weight.dense.numel() * weight.dense.itemsize
    return weight.nbytes if isinstance(weight, Tensor) else held_bytes(weight)


def packed(weight: Tensor) -> Tensor:
    """The weight as oneDNN multiplies by it, in new memory; itself on a GPU, and where oneDNN lacks its type here."""
    if weight.is_mkldnn or chip_of(weight.device).vendor != "cpu" or not torch._C._has_mkldnn:
        return weight
    if weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and has_bfloat16()):
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return found
    return weight


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this processor, in hardware or not."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
