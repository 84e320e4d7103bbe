"""Products of many tokens with experts of 8 bits on Hopper, in Gluon: E4M3 with scales of blocks of 128 by 128.

Rows lie expert by expert, so a tile's rows are fetched by TMA as its weights are. A program takes tiles in turn. One
warp copies blocks of 128 inputs into a pipeline in shared memory; two groups of four warps multiply 64 rows each with
256 outputs. A block's product is summed by itself, as in `kernels.quantized_experts_triton`, and added to sums of fp32
by one group while the other's is under way. A gate and its up are one tile, which is rounded to 8 bits where it ends.
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
from penstock.kernels.gluon_names import async_load
from penstock.kernels.quantize_triton import SMALLEST, empty_rows
from penstock.kernels.quantized import Float8Weight, QuantizedRows, RowFormat
from penstock.kernels.routing_triton import Schedule

ROWS = 64  # of a group of warps
GROUPS = 2  # of warps
BLOCK = tl.constexpr(128)  # inputs and outputs of a scale
PARTS = 2  # of BLOCK outputs: a gate and its up, or neighbours
STAGES = 4  # of the pipeline, BLOCK inputs each
REGISTERS = 168  # of a thread before warp specialization; then the copying warp keeps 24


def multiply_blocks(
    x: QuantizedRows, weight: Float8Weight, schedule: Schedule, form: RowFormat | None
) -> Tensor | QuantizedRows:
    """A row for each of x, which lie as the schedule orders pairs, in tiles of GROUPS * ROWS of them. With a form the
    gate is taken, and its rows are rounded."""
    held, outputs, inputs = weight.shape
    width = outputs // 2 if form is not None else outputs
    values, block, rows = x.values, BLOCK.value, len(x.values)
    assert outputs % (PARTS * block) == inputs % block == 0
    found: Tensor | QuantizedRows
    if form is None:
        found = target = torch.empty(rows, width, dtype=x.dtype, device=values.device)
        scales = x.scales
    else:
        found = target, scales, _ = empty_rows(rows, width, form, values.new_empty(0, dtype=x.dtype))
    layout = gl.NVMMASharedLayout(block, 8, 2)
    lines = weight.values.view(held * outputs, inputs)
    columns = outputs // (PARTS * block)
    chip = chip_of(values.device)
    block_kernel[(min(chip.num_sms, columns * len(schedule.tiles)),)](
        TensorDescriptor(values, [rows, inputs], [inputs, 1], [ROWS, block], layout),
        TensorDescriptor(lines, list(lines.shape), [inputs, 1], [block, block], layout),
        x.scales, weight.scales, schedule.tiles, schedule.total, target, scales, width, columns, rows,
        BLOCKS=inputs // block, ROWS=ROWS, STAGES=STAGES, GATED=form is not None, PDL=chip.pdl,
        TYPE=getattr(gl, str(x.dtype).removeprefix("torch.")), num_warps=4, maxnreg=REGISTERS, launch_pdl=chip.pdl,
    )  # fmt: skip
    return found


@gluon.jit
def find_tile(tiles, place, columns):
    """A tile's expert, its first row, how many rows it has, and its column."""
    line = tiles + place // columns * 3
    return gl.load(line), gl.load(line + 1), gl.load(line + 2), place % columns


@gluon.jit
def copy_tiles(
    x, weight, x_tiles, tiles, full, free, schedule, work, columns, width,
    BLOCKS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The copying warp: each tile's blocks of weights and rows. Rows of the second group are left out where there are
    none."""
    step = 0
    for place in range(gl.program_id(0), work, gl.num_programs(0)):
        expert, begin, size, column = find_tile(schedule, place, columns)
        if GATED:
            line = expert * (2 * width) + column * BLOCK
            second = line + width
        else:
            line = expert * width + column * (2 * BLOCK)
            second = line + BLOCK
        for block in range(BLOCKS):
            stage = step % STAGES
            ready = full.index(stage)
            start = block * BLOCK
            mbarrier.wait(free.index(stage), step // STAGES & 1 ^ 1)
            if size > ROWS:
                mbarrier.expect(ready, (2 * BLOCK + 2 * ROWS) * BLOCK)
            else:
                mbarrier.expect(ready, (2 * BLOCK + ROWS) * BLOCK)
            async_load(weight, [line, start], ready, tiles.index(2 * stage))
            async_load(weight, [second, start], ready, tiles.index(2 * stage + 1))
            async_load(x, [begin, start], ready, x_tiles.index(2 * stage))
            if size > ROWS:
                async_load(x, [begin + ROWS, start], ready, x_tiles.index(2 * stage + 1))
            step += 1


@gluon.jit
def larger(one, other):
    """NaN where either is."""
    return gl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def store_rounded(
    sums, ups, out, scales, first_row, count, column, width, rows,
    TYPE: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The gate of a tile, rounded to TYPE as a kernel of its own would, then to 8 bits with a scale for each row."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    gate = sums.to(TYPE).to(gl.float32)
    found = gate / (1.0 + gl.exp(-gl.maximum(gate, -80.0))) * ups.to(TYPE).to(gl.float32)
    found = found.to(TYPE).to(gl.float32)
    scale = gl.maximum(gl.reduce(gl.abs(found), 1, larger) * (1.0 / 448.0), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    gl.store(scales + column * rows + first_row + row, scale, mask=row < count)
    found = found * gl.div_rn(1.0, scale)[:, None]
    found = gl.minimum(gl.maximum(found, -448.0), 448.0).to(out.dtype.element_ty)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    output = column * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, WIDE))
    places = (first_row + row).to(gl.int64)[:, None] * width + output[None, :]
    gl.store(out + places, gl.convert_layout(found, WIDE), mask=(row < count)[:, None])


@gluon.jit
def store_part(sums, out, first_row, count, first, width, ROWS: gl.constexpr):
    """Part of a tile into its rows."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    output = first + gl.arange(0, BLOCK, gl.SliceLayout(0, WIDE))
    found = gl.convert_layout(sums.to(out.dtype.element_ty), WIDE)
    places = (first_row + row).to(gl.int64)[:, None] * width + output[None, :]
    gl.store(out + places, found, mask=(row < count)[:, None])


@gluon.jit
def multiply_tiles(
    x_tiles, tiles, full, free, x_scales, scales, schedule, out, out_scales, work, columns, width, rows,
    OWN: gl.constexpr, BLOCKS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    TYPE: gl.constexpr,
):  # fmt: skip
    """A group of four warps: its rows of the program's tiles. OWN: which group it is."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, SUMS)
    step = 0
    expert, begin, size, column = find_tile(schedule, gl.program_id(0), columns)
    for place in range(gl.program_id(0), work, gl.num_programs(0)):
        first_row, count = begin + OWN * ROWS, size - OWN * ROWS
        if GATED:
            line = (expert * (2 * width // BLOCK) + column) * BLOCKS
            second = line + width // BLOCK * BLOCKS
        else:
            line = (expert * (width // BLOCK) + 2 * column) * BLOCKS
            second = line + BLOCKS
        sums, ups = zeros, zeros
        if count > 0:
            at = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)), rows - 1)
            next_row, next_0, next_1 = gl.load(x_scales + at), gl.load(scales + line), gl.load(scales + second)
            for block in range(BLOCKS):
                stage = step % STAGES
                of_rows, of_0, of_1 = next_row, next_0, next_1
                ahead = gl.minimum(block + 1, BLOCKS - 1)  # scales are fetched a block ahead
                next_row = gl.load(x_scales + (ahead * rows + at))
                next_0, next_1 = gl.load(scales + line + ahead), gl.load(scales + second + ahead)
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                x_tile = x_tiles.index(2 * stage + OWN)
                adding = warpgroup_mma(
                    x_tile, tiles.index(2 * stage).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                part = warpgroup_mma_wait(0, deps=[adding])
                sums += part * (of_rows * of_0)[:, None]
                adding = warpgroup_mma(
                    x_tile, tiles.index(2 * stage + 1).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                part = warpgroup_mma_wait(0, deps=[adding])
                mbarrier.arrive(free.index(stage))
                ups += part * (of_rows * of_1)[:, None]
                step += 1
        else:
            for _ in range(BLOCKS):  # the copying warp counts both groups
                mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                mbarrier.arrive(free.index(step % STAGES))
                step += 1
        stored = column
        expert, begin, size, column = find_tile(schedule, gl.minimum(place + gl.num_programs(0), work - 1), columns)
        if count > 0:
            if GATED:
                store_rounded(sums, ups, out, out_scales, first_row, count, stored, width, rows, TYPE, ROWS, SUMS)
            else:
                store_part(sums, out, first_row, count, 2 * stored * BLOCK, width, ROWS)
                store_part(ups, out, first_row, count, (2 * stored + 1) * BLOCK, width, ROWS)


@gluon.jit(do_not_specialize=("rows", "columns"))
def block_kernel(
    x, weight, x_scales, scales, schedule, count, out, out_scales, width, columns, rows,
    BLOCKS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, TYPE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of 2 * ROWS rows of an expert and 2 * BLOCK outputs, by programs that take them in turn."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    work = gl.load(count) * columns
    if gl.program_id(0) >= work:
        return
    TILE: gl.constexpr = gl.NVMMASharedLayout(BLOCK, 8, 2)
    tiles = gl.allocate_shared_memory(weight.dtype, [2 * STAGES, BLOCK, BLOCK], TILE)
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, BLOCK], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (
                x_tiles, tiles, full, free, x_scales, scales, schedule, out, out_scales, work, columns, width,
                rows, 0, BLOCKS, ROWS, STAGES, GATED, TYPE,
            )),
            (multiply_tiles, (
                x_tiles, tiles, full, free, x_scales, scales, schedule, out, out_scales, work, columns, width,
                rows, 1, BLOCKS, ROWS, STAGES, GATED, TYPE,
            )),
            (copy_tiles, (
                x, weight, x_tiles, tiles, full, free, schedule, work, columns, width, BLOCKS, ROWS, STAGES, GATED,
            )),
        ],
        [4, 1],
        [240, 24],  # with the default's, as many registers as all 12 warps had
    )  # fmt: skip
