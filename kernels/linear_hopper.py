"""Products of few rows with a weight, in Gluon: weights are prefetched before the rows are known. Both may be e4m3.

A program computes some outputs of all rows. Tiles of its weights go through a pipeline in shared memory, loaded by TMA;
the first of them before the previous kernel has ended (PDL, `kernels.launch`), so that the memory is busy while that
one ends, and while a norm or a gate between two products runs. All programs of a product are resident at once, in half
of the shared memory, which leaves room for those of the next.

A matrix instruction that adds to the sums of the one before waits for it, 25 ns for 16 inputs; so each warp has four
sums, for one input in four each, in blocks of 64. That makes other bits than the tiles of `kernels.linear_triton`, so
invariant products are not made here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.chip import chip_of
from penstock.kernels.gluon_names import async_load, barrier
from penstock.kernels.linear_tilings import PIPELINED_BYTES, PipelinedTiling
from penstock.kernels.quantized import QuantizedRows, Rows
from penstock.kernels.records import LowRankSum

ROW = tl.constexpr(128)  # bytes of a row of swizzled shared memory
K_TILES = PIPELINED_BYTES // ROW.value  # of one iteration; the kernel has sums for four of them


def multiply_pipelined(
    x: Rows, weight: Tensor, bias: Tensor | None, tiling: PipelinedTiling, *, gated: bool,
    scales: Tensor | None = None, addition: LowRankSum | None = None,
) -> Tensor:  # fmt: skip
    """The product of few rows `[rows, inputs]`; x and weight must be `tma_compatible`.

    scales: fp32 [outputs] of an e4m3 weight, whose rows of x are e4m3, too. addition: what adapters add to it, of up to
    three parts, each of which begins with a program's first output.
    """
    out_type, given, each = x.dtype, None, ""
    if isinstance(x, QuantizedRows):
        each = "row" if x.scales.stride(0) else "all"
        x, given, _ = x
    rows, inputs = x.shape
    width = weight.shape[0] // (2 if gated else 1)
    assert rows <= tiling.rows
    layout = gl.NVMMASharedLayout(ROW.value, 8 * x.itemsize, 2)
    outputs, tile_k = 16 * tiling.warps, ROW.value // x.itemsize
    tiles = (
        TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [tiling.rows, tile_k], layout),
        TensorDescriptor(weight, list(weight.shape), [inputs, 1], [outputs, tile_k], layout),
    )
    out = torch.empty(rows, width, dtype=out_type, device=x.device)
    pdl = chip_of(x.device).pdl
    pipelined_kernel[(-(-width // outputs),)](
        *tiles, out if given is None else given, out if scales is None else scales, out if bias is None else bias,
        out, rows, width, -(-inputs // (K_TILES * tile_k)), ROWS=tiling.rows, OUTPUTS=outputs, TILE_K=tile_k,
        K_TILES=K_TILES, STAGES=tiling.stages, WARPS=tiling.warps, EACH=each, GATED=gated, BIAS=bias is not None,
        PDL=pdl, num_warps=tiling.warps, launch_pdl=pdl, **low_rank_arguments(addition, out),
    )  # fmt: skip
    return out


def low_rank_arguments(addition: LowRankSum | None, like: Tensor) -> dict[str, Any]:
    """Of the kernel, which adds nothing with SHARES 0."""
    if addition is None:
        return {"partials": like, "places": like, "b": like, "second": 0, "third": 0, "lines": 0, "b_stride": 0,
                "SHARES": 0, "RANK": 0}  # fmt: skip
    shrunk, rows, (_, b, parts, _) = addition
    starts = [part.start for part in parts[1:]] + [b.shape[1]] * 2
    return {"partials": shrunk, "places": rows.places, "b": b, "second": starts[0], "third": starts[1],
            "lines": shrunk.shape[2], "b_stride": b.stride(0), "SHARES": len(shrunk), "RANK": b.shape[2]}  # fmt: skip


@gluon.jit
def copy_stage(
    x, weight, x_tiles, tiles, full, first, iteration, width,
    WEIGHTS: gl.constexpr, VALUES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, TILE_K: gl.constexpr,
    K_TILES: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Start the copies of an iteration, counted from the program's first: of its weights, its values or both, into its
    pipeline stage, which must be free."""
    stage = iteration % STAGES
    ready = full.index(stage)
    output = gl.program_id(0) * OUTPUTS
    start = (first + iteration) * (K_TILES * TILE_K)
    if WEIGHTS:
        mbarrier.expect(ready, (PARTS * OUTPUTS + ROWS) * K_TILES * ROW)
        for part in gl.static_range(PARTS):
            for tile in gl.static_range(K_TILES):
                target = tiles.index((stage * PARTS + part) * K_TILES + tile)
                async_load(weight, [part * width + output, start + tile * TILE_K], ready, target)
    if VALUES:
        for tile in gl.static_range(K_TILES):
            async_load(x, [0, start + tile * TILE_K], ready, x_tiles.index(stage * K_TILES + tile))


@gluon.jit
def add_tile(tiles, x_tiles, at, x_at, sums, SUMS: gl.constexpr):
    """sums + weights @ values of one tile."""
    WIDTH: gl.constexpr = 32 // tiles.dtype.primitive_bitwidth
    values = x_tiles.index(x_at).permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, WIDTH))
    return mma_v2(tiles.index(at).load(gl.DotOperandLayout(0, SUMS, WIDTH)), values, sums)


@gluon.jit
def load_expanding(
    places, b, output, rows, width, start, b_stride,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, SUMS: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """16 columns from `start` on of each row's adapter's `b`, all loads under way at once: zeros of a base row."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    line = output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, LEFT))
    at = line[:, None] * RANK + (start + gl.arange(0, 16, gl.SliceLayout(0, LEFT)))[None, :]
    found = ()
    for own in gl.static_range(ROWS):
        place = gl.load(places + own, mask=own < rows, other=0)
        there = (line[:, None] < width) & (place > 0)
        found += (gl.load(b + (place - 1).to(gl.int64) * b_stride + at, mask=there, other=0.0),)  # type: ignore[assignment]
    return found


@gluon.jit
def add_columns(
    found, weights, partials, first, adapted, rows, lines,
    ROWS: gl.constexpr, SUMS: gl.constexpr, SHARES: gl.constexpr, TYPE: gl.constexpr,
):  # fmt: skip
    """found + `load_expanding`'s weights @ each row's 16 sums from `first` on, which are added up by shares. A row's
    adapter is multiplied with that row alone."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT))
    line = first + gl.arange(0, 16, gl.SliceLayout(1, RIGHT))
    shrunk = gl.zeros([16, ROWS], gl.float32, RIGHT)
    for share in gl.static_range(SHARES):
        at = (share * rows + row)[None, :] * lines + line[:, None]
        shrunk += gl.load(partials + at, mask=adapted[None, :], other=0.0)
    for own in gl.static_range(ROWS):
        values = gl.where((row == own)[None, :], shrunk, 0.0)
        found = mma_v2(weights[own], values.to(TYPE), found)
    return found


@gluon.jit
def low_rank_sums(
    weights, partials, places, b, output, rows, width, second, third, lines, b_stride,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, SUMS: gl.constexpr, SHARES: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """b @ a @ x of each row's adapter, `[outputs, rows]`, for outputs from `output` on: zeros of a base row. weights:
    of the first columns. second, third: where those parts of the outputs begin."""
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.DotOperandLayout(1, SUMS, 2)))
    adapted = gl.load(places + row, mask=row < rows, other=0) > 0
    first = ((output >= second).to(gl.int32) + (output >= third).to(gl.int32)) * RANK
    TYPE: gl.constexpr = b.dtype.element_ty
    found = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    found = add_columns(found, weights, partials, first, adapted, rows, lines, ROWS, SUMS, SHARES, TYPE)
    for start in range(16, RANK, 16):
        others = load_expanding(places, b, output, rows, width, start, b_stride, ROWS, OUTPUTS, SUMS, RANK)
        found = add_columns(found, others, partials, first + start, adapted, rows, lines, ROWS, SUMS, SHARES, TYPE)
    return found


@gluon.jit
def scaled(
    sums, ups, x_scales, scales, rows, width,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, SUMS: gl.constexpr, EACH: gl.constexpr, BLOCKS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Finished sums by the scales of rows and outputs; those of blocks are in the sums already."""
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    output = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, SUMS))
    if EACH != "block":
        of_rows = gl.load(x_scales + (row if EACH == "row" else row * 0), mask=row < rows, other=0.0)[None, :]
        sums *= of_rows
        ups *= of_rows
    if not BLOCKS:
        sums *= gl.load(scales + output, mask=output < width, other=0.0)[:, None]
        if GATED:
            ups *= gl.load(scales + width + output, mask=output < width, other=0.0)[:, None]
    return sums, ups


@gluon.jit
def store_outputs(
    sums, ups, bias, out, rows, width,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, WARPS: gl.constexpr, SUMS: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Bias, gate and rounding of a finished tile `[outputs, rows]`."""
    TYPE: gl.constexpr = out.dtype.element_ty
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, WARPS], [0, 1])
    first = gl.program_id(0) * OUTPUTS
    output = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, SUMS))
    if BIAS:
        sums += gl.load(bias + output, mask=output < width, other=0.0).to(gl.float32)[:, None]
    if GATED:
        if BIAS:
            ups += gl.load(bias + width + output, mask=output < width, other=0.0).to(gl.float32)[:, None]
        gate = sums.to(TYPE).to(gl.float32)
        sums = gate / (1.0 + gl.exp(-gate)) * ups.to(TYPE).to(gl.float32)
    found = gl.convert_layout(sums.to(TYPE), WIDE)
    output = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, WIDE))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, WIDE))
    places = row.to(gl.int64)[None, :] * width + output[:, None]
    gl.store(out + places, found, mask=(output < width)[:, None] & (row < rows)[None, :])


@gluon.jit(do_not_specialize=("rows",))
def pipelined_kernel(
    x, weight, x_scales, scales, bias, out, rows, width, iterations, partials, places, b, second, third, lines,
    b_stride,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, TILE_K: gl.constexpr, K_TILES: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, EACH: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, SHARES: gl.constexpr,
    RANK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of all rows; GATED: of gate and up. SHARES: of an adapter's partial sums, 0 without adapters."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: gl.constexpr = 2 if GATED else 1
    TILE: gl.constexpr = gl.NVMMASharedLayout(ROW, weight.dtype.primitive_bitwidth, 2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS * K_TILES, OUTPUTS, TILE_K], TILE)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * K_TILES, ROWS, TILE_K], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
    fence_async_shared()
    barrier()
    for iteration in range(gl.minimum(STAGES, iterations)):
        copy_stage(
            x, weight, x_tiles, tiles, full, 0, iteration, width, True, False,
            ROWS, OUTPUTS, TILE_K, K_TILES, STAGES, PARTS,
        )  # fmt: skip
    output = gl.program_id(0) * OUTPUTS
    if SHARES > 0:  # neither weights nor places change in a step
        expanding = load_expanding(places, b, output, rows, width, 0, b_stride, ROWS, OUTPUTS, SUMS, RANK)
        if GATED:
            expanding_up = load_expanding(
                places, b, output + width, rows, 2 * width, 0, b_stride, ROWS, OUTPUTS, SUMS, RANK
            )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    for iteration in range(gl.minimum(STAGES, iterations)):
        copy_stage(
            x, weight, x_tiles, tiles, full, 0, iteration, width, False, True,
            ROWS, OUTPUTS, TILE_K, K_TILES, STAGES, PARTS,
        )  # fmt: skip
    sums_0 = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
    ups_0, ups_1, ups_2, ups_3 = sums_0, sums_0, sums_0, sums_0
    if SHARES > 0:  # while the first copies are under way
        sums_0 = low_rank_sums(
            expanding, partials, places, b, output, rows, width, second, third, lines, b_stride,
            ROWS, OUTPUTS, SUMS, SHARES, RANK,
        )  # fmt: skip
        if GATED:
            ups_0 = low_rank_sums(
                expanding_up, partials, places, b, output + width, rows, 2 * width, second, third, lines, b_stride,
                ROWS, OUTPUTS, SUMS, SHARES, RANK,
            )  # fmt: skip
    for iteration in range(iterations):
        stage = iteration % STAGES
        mbarrier.wait(full.index(stage), iteration // STAGES & 1)
        values = stage * K_TILES
        weights = values * PARTS
        sums_0 = add_tile(tiles, x_tiles, weights, values, sums_0, SUMS)
        sums_1 = add_tile(tiles, x_tiles, weights + 1, values + 1, sums_1, SUMS)
        sums_2 = add_tile(tiles, x_tiles, weights + 2, values + 2, sums_2, SUMS)
        sums_3 = add_tile(tiles, x_tiles, weights + 3, values + 3, sums_3, SUMS)
        if GATED:
            ups_0 = add_tile(tiles, x_tiles, weights + 4, values, ups_0, SUMS)
            ups_1 = add_tile(tiles, x_tiles, weights + 5, values + 1, ups_1, SUMS)
            ups_2 = add_tile(tiles, x_tiles, weights + 6, values + 2, ups_2, SUMS)
            ups_3 = add_tile(tiles, x_tiles, weights + 7, values + 3, ups_3, SUMS)
        barrier()  # every warp has read the iteration's tiles
        if iteration + STAGES < iterations:
            copy_stage(
                x, weight, x_tiles, tiles, full, 0, iteration + STAGES, width, True, True,
                ROWS, OUTPUTS, TILE_K, K_TILES, STAGES, PARTS,
            )  # fmt: skip
    sums = (sums_0 + sums_1) + (sums_2 + sums_3)
    ups = (ups_0 + ups_1) + (ups_2 + ups_3)
    if EACH != "":
        sums, ups = scaled(sums, ups, x_scales, scales, rows, width, ROWS, OUTPUTS, SUMS, EACH, False, GATED)
    store_outputs(sums, ups, bias, out, rows, width, ROWS, OUTPUTS, WARPS, SUMS, GATED, BIAS)
