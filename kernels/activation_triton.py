"""Activations of the MLP in Triton: one pass over the product, or where a product ends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.quantize_triton import empty_rows, row_tile, row_warps, store_rounded
from penstock.kernels.quantized import QuantizedRows, RowFormat
from penstock.kernels.records import Activation

TILE = 1024
# PTX that rounds two numbers to bfloat16 at once. One at a time they queue at the unit of exponentials and divisions.
ROUND = tl.constexpr(
    "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"
)
SILU = tl.constexpr("silu")  # the default of a kernel: Triton 3.6 takes no bare string there


def activate_rows(product: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """`kernels.activation.activate` by the kernel."""
    tokens, width = product.shape[0], product.shape[1] // (2 if gated else 1)
    assert product.stride(1) == 1
    out = torch.empty(tokens, width, dtype=product.dtype, device=product.device)
    launch(product, out, out, width, TILE, activation, gated=gated)
    return out


def gate_rows(product: Tensor, activation: Activation, rows: RowFormat) -> QuantizedRows:
    """`kernels.activation.activate_rounded` by the kernel."""
    tokens, width = product.shape[0], product.shape[1] // 2
    assert product.stride(1) == 1
    found = empty_rows(tokens, width, rows, product)
    tile = row_tile(width, rows)
    launch(product, found.values, found.scales, width, tile, activation, gated=True, rows=rows)
    return found


def launch(
    product: Tensor, out: Tensor, scales: Tensor, width: int, tile: int, activation: Activation, *, gated: bool,
    rows: RowFormat | None = None,
) -> None:  # fmt: skip
    chip = chip_of(product.device)
    activation_kernel[(len(product), triton.cdiv(width, tile))](
        product, out, scales, product.stride(0), WIDTH=width, TILE=tile, GATED=gated, KIND=activation.kind,
        SLOPE=activation.slope, LIMIT=activation.limit, SHIFT=activation.shift, ROUNDED=rows is not None,
        BLOCK=0 if rows is None else rows.block, STATIC=rows is not None and rows.scale is not None,
        ASM=chip.runs_triton, PDL=chip.pdl, num_warps=4 if rows is None else row_warps(tile), launch_pdl=chip.pdl,
    )  # fmt: skip


@triton.jit
def activated(x, KIND: tl.constexpr, SLOPE: tl.constexpr):
    """The function alone; NaN stays NaN."""
    if KIND == "relu2":
        found = tl.where(x < 0.0, 0.0, x) * x
    elif KIND == "gelu":
        found = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        slope = x * SLOPE
        if KIND == "gelu_tanh":
            # 0.5 (1 + tanh z) is the sigmoid of 2 z, and the approximation has z = sqrt(2 / pi) (x + 0.044715 x^3).
            slope = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        found = x / (1.0 + tl.exp(-tl.maximum(slope, -80.0)))  # beyond it nothing is left
    return found


@triton.jit
def gate_values(
    gate, up, KIND: tl.constexpr = SILU, SLOPE: tl.constexpr = 1.0, LIMIT: tl.constexpr = 0.0,
    SHIFT: tl.constexpr = 0.0,
):  # fmt: skip
    """activation(gate) * (up + SHIFT) in fp32, of values within LIMIT."""
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    if LIMIT != 0.0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if SHIFT != 0.0:
        up += SHIFT
    return activated(gate, KIND, SLOPE) * up


@triton.jit
def finish_tile(
    sums, ups, bias, output, width, TYPE: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Bias, gate and rounding of a finished tile `[rows, outputs]`; `ups` are those of outputs `width` further on."""
    real = output < width
    if BIAS:
        sums += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            ups += tl.load(bias + width + output, mask=real, other=0.0).to(tl.float32)[None, :]
        sums = gate_values(sums.to(TYPE), ups.to(TYPE), KIND, SLOPE, LIMIT, SHIFT)  # as the host rounds
    return sums.to(TYPE)


@triton.jit
def activation_kernel(
    product, out, scales, stride, WIDTH: tl.constexpr, TILE: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr, STATIC: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part of one row, in fp32, rounded once; ROUNDED: to the product's type, then to 8 bits."""
    begin_pdl(PDL)
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = places < WIDTH
    gate = tl.load(product + row * stride + places, mask=there, other=0.0)
    if GATED:
        up = tl.load(product + row * stride + WIDTH + places, mask=there, other=0.0)
        found = gate_values(gate, up, KIND, SLOPE, LIMIT, SHIFT)
    else:
        found = activated(gate.to(tl.float32), KIND, SLOPE)
    if ROUNDED:
        if ASM and product.dtype.element_ty == tl.bfloat16:
            found = tl.inline_asm_elementwise(ROUND, "=f,=f,f,f", [found], tl.float32, is_pure=True, pack=2)
        else:
            found = found.to(product.dtype.element_ty).to(tl.float32)
        store_rounded(found, row, tl.num_programs(0), tl.program_id(1) * TILE, out, scales, WIDTH, TILE, BLOCK, STATIC)
    else:
        tl.store(out + row * WIDTH + places, found.to(out.dtype.element_ty), mask=there)
