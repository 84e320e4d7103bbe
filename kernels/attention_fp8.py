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

QUERY_SHIFT: tl.constexpr = tl.constexpr(2.0**-6)  # of queries in float16, so that none is beyond its range
# PTX that takes the first, or the second, number of each of two pairs in e4m3.
WIDEN: tl.constexpr = tl.constexpr(
    "{ .reg .b16 pair, other; .reg .b32 both, others; mov.b32 {pair, other}, $1;"
    " cvt.rn.f16x2.e4m3x2 both, pair; cvt.rn.f16x2.e4m3x2 others, other; prmt.b32 $0, both, others, "
)
FIRST: tl.constexpr = tl.constexpr(WIDEN.value + "0x5410; }")
SECOND: tl.constexpr = tl.constexpr(WIDEN.value + "0x7632; }")


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
    """The first or the second number in e4m3 of each int16, as LIKE. Triton's own conversion wants a thread's numbers
    beside each other."""
    if ASM and tl.float16 == LIKE:
        return tl.inline_asm_elementwise(SECOND if NTH else FIRST, "=r,r", [pairs], tl.float16, True, 2)
    else:
        byte = (pairs >> (8 * NTH)).to(tl.uint8)
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(LIKE)


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
def paired_queries(q):
    """Queries as they are multiplied with pairs: the first and the second columns of each, `[rows, columns / 2]`, and
    what the scale of the scores is multiplied with. The chip widens e4m3 to float16, which bfloat16 becomes, too.
    """
    first, second = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
    factor = 1.0
    if tl.bfloat16 == q.dtype:
        # Not by a plain product: LLVM narrows one to float16, in which the queries would be infinite before it.
        shift = tl.full(first.shape, QUERY_SHIFT, tl.float32)
        first = tl.fma(first.to(tl.float32), shift, tl.zeros(first.shape, tl.float32)).to(tl.float16)
        second = tl.fma(second.to(tl.float32), shift, tl.zeros(first.shape, tl.float32)).to(tl.float16)
        factor = 1.0 / QUERY_SHIFT
    return first, second, factor
