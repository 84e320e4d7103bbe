"""Products of 65 to 256 rows with a weight, in Gluon: one warp fetches, the others multiply.

A program computes some outputs of all rows, so that each weight is read once. Boxes of weights and rows go through a
ring in shared memory, fetched by the tensor memory accelerator; groups of four warps multiply 64 rows each by Hopper's
own instructions, straight from the ring. The first boxes of weights are fetched before the kernel in front of this one
has ended (`kernels.launch`), so that the memory works while that one ends, or while a norm between two products runs.

Where outputs are too few for the device, several programs share the inputs of each: they leave their sums, and the last
one adds them up in the order of the inputs. One program's sums go by 16 inputs in order, as those of the tiles of
`kernels.linear_triton`.
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

from kernels.launch import overlaps, processors
from kernels.linear_tilings import WideTiling

try:
    from triton.experimental.gluon.language import barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:  # their names in Triton 3.6
    from triton.experimental.gluon.language import thread_barrier as barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load

BOX = 64  # inputs that make a line of the swizzled shared memory, 128 bytes, and one turn of the ring
COUNTERS = 1 << 10  # tiles whose inputs may be shared
REGISTERS = {8: 168, 16: 96}  # of a thread before the warps part, by the warps that multiply
COPYING = 24  # registers of the warp that copies; the others have what that leaves


def multiply_wide(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: WideTiling, *, gated: bool) -> Tensor:
    """The product of rows `[rows, inputs]` that fit one tile; x and weight must be `describable`."""
    rows, inputs = x.shape
    width = weight.shape[0] // (2 if gated else 1)
    assert rows <= tiling.rows
    layout = gl.NVMMASharedLayout(128, 16, 2)
    boxes = (
        TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [tiling.rows, BOX], layout),
        TensorDescriptor(weight, list(weight.shape), [inputs, 1], [tiling.outputs, BOX], layout),
    )
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    tiles = -(-width // tiling.outputs)
    parts, arrivals = out, out
    if tiling.splits > 1:
        assert tiles <= COUNTERS
        sums = tiling.outputs * (2 if gated else 1)
        parts = torch.empty(tiles * tiling.splits, tiling.rows, sums, dtype=torch.float32, device=x.device)
        arrivals = arrival_counters(x.device)
    ahead = overlaps(x.device)
    warps = tiling.rows // 16
    wide_kernel[(min(tiles * tiling.splits, processors(x.device)),)](
        *boxes, x if bias is None else bias, out, parts, arrivals, rows, width, -(-inputs // BOX), tiles,
        ROWS=tiling.rows, OUTPUTS=tiling.outputs, BOX=BOX, SPLITS=tiling.splits, STAGES=tiling.stages, WARPS=warps,
        GATED=gated, BIAS=bias is not None, AHEAD=ahead, COPYING=COPYING,
        num_warps=warps, maxnreg=REGISTERS[warps], launch_pdl=ahead,
    )  # fmt: skip
    return out


@lru_cache(maxsize=64)
def arrival_counters(device: torch.device) -> Tensor:
    """int32 zeros, which every product leaves zero: products of a device follow one another."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@gluon.jit
def share_of(unit, turns, SPLITS: gl.constexpr):
    """The tile of a unit of work, which of the shares of its inputs it is, and the turns begin .. end - 1 of that."""
    share = unit % SPLITS
    return unit // SPLITS, share, share * turns // SPLITS, (share + 1) * turns // SPLITS


@gluon.jit
def copy_weights(
    weight, tiles, ready, stage, line, start, width, OUTPUTS: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Start the copies of one turn's weights into their place of the ring."""
    PIECES: gl.constexpr = 2 if GATED else 1
    for piece in gl.static_range(PIECES):
        async_load(weight, [piece * width + line, start], ready, tiles.index(stage * PIECES + piece))


@gluon.jit
def copy_boxes(
    x, weight, x_tiles, tiles, full, free, width, turns, units,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, BOX: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """What the copying warp does: every turn of every unit of the program, as soon as there is a free place."""
    BYTES: gl.constexpr = (ROWS + OUTPUTS * (2 if GATED else 1)) * BOX * 2
    first = gl.program_id(0)
    early = 0
    if AHEAD:
        tile, _share, begin, end = share_of(first, turns, SPLITS)
        early = gl.minimum(STAGES, end - begin)
        for turn in range(early):
            mbarrier.expect(full.index(turn), BYTES)
            copy_weights(
                weight, tiles, full.index(turn), turn, tile * OUTPUTS, (begin + turn) * BOX, width, OUTPUTS, GATED
            )
        tl.extra.cuda.gdc_wait()
    count = 0
    for unit in range(first, units, gl.num_programs(0)):
        tile, _share, begin, end = share_of(unit, turns, SPLITS)
        for turn in range(begin, end):
            stage = count % STAGES
            ready = full.index(stage)
            if count >= early:
                mbarrier.wait(free.index(stage), (count // STAGES) & 1 ^ 1)
                mbarrier.expect(ready, BYTES)
                copy_weights(weight, tiles, ready, stage, tile * OUTPUTS, turn * BOX, width, OUTPUTS, GATED)
            async_load(x, [0, turn * BOX], ready, x_tiles.index(stage))
            count += 1
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def add_shares(
    sums, parts, arrivals, tile, share, place, SPLITS: gl.constexpr, SIZE: gl.constexpr
):  # fmt: skip
    """Leave a share's sums. The last one of a tile gets them all, added up in order, and true; its counter is zero."""
    gl.store(parts + (tile * SPLITS + share).to(gl.int64) * SIZE + place, sums)
    barrier()  # every thread's are written
    last = gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        gl.store(arrivals + tile, 0)
        base = parts + tile.to(gl.int64) * (SPLITS * SIZE)
        sums = gl.load(base + place, cache_modifier=".cg")
        for other in gl.static_range(1, SPLITS):
            sums += gl.load(base + other * SIZE + place, cache_modifier=".cg")
    return sums, last


@gluon.jit
def store_outputs(
    sums, ups, bias, out, tile, rows, width,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, SUMS: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Bias, gate and rounding of a finished tile `[rows, outputs]`."""
    TYPE: gl.constexpr = out.dtype.element_ty
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    output = tile * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, SUMS))
    real = output < width
    if BIAS:
        sums += gl.load(bias + output, mask=real, other=0.0).to(gl.float32)[None, :]
    if GATED:
        if BIAS:
            ups += gl.load(bias + width + output, mask=real, other=0.0).to(gl.float32)[None, :]
        gate = sums.to(TYPE).to(gl.float32)
        sums = gate / (1.0 + gl.exp(-gate)) * ups.to(TYPE).to(gl.float32)
    places = row.to(gl.int64)[:, None] * width + output[None, :]
    gl.store(out + places, sums.to(TYPE), mask=(row < rows)[:, None] & real[None, :])


@gluon.jit
def multiply_boxes(
    bias, out, parts, arrivals, x_tiles, tiles, full, free, rows, width, turns, units,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GATED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """What the other warps do: every unit of the program. A turn's place is free once the next turn has begun."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, OUTPUTS, 16])
    PIECES: gl.constexpr = 2 if GATED else 1
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, share, begin, end = share_of(unit, turns, SPLITS)
        sums = gl.zeros([ROWS, OUTPUTS], gl.float32, SUMS)
        ups = sums
        for turn in range(begin, end):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            values = x_tiles.index(stage)
            adding = warpgroup_mma(values, tiles.index(stage * PIECES).permute((1, 0)), sums, is_async=True)
            if GATED:
                more = warpgroup_mma(values, tiles.index(stage * PIECES + 1).permute((1, 0)), ups, is_async=True)
                sums, ups = warpgroup_mma_wait(2, deps=[adding, more])
            else:
                sums = warpgroup_mma_wait(1, deps=[adding])
            if turn > begin:
                mbarrier.arrive(free.index((count - 1) % STAGES))
            count += 1
        if GATED:
            sums, ups = warpgroup_mma_wait(0, deps=[sums, ups])
        else:
            sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(free.index((count - 1) % STAGES))
        if SPLITS > 1:
            SIZE: gl.constexpr = ROWS * OUTPUTS
            line = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
            place = line[:, None] * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, SUMS))[None, :]
            sums, last = add_shares(sums, parts, arrivals, tile, share, place, SPLITS, SIZE)
            if last:
                store_outputs(sums, ups, bias, out, tile, rows, width, ROWS, OUTPUTS, SUMS, GATED, BIAS)
        else:
            store_outputs(sums, ups, bias, out, tile, rows, width, ROWS, OUTPUTS, SUMS, GATED, BIAS)


@gluon.jit(do_not_specialize=("rows",))
def wide_kernel(
    x, weight, bias, out, parts, arrivals, rows, width, turns, outputs_tiles,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, BOX: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, AHEAD: gl.constexpr, COPYING: gl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of all rows, GATED: and the gate's lines that belong to them; or a share of their inputs."""
    PIECES: gl.constexpr = 2 if GATED else 1
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES * PIECES, OUTPUTS, BOX], TILE)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, BOX], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    units = outputs_tiles * SPLITS
    gl.warp_specialize(
        [
            (multiply_boxes, (
                bias, out, parts, arrivals, x_tiles, tiles, full, free, rows, width, turns, units,
                ROWS, OUTPUTS, SPLITS, STAGES, WARPS, GATED, BIAS,
            )),
            (copy_boxes, (
                x, weight, x_tiles, tiles, full, free, width, turns, units,
                ROWS, OUTPUTS, BOX, SPLITS, STAGES, GATED, AHEAD,
            )),
        ],
        [1],
        [COPYING],
    )  # fmt: skip
