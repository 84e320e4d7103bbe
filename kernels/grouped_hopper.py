"""Products with weights of 4 bits in groups on Hopper, in Gluon: weights are fetched before the rows are known.

As in `kernels.linear_hopper` tiles of packed weights and of rows go through pipelines in shared memory, loaded by TMA,
the first weights before the previous kernel has ended. Values are unpacked in registers, see `kernels.grouped_linear`,
and multiplied with their scales, rounded to their type. Groups of four warps multiply by WGMMA with the weights as the
operand in registers, and unpack a plane while the one before is multiplied, for which Triton would wait.

That makes other bits than the tiles of `kernels.grouped_linear_triton`, so invariant products are not made here.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.chip import chip_of
from penstock.kernels.gluon_names import REINTERPRET, async_load, barrier
from penstock.kernels.grouped_linear import PlaneWeight
from penstock.kernels.grouped_linear_triton import unpacking
from penstock.kernels.grouped_tilings import BLOCK as BLOCK_INPUTS
from penstock.kernels.grouped_tilings import LINE, WideTiling

PLANES = tl.constexpr(4)
BLOCK = tl.constexpr(BLOCK_INPUTS)
RUN = tl.constexpr(BLOCK_INPUTS // 4)  # inputs of a plane, words of a block
ROW = tl.constexpr(LINE)  # bytes of a row of swizzled shared memory


def multiply_wide(x: Tensor, weight: PlaneWeight, bias: Tensor | None, tiling: WideTiling, *, gated: bool) -> Tensor:
    """The product. x must be `tma_compatible`, the weight of 4 bits in blocks of `BLOCK` inputs."""
    rows, inputs = x.shape
    form, width = weight.form, weight.shape[0] // (2 if gated else 1)
    blocks, parts = form.blocks(inputs), 2 if gated else 1
    layout = gl.NVMMASharedLayout(ROW.value, 16, 2)
    x_tiles = TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [tiling.rows, form.run], layout)
    tiles = TensorDescriptor(
        weight.values, list(weight.values.shape), [blocks * form.run, 1], [tiling.outputs, form.run], layout
    )
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    high, wide = -(-rows // tiling.rows), -(-width // tiling.outputs)
    partials, splits = out, tiling.splits if high * wide <= len(weight.arrivals) else 1
    share = -(-blocks // splits)
    assert share * (splits - 1) < blocks, "a program would have no inputs"
    if splits > 1:
        sums = high * wide * splits * parts * tiling.outputs * tiling.rows
        partials = torch.empty(sums, dtype=torch.float32, device=x.device)
    pdl = chip_of(x.device).pdl
    plane_wide_kernel[(high, wide, splits)](
        x_tiles, tiles, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        out if bias is None else bias, partials, weight.arrivals, out, rows, width, blocks, weight.shape[0],
        share,
        ROWS=tiling.rows, OUTPUTS=tiling.outputs, STAGES=tiling.stages, X_STAGES=tiling.x_stages, WARPS=tiling.warps,
        SPLITS=splits, SCALES=form.scales, SCALE=form.scale.upper(), ZEROS=weight.zeros is not None,
        GATED=gated, BIAS=bias is not None, PDL=pdl, num_warps=tiling.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@gluon.jit
def plane_of(words, offset, PLANE: gl.constexpr, TYPE: gl.constexpr):
    """A plane of words as floats, with the offset added. offset: TYPE, -128 (float16: -1024) less the zero point."""
    PTX: gl.constexpr = unpacking("INT4", PLANE, TYPE.is_bf16())
    return gl.inline_asm_elementwise(PTX, "=r,r,r", [words, offset], dtype=offset.dtype, is_pure=True, pack=2)


@gluon.jit
def size_of(words, AT: gl.constexpr, SCALE: gl.constexpr):
    """A block's scale in fp32, from its word."""
    if SCALE == "FP32":
        found = (words >> 32 * AT).to(gl.int32).to(gl.float32, bitcast=True)
    elif SCALE == "BF16":
        found = ((words >> 16 * AT).to(gl.int32) << 16).to(gl.float32, bitcast=True)
    else:
        found = (words >> 16 * AT).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return found


@gluon.jit
def offset_of(words, AT: gl.constexpr, ZEROS: gl.constexpr, TYPE: gl.constexpr):
    """What `plane_of` adds, from a word of zero points, or for the middle of the range."""
    BASE: gl.constexpr = -128.0 if TYPE.is_bf16() else -1024.0
    if ZEROS:
        found = (BASE - (words >> 8 * AT & 255).to(gl.float32)).to(TYPE)
    else:
        found = (words * 0 + (BASE - 8.0)).to(TYPE)
    return found


@gluon.jit
def store_tile(
    sums, bias, out, first_row, first, rows, width,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, WARPS: gl.constexpr, SUMS: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Bias, gate and rounding of a finished tile `[outputs, rows]`; GATED: `[gates and ups, rows]`."""
    TYPE: gl.constexpr = out.dtype.element_ty
    HIGH: gl.constexpr = OUTPUTS // 8 if OUTPUTS < 256 else 32
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [HIGH, 32 // HIGH], [1, WARPS], [0, 1])
    output = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, SUMS))
    if GATED:
        sums, ups = gl.split(sums.reshape([2, OUTPUTS, ROWS]).permute((1, 2, 0)))
        sums, ups = gl.convert_layout(sums, SUMS), gl.convert_layout(ups, SUMS)
    if BIAS:
        sums += gl.load(bias + output, mask=output < width, other=0.0).to(gl.float32)[:, None]
    if GATED:
        if BIAS:
            ups += gl.load(bias + width + output, mask=output < width, other=0.0).to(gl.float32)[:, None]
        gate = sums.to(TYPE).to(gl.float32)
        sums = gate / (1.0 + gl.exp(-gate)) * ups.to(TYPE).to(gl.float32)
    found = gl.convert_layout(sums.to(TYPE), WIDE)
    output = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, WIDE))
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, WIDE))
    places = row.to(gl.int64)[None, :] * width + output[:, None]
    gl.store(out + places, found, mask=(output < width)[:, None] & (row < rows)[None, :])


@gluon.jit
def copy_words(values, tiles, ready, block, line, width, stage, OUTPUTS: gl.constexpr, HALVES: gl.constexpr):
    """Start the copies of a block of weights into a stage, which must be free."""
    mbarrier.expect(ready, HALVES * OUTPUTS * ROW)
    for half in gl.static_range(HALVES):
        async_load(values, [half * width + line, block * RUN], ready, tiles.index(stage * HALVES + half))


@gluon.jit
def copy_rows(x, x_tiles, full, block, row, step, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Start the copy of a plane of rows, of a step that is counted from the program's first block."""
    stage = step % STAGES
    mbarrier.expect(full.index(stage), ROWS * ROW)
    async_load(x, [row, block * BLOCK + step * RUN], full.index(stage), x_tiles.index(stage))


@gluon.jit
def scaled_plane(
    words, scale, zero, PLANE: gl.constexpr, SCALES: gl.constexpr, SCALE: gl.constexpr, ZEROS: gl.constexpr,
    TYPE: gl.constexpr,
):  # fmt: skip
    """A plane of weights, multiplied with their scales and rounded once."""
    AT: gl.constexpr = PLANE * SCALES // 4
    weights = plane_of(words, gl.expand_dims(offset_of(zero, AT, ZEROS, TYPE), 1), PLANE, TYPE)
    size = gl.expand_dims(size_of(scale, AT, SCALE).to(TYPE), 1)
    PTX: gl.constexpr = (
        "{ .reg .b32 t; mov.b32 t, 0x80008000; fma.rn.bf16x2 $0, $1, $2, t; }"
        if TYPE.is_bf16()
        else "mul.rn.f16x2 $0, $1, $2;"
    )
    return gl.inline_asm_elementwise(PTX, "=r,r,r", [weights, size], dtype=size.dtype, is_pure=True, pack=2)


@gluon.jit
def tile_places(split, LINES: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """Where a program's sums lie in memory."""
    tiles = gl.num_programs(0) * gl.num_programs(1)
    tile = split * tiles + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    line = gl.arange(0, LINES, gl.SliceLayout(1, SUMS))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    return tile.to(gl.int64) * (LINES * ROWS) + line[:, None] * ROWS + row[None, :]


@gluon.jit(do_not_specialize=("rows", "blocks", "share"))
def plane_wide_kernel(
    x, values, scales, zeros, bias, partials, arrivals, out, rows, width, blocks, outputs, share,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, WARPS: gl.constexpr,
    SPLITS: gl.constexpr, SCALES: gl.constexpr, SCALE: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of ROWS rows, GATED: of gates and their ups, OUTPUTS lines apart, whose sums one thread has, and
    a share of the inputs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    LINES: gl.constexpr = HALVES * OUTPUTS
    TYPE: gl.constexpr = x.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(ROW, 16, 2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_LEFT: gl.constexpr = gl.SliceLayout(1, LEFT)
    tiles = gl.allocate_shared_memory(gl.int16, [STAGES * HALVES, OUTPUTS, RUN], TILE)
    whole = REINTERPRET(tiles, gl.int16, [STAGES, LINES, RUN], TILE)
    x_tiles = gl.allocate_shared_memory(x.dtype, [X_STAGES, ROWS, RUN], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
    for place in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(place), count=1)
    fence_async_shared()
    barrier()
    first_row, first = gl.program_id(0) * ROWS, gl.program_id(1) * OUTPUTS
    start = gl.program_id(2) * share
    # At least one block: with a way round the loop, ptxas would wait for each product (C7515).
    count = gl.maximum(gl.minimum(share, blocks - start), 1)
    for block in range(gl.minimum(STAGES, count)):
        copy_words(values, tiles, full.index(block), start + block, first, width, block, OUTPUTS, HALVES)
    line = gl.arange(0, LINES, OF_LEFT)
    line = gl.minimum(first + line % OUTPUTS, width - 1) + line // OUTPUTS * width
    at = start * outputs
    next_scale = gl.load(scales + at + line)
    next_zero = gl.full([LINES], 0, gl.int32, OF_LEFT)
    if ZEROS:
        next_zero = gl.load(zeros + at + line)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in range(gl.minimum(X_STAGES, PLANES * count)):
        copy_rows(x, x_tiles, x_full, start, first_row, step, ROWS, X_STAGES)
    sums = gl.zeros([LINES, ROWS], gl.float32, SUMS)
    for block in range(count):
        stage = block % STAGES
        scale, zero = next_scale, next_zero
        at = gl.minimum(start + block + 1, blocks - 1) * outputs
        next_scale = gl.load(scales + at + line)
        if ZEROS:
            next_zero = gl.load(zeros + at + line)
        mbarrier.wait(full.index(stage), block // STAGES & 1)
        words = whole.index(stage).load(LEFT)
        for plane in gl.static_range(PLANES):
            step = block * PLANES + plane
            weights = scaled_plane(words, scale, zero, plane, SCALES, SCALE, ZEROS, TYPE)
            mbarrier.wait(x_full.index(step % X_STAGES), step // X_STAGES & 1)
            sums = warpgroup_mma(weights, x_tiles.index(step % X_STAGES).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            barrier()  # all products of the step before are complete, and this block's words are in registers
            if step >= 1 and step - 1 + X_STAGES < PLANES * count:
                copy_rows(x, x_tiles, x_full, start, first_row, step - 1 + X_STAGES, ROWS, X_STAGES)
            if plane == 0 and block + STAGES < count:
                copy_words(
                    values, tiles, full.index(stage), start + block + STAGES, first, width, stage, OUTPUTS, HALVES
                )
    sums = warpgroup_mma_wait(0, deps=[sums])
    last = True
    if SPLITS > 1:
        gl.store(partials + tile_places(gl.program_id(2), LINES, ROWS, SUMS), sums)
        barrier()
        counter = arrivals + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        last = gl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            gl.store(counter, 0)
            sums = gl.zeros([LINES, ROWS], gl.float32, SUMS)
            for other in gl.static_range(SPLITS):
                sums += gl.load(partials + tile_places(other, LINES, ROWS, SUMS), cache_modifier=".cg")
        store_tile(sums, bias, out, first_row, first, rows, width, ROWS, OUTPUTS, WARPS, SUMS, GATED, BIAS)
