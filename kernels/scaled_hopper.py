"""Products of up to 64 rows with a weight of 8 bits, both E4M3, in Gluon, by Hopper's own matrix instructions.

As in `kernels.linear_hopper` weights are prefetched before the rows are known, and all programs of a product are
resident at once. Programs of 64 outputs are few, so several share the inputs of each: they leave their sums in memory,
and the last to be done adds them up in their order.
"""

from __future__ import annotations

from functools import lru_cache

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
from penstock.kernels.gluon_names import barrier
from penstock.kernels.linear_hopper import ROW, copy_stage, scaled, store_outputs
from penstock.kernels.linear_tilings import SplitTiling
from penstock.kernels.quantized import Float8Weight, QuantizedRows

OUTPUTS = 64  # of a program
K_TILES = 2  # of 128 inputs, in an iteration
MOST_TILES = 4096


@lru_cache(maxsize=16)
def arrivals_of(device: torch.device) -> Tensor:
    """How many programs of each tile are done. The last of them sets it back, so products share it."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def multiply_split(
    x: QuantizedRows, weight: Float8Weight, bias: Tensor | None, tiling: SplitTiling, *, gated: bool
) -> Tensor:
    """The product of few rows `[rows, inputs]`; x and weight must be `tma_compatible`."""
    rows, inputs = x.values.shape
    parts = 2 if gated else 1
    width = weight.shape[0] // parts
    tiles, device = -(-width // OUTPUTS), x.values.device
    assert rows <= tiling.rows
    assert tiles <= MOST_TILES
    assert weight.block in (None, (128, 128))
    assert weight.block is None or not gated or width % 128 == 0
    layout = gl.NVMMASharedLayout(ROW.value, 8, 2)
    out = torch.empty(rows, width, dtype=x.dtype, device=device)
    split = tiling.splits > 1
    partials = torch.empty(tiling.splits * tiles * parts * OUTPUTS * tiling.rows, device=device) if split else x.scales
    iterations = -(-inputs // (K_TILES * ROW.value))
    pdl = chip_of(device).pdl
    each = "block" if x.scales.shape[1] > 1 else "row" if x.scales.stride(0) else "all"
    split_kernel[(tiles, tiling.splits)](
        TensorDescriptor(x.values, [rows, inputs], [x.values.stride(0), 1], [tiling.rows, ROW.value], layout),
        TensorDescriptor(weight.values, list(weight.shape), [inputs, 1], [OUTPUTS, ROW.value], layout),
        x.scales, weight.scales, out if bias is None else bias, partials, arrivals_of(device), out, rows, width,
        iterations, -(-inputs // ROW.value), -(-iterations // tiling.splits), ROWS=tiling.rows, OUTPUTS=OUTPUTS,
        K_TILES=K_TILES, STAGES=tiling.stages, SPLITS=tiling.splits, EACH=each, BLOCKS=weight.block is not None,
        GATED=gated, BIAS=bias is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


@gluon.jit
def factors_of(
    x_scales, scales, block, blocks, rows, first_block,
    ROWS: gl.constexpr, SUMS: gl.constexpr, EACH: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """What a block's product is multiplied with, for each row."""
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    found = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, SUMS))
    if BLOCKS:
        found *= gl.load(scales + first_block * blocks + gl.minimum(block, blocks - 1))
        if EACH == "block":
            found *= gl.load(x_scales + block * rows + row, mask=(row < rows) & (block < blocks), other=0.0)
    return found


@gluon.jit
def turn_factors(
    x_scales, scales, block, blocks, rows, width,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, SUMS: gl.constexpr, EACH: gl.constexpr, BLOCKS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Of an iteration's two blocks, of gate and up."""
    high = gl.program_id(0) * OUTPUTS // 128
    up_high = (width + gl.program_id(0) * OUTPUTS) // 128
    of_0 = factors_of(x_scales, scales, block, blocks, rows, high, ROWS, SUMS, EACH, BLOCKS)
    of_1 = factors_of(x_scales, scales, block + 1, blocks, rows, high, ROWS, SUMS, EACH, BLOCKS)
    up_0, up_1 = of_0, of_1
    if GATED:
        up_0 = factors_of(x_scales, scales, block, blocks, rows, up_high, ROWS, SUMS, EACH, BLOCKS)
        up_1 = factors_of(x_scales, scales, block + 1, blocks, rows, up_high, ROWS, SUMS, EACH, BLOCKS)
    return of_0, of_1, up_0, up_1


@gluon.jit
def add_parts(first, second, sums, of_first, of_second, BLOCKS: gl.constexpr):
    if BLOCKS:
        sums += first * of_first[None, :] + second * of_second[None, :]
    else:
        sums += first + second
    return sums


@gluon.jit
def places_of(split, part, PARTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """Where a program's sums lie in memory."""
    tile = (split * gl.num_programs(0) + gl.program_id(0)) * PARTS + part
    output = gl.arange(0, OUTPUTS, gl.SliceLayout(1, SUMS))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    return tile * (OUTPUTS * ROWS) + output[:, None] * ROWS + row[None, :]


@gluon.jit(do_not_specialize=("rows",))
def split_kernel(
    x, weight, x_scales, scales, bias, partials, arrivals, out, rows, width, iterations, blocks, share,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, K_TILES: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    EACH: gl.constexpr, BLOCKS: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of all rows, GATED: of gate and up, and a share of the inputs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: gl.constexpr = 2 if GATED else 1
    TILE: gl.constexpr = gl.NVMMASharedLayout(ROW, 8, 2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS * K_TILES, OUTPUTS, ROW], TILE)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * K_TILES, ROWS, ROW], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
    fence_async_shared()
    barrier()
    first = gl.program_id(1) * share
    count = gl.maximum(gl.minimum(share, iterations - first), 0)
    for iteration in range(gl.minimum(STAGES, count)):
        copy_stage(
            x, weight, x_tiles, tiles, full, first, iteration, width, True, False,
            ROWS, OUTPUTS, ROW, K_TILES, STAGES, PARTS,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    for iteration in range(gl.minimum(STAGES, count)):
        copy_stage(
            x, weight, x_tiles, tiles, full, first, iteration, width, False, True,
            ROWS, OUTPUTS, ROW, K_TILES, STAGES, PARTS,
        )  # fmt: skip
    zeros = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
    sums, ups = zeros, zeros
    of_0, of_1, up_0, up_1 = turn_factors(
        x_scales, scales, 2 * first, blocks, rows, width, ROWS, OUTPUTS, SUMS, EACH, BLOCKS, GATED
    )
    for iteration in range(count):
        block = 2 * (first + iteration + 1)  # scales are fetched an iteration ahead
        next_0, next_1, next_up_0, next_up_1 = turn_factors(
            x_scales, scales, block, blocks, rows, width, ROWS, OUTPUTS, SUMS, EACH, BLOCKS, GATED
        )
        stage = iteration % STAGES
        mbarrier.wait(full.index(stage), iteration // STAGES & 1)
        at = stage * PARTS * K_TILES
        values_0 = x_tiles.index(stage * K_TILES).permute((1, 0))
        values_1 = x_tiles.index(stage * K_TILES + 1).permute((1, 0))
        adding_0 = warpgroup_mma(tiles.index(at), values_0, zeros, use_acc=False, is_async=True)
        adding_1 = warpgroup_mma(tiles.index(at + 1), values_1, zeros, use_acc=False, is_async=True)
        if GATED:
            raising_0 = warpgroup_mma(tiles.index(at + 2), values_0, zeros, use_acc=False, is_async=True)
            raising_1 = warpgroup_mma(tiles.index(at + 3), values_1, zeros, use_acc=False, is_async=True)
            part_0, part_1, part_2, part_3 = warpgroup_mma_wait(0, deps=[adding_0, adding_1, raising_0, raising_1])
            ups = add_parts(part_2, part_3, ups, up_0, up_1, BLOCKS)
        else:
            part_0, part_1 = warpgroup_mma_wait(0, deps=[adding_0, adding_1])
        barrier()  # every warp's products are complete
        if iteration + STAGES < count:
            copy_stage(
                x, weight, x_tiles, tiles, full, first, iteration + STAGES, width, True, True,
                ROWS, OUTPUTS, ROW, K_TILES, STAGES, PARTS,
            )  # fmt: skip
        sums = add_parts(part_0, part_1, sums, of_0, of_1, BLOCKS)
        of_0, of_1, up_0, up_1 = next_0, next_1, next_up_0, next_up_1
    last = True
    if SPLITS > 1:
        gl.store(partials + places_of(gl.program_id(1), 0, PARTS, OUTPUTS, ROWS, SUMS), sums)
        if GATED:
            gl.store(partials + places_of(gl.program_id(1), 1, PARTS, OUTPUTS, ROWS, SUMS), ups)
        barrier()
        last = gl.atomic_add(arrivals + gl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            gl.store(arrivals + gl.program_id(0), 0)
            sums, ups = zeros, zeros
            for other in range(SPLITS):
                sums += gl.load(partials + places_of(other, 0, PARTS, OUTPUTS, ROWS, SUMS), cache_modifier=".cg")
                if GATED:
                    ups += gl.load(partials + places_of(other, 1, PARTS, OUTPUTS, ROWS, SUMS), cache_modifier=".cg")
        sums, ups = scaled(sums, ups, x_scales, scales, rows, width, ROWS, OUTPUTS, SUMS, EACH, BLOCKS, GATED)
        store_outputs(sums, ups, bias, out, rows, width, ROWS, OUTPUTS, 4, SUMS, GATED, BIAS)
