"""Keys and values in pages of 8-bit floats (e4m3), as attention's kernels read them.

Products take operands of 16 bits, and no less can be read from a tile of shared memory by its columns. So pages are
read as pairs of neighbouring numbers: the first numbers of a tile's pairs are one operand, the second numbers another,
and queries and results are split likewise. Scales stay outside the loop over keys: that of a head's keys multiplies the
scale of its scores, that of its values the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention_tiling import power_of_2
from penstock.kernels.records import AttentionOptions


def unpacking(second: bool, kind: str, shift: int, mask: str, factor: str) -> str:
    """PTX that takes one number of each of two pairs in e4m3: sign, exponent and mantissa go where the wider type has
    them, and are multiplied by the difference of the exponents' biases, which is right for subnormal numbers, too."""
    sign, bits = ("mov.b32 sign, $1", f"shr.b32 bits, $1, {shift}")
    if not second:
        sign, bits = ("shl.b32 sign, $1, 8", f"shl.b32 bits, $1, {8 - shift}")
    return (
        f"{{ .reg .b32 sign, bits, factor, zero; {sign}; {bits}; and.b32 sign, sign, 0x80008000;"
        f" lop3.b32 bits, bits, {mask}, sign, 0xEA; mov.b32 factor, {factor}; mov.b32 zero, 0x80008000;"
        f" fma.rn.{kind}x2 $0, bits, factor, zero; }}"
    )


FIRST_BF16: tl.constexpr = tl.constexpr(unpacking(False, "bf16", 4, "0x07F007F0", "0x7B807B80"))  # times 2**120
SECOND_BF16: tl.constexpr = tl.constexpr(unpacking(True, "bf16", 4, "0x07F007F0", "0x7B807B80"))
FIRST_F16: tl.constexpr = tl.constexpr(unpacking(False, "f16", 1, "0x3F803F80", "0x5C005C00"))  # times 2**8
SECOND_F16: tl.constexpr = tl.constexpr(unpacking(True, "f16", 1, "0x3F803F80", "0x5C005C00"))


def paired(k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
    """Pages in e4m3 as pairs of numbers, int16 [blocks, block_size, kv_heads, dim / 2]; others as they are."""
    if k_pages.element_size() > 1:
        return k_pages, v_pages
    return k_pages.view(torch.int16), v_pages.view(torch.int16)


def dim_tile(dim: int, options: AttentionOptions) -> int:
    """Columns of a head in a tile; either half of them is an operand of its own where they are pairs."""
    return max(16 if options.kv_scales is None else 32, power_of_2(dim))


@triton.jit
def unpack(pairs, NTH: tl.constexpr, LIKE: tl.constexpr, ASM: tl.constexpr):
    """The first or second number in e4m3 of each int16, as LIKE. The chip's own conversions take a scarce unit's time
    for each number, and ASM three cheap operations for two; it reads NaN as 480, and a token whose keys are NaN fails
    as it computes them.
    """
    if ASM and tl.bfloat16 == LIKE:
        return tl.inline_asm_elementwise(SECOND_BF16 if NTH else FIRST_BF16, "=r,r", [pairs], tl.bfloat16, True, 2)
    elif ASM and tl.float16 == LIKE:
        return tl.inline_asm_elementwise(SECOND_F16 if NTH else FIRST_F16, "=r,r", [pairs], tl.float16, True, 2)
    else:
        byte = (pairs >> (8 * NTH)).to(tl.uint8)
        return byte.to(tl.float8e4nv, bitcast=True).to(LIKE)


@triton.jit
def head_pages(k_pages, v_pages, scale, kv_scales, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr):
    """Where the pages of a key-value head begin, the scale of its scores, and that of its values."""
    gain = 1.0
    WIDE: tl.constexpr = DIM // 2 if k_pages.dtype.element_ty == tl.int16 else DIM
    if k_pages.dtype.element_ty == tl.int16:
        scale *= tl.load(kv_scales + kv_head)
        gain = tl.load(kv_scales + KV_HEADS + kv_head)
    return k_pages + kv_head * WIDE, v_pages + kv_head * WIDE, scale, gain


@triton.jit
def split_pairs(x):
    """The first and the second columns of each pair, `[rows, columns / 2]`."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
