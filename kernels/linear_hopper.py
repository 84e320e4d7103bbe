"""Products of few rows with a weight, in Gluon: weights are on their way before the rows are known.

A program computes some outputs of all rows. Boxes of its weights go through a ring in shared memory, fetched by the
tensor memory accelerator; the first of them before the kernel in front of this one has ended (`kernels.launch`), so
that the memory works while that one ends, and while a norm or a gate between two products runs. All programs of a
product stand on the device at once, in half of its shared memory, so that there is room for those of the next.

A matrix instruction that adds to the sums of the one before waits for it, 25 ns for 16 inputs; so each warp has four
sums, for one input in four each, in blocks of 64. That makes other bits than the tiles of `kernels.linear_triton`, so
invariant products are not made here.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.launch import overlaps
from penstock.kernels.linear_tilings import RING_INPUTS, RingTiling

try:
    from triton.experimental.gluon.language import barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:  # their names in Triton 3.6
    from triton.experimental.gluon.language import thread_barrier as barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load

BOX = 64  # inputs that make a line of the swizzled shared memory, 128 bytes
BOXES = RING_INPUTS // BOX  # of one turn; the kernel has sums for four of them


def multiply_ring(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: RingTiling, *, gated: bool) -> Tensor:
    """The product of few rows `[rows, inputs]`; x and weight must be `describable`."""
    rows, inputs = x.shape
    width = weight.shape[0] // (2 if gated else 1)
    assert rows <= tiling.rows
    layout = gl.NVMMASharedLayout(128, 16, 2)
    lines = 16 * tiling.warps
    boxes = (
        TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [tiling.rows, BOX], layout),
        TensorDescriptor(weight, list(weight.shape), [inputs, 1], [lines, BOX], layout),
    )
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    ahead = overlaps(x.device)
    ring_kernel[(-(-width // lines),)](
        *boxes, x if bias is None else bias, out, rows, width, -(-inputs // (BOXES * BOX)),
        ROWS=tiling.rows, LINES=lines, BOX=BOX, BOXES=BOXES, STAGES=tiling.stages, WARPS=tiling.warps, GATED=gated,
        BIAS=bias is not None, AHEAD=ahead, num_warps=tiling.warps, launch_pdl=ahead,
    )  # fmt: skip
    return out


@gluon.jit
def copy_turn(
    x, weight, x_tiles, tiles, full, turn, width,
    WEIGHTS: gl.constexpr, VALUES: gl.constexpr, ROWS: gl.constexpr, LINES: gl.constexpr, BOX: gl.constexpr,
    BOXES: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Start the copies of a turn, its weights, its values or both, into its place of the ring, which must be free."""
    stage = turn % STAGES
    ready = full.index(stage)
    line = gl.program_id(0) * LINES
    start = turn * (BOXES * BOX)
    if WEIGHTS:
        mbarrier.expect(ready, (PIECES * LINES + ROWS) * BOXES * BOX * 2)
        for piece in gl.static_range(PIECES):
            for box in gl.static_range(BOXES):
                target = tiles.index((stage * PIECES + piece) * BOXES + box)
                async_load(weight, [piece * width + line, start + box * BOX], ready, target)
    if VALUES:
        for box in gl.static_range(BOXES):
            async_load(x, [0, start + box * BOX], ready, x_tiles.index(stage * BOXES + box))


@gluon.jit
def add_box(tiles, x_tiles, at, x_at, sums, SUMS: gl.constexpr):
    """sums + weights @ values of one box."""
    values = x_tiles.index(x_at).permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 2))
    return mma_v2(tiles.index(at).load(gl.DotOperandLayout(0, SUMS, 2)), values, sums)


@gluon.jit
def store_outputs(
    sums, ups, bias, out, rows, width,
    ROWS: gl.constexpr, LINES: gl.constexpr, WARPS: gl.constexpr, SUMS: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Bias, gate and rounding of a finished tile `[lines, rows]`."""
    TYPE: gl.constexpr = out.dtype.element_ty
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [LINES // 8, 256 // LINES], [1, WARPS], [0, 1])
    first = gl.program_id(0) * LINES
    line = first + gl.arange(0, LINES, gl.SliceLayout(1, SUMS))
    if BIAS:
        sums += gl.load(bias + line, mask=line < width, other=0.0).to(gl.float32)[:, None]
    if GATED:
        if BIAS:
            ups += gl.load(bias + width + line, mask=line < width, other=0.0).to(gl.float32)[:, None]
        gate = sums.to(TYPE).to(gl.float32)
        sums = gate / (1.0 + gl.exp(-gate)) * ups.to(TYPE).to(gl.float32)
    found = gl.convert_layout(sums.to(TYPE), WIDE)
    line = first + gl.arange(0, LINES, gl.SliceLayout(1, WIDE))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, WIDE))
    places = row.to(gl.int64)[None, :] * width + line[:, None]
    gl.store(out + places, found, mask=(line < width)[:, None] & (row < rows)[None, :])


@gluon.jit(do_not_specialize=("rows",))
def ring_kernel(
    x, weight, bias, out, rows, width, turns,
    ROWS: gl.constexpr, LINES: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """LINES outputs of all rows, GATED: and the gate's lines that belong to them."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    PIECES: gl.constexpr = 2 if GATED else 1
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES * PIECES * BOXES, LINES, BOX], TILE)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * BOXES, ROWS, BOX], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
    fence_async_shared()
    barrier()
    for turn in range(gl.minimum(STAGES, turns)):
        copy_turn(
            x, weight, x_tiles, tiles, full, turn, width, True, False, ROWS, LINES, BOX, BOXES, STAGES, PIECES
        )  # fmt: skip
    if AHEAD:
        tl.extra.cuda.gdc_wait()
    for turn in range(gl.minimum(STAGES, turns)):
        copy_turn(
            x, weight, x_tiles, tiles, full, turn, width, False, True, ROWS, LINES, BOX, BOXES, STAGES, PIECES
        )  # fmt: skip
    sums_0 = gl.zeros([LINES, ROWS], gl.float32, SUMS)
    sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
    ups_0, ups_1, ups_2, ups_3 = sums_0, sums_0, sums_0, sums_0
    for turn in range(turns):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        values = stage * BOXES
        weights = values * PIECES
        sums_0 = add_box(tiles, x_tiles, weights, values, sums_0, SUMS)
        sums_1 = add_box(tiles, x_tiles, weights + 1, values + 1, sums_1, SUMS)
        sums_2 = add_box(tiles, x_tiles, weights + 2, values + 2, sums_2, SUMS)
        sums_3 = add_box(tiles, x_tiles, weights + 3, values + 3, sums_3, SUMS)
        if GATED:
            ups_0 = add_box(tiles, x_tiles, weights + 4, values, ups_0, SUMS)
            ups_1 = add_box(tiles, x_tiles, weights + 5, values + 1, ups_1, SUMS)
            ups_2 = add_box(tiles, x_tiles, weights + 6, values + 2, ups_2, SUMS)
            ups_3 = add_box(tiles, x_tiles, weights + 7, values + 3, ups_3, SUMS)
        barrier()  # every warp has read the turn's boxes
        if turn + STAGES < turns:
            copy_turn(
                x, weight, x_tiles, tiles, full, turn + STAGES, width, True, True,
                ROWS, LINES, BOX, BOXES, STAGES, PIECES,
            )  # fmt: skip
    sums = (sums_0 + sums_1) + (sums_2 + sums_3)
    ups = (ups_0 + ups_1) + (ups_2 + ups_3)
    store_outputs(sums, ups, bias, out, rows, width, ROWS, LINES, WARPS, SUMS, GATED, BIAS)
