"""Products with a weight in Triton, for the shapes at which they measure better than cuBLAS, or must be invariant.

One row is multiplied by the plain arithmetic units, which keep up with the memory then. Up to 8 rows are
`kernels.linear_hopper`'s. More rows go through the matrix units in tiles: few rows by plain loads, many by TMA, whose
programs take tile after tile. No tile cuts the inputs, and a matrix instruction adds
them to the sums in order, 16 at a time, whatever its size: so a row's result is the same to the last bit in every
tiling, alone or among others. Tests hold that, and `invariant` products are made of tiles alone.

Tiles may add what adapters do (`kernels.low_rank_tiles_triton`): their kernels then begin with other programs.

The gate of the MLP may be taken where both its products end. They are rounded first, as they are where `activate` is a
kernel of its own, so that it is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels import gluon
from penstock.kernels.activation import activate
from penstock.kernels.activation_triton import gate_values
from penstock.kernels.chip import chip_of
from penstock.kernels.linear_plans import plans_of
from penstock.kernels.linear_tilings import PipelinedTiling, Tiling, VectorTiling, Way
from penstock.kernels.low_rank_tiles_triton import (
    add_adapters,
    expanding_halves,
    shrink_units,
    tile_arguments,
)
from penstock.kernels.records import LowRankInputs


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool, invariant: bool) -> Tensor:
    """`kernels.linear.linear`, or `gated_linear`, on a GPU."""
    return multiply_by(way_of(x, weight, gated, invariant), x, weight, bias, gated=gated)


def way_of(x: Tensor, weight: Tensor, gated: bool, invariant: bool, least: int = 1) -> Way:
    """How the product's plan cuts it, or would cut it of the least number of rows."""
    outputs, inputs = weight.shape
    plan = plans_of(x.device).find((outputs // 2 if gated else outputs, inputs, x.dtype, gated, 0, "", invariant))
    return plan.way(max(len(x), least))


def multiply_by(
    way: Way, x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool, added: LowRankInputs | None = None
) -> Tensor:
    """The product in one way. added: what adapters add to one of tiles."""
    if isinstance(way, PipelinedTiling):
        pipelined = pipelined_product()
        if pipelined is not None and tma_compatible(x) and tma_compatible(weight):
            return pipelined(x, weight, bias, way, gated=gated)
        way = way_of(x, weight, gated, invariant=True)  # tiles
    if isinstance(way, VectorTiling):
        return multiply_vector(x, weight, bias, way, gated=gated)
    if not isinstance(way, Tiling):
        found = functional.linear(x, weight, bias)
        return activate(found) if gated else found
    fused = gated and way.gated
    tma = way.tma and tma_compatible(x) and tma_compatible(weight)
    found = (multiply_tma if tma else multiply_tiles)(x, weight, bias, way, gated=fused, added=added)
    return activate(found) if gated and not fused else found


def pipelined_product() -> Callable[..., Tensor] | None:
    """`kernels.linear_hopper.multiply_pipelined`, if this Triton compiles it."""
    hopper = gluon.load("linear_hopper")
    return None if hopper is None else hopper.multiply_pipelined


def multiply_vector(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: VectorTiling, *, gated: bool) -> Tensor:
    """The product of one row `[1, inputs]`. Weights must have been complete when the kernel before this one began."""
    width, inputs = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    assert x.shape == (1, inputs)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = torch.empty(1, width, dtype=x.dtype, device=x.device)
    pdl = chip_of(x.device).pdl
    vector_kernel[(triton.cdiv(width, tiling.outputs),)](
        x, weight, x if bias is None else bias, out, width, inputs,
        OUTPUTS=tiling.outputs, INPUTS=tiling.inputs, GATED=gated, BIAS=bias is not None, PDL=pdl,
        num_warps=tiling.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def multiply_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, *, gated: bool, added: LowRankInputs | None = None
) -> Tensor:
    """The product of some rows `[rows, inputs]`, a program to a tile."""
    rows, inputs = x.shape
    width = weight.shape[0] // (2 if gated else 1)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    pdl = tiling.pdl and chip_of(x.device).pdl
    grid: tuple[int, ...] = triton.cdiv(rows, tiling.rows), triton.cdiv(width, tiling.outputs)
    adapters = {} if added is None else tile_arguments(added, tiling, grid[0] * grid[1], gated=gated)
    tile_kernel[(adapters["workers"] + grid[0] * grid[1],) if adapters else grid](
        x, weight, x if bias is None else bias, out, rows, width, inputs, x.stride(0),
        ROWS=tiling.rows, OUTPUTS=tiling.outputs, INPUTS=tiling.inputs, SWAP_AB=tiling.swap_ab, GATED=gated,
        BIAS=bias is not None, EVEN=inputs % tiling.inputs == 0, PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl, **adapters,
    )  # fmt: skip
    return out


def multiply_tma(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, *, gated: bool, added: LowRankInputs | None = None
) -> Tensor:
    """The product of many rows `[rows, inputs]`; x and weight must be `tma_compatible`."""
    rows, inputs = x.shape
    width = weight.shape[0] // (2 if gated else 1)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, tiling.rows) * triton.cdiv(width, tiling.outputs)
    programs = min(tiles, tiling.ctas_per_sm * chip_of(x.device).num_sms)
    pdl = tiling.pdl and chip_of(x.device).pdl
    adapters: dict[str, Any] = {}
    if added is not None:
        adapters = tile_arguments(added, tiling, programs, gated=gated) | {"plain": x, "x_stride": x.stride(0)}
    tma_kernel[(adapters.get("workers", 0) + programs,)](
        TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [tiling.rows, tiling.inputs]),
        TensorDescriptor(weight, list(weight.shape), [inputs, 1], [tiling.outputs, tiling.inputs]),
        x if bias is None else bias, out, rows, width, inputs,
        ROWS=tiling.rows, OUTPUTS=tiling.outputs, INPUTS=tiling.inputs, SWAP_AB=tiling.swap_ab, GATED=gated,
        BIAS=bias is not None, FLAT=tiling.flat and added is None, PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl, **adapters,
    )  # fmt: skip
    return out


def tma_compatible(matrix: Tensor) -> bool:
    """Whether TMA can load it: every row begins at a multiple of 16 bytes."""
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0
    return aligned and matrix.stride(1) == 1


@triton.jit
def vector_kernel(
    x, weight, bias, out, width, inputs,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row. Each iteration multiplies the weights that the one before has loaded."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < width
    places = tl.arange(0, INPUTS)
    lines = weight + output.to(tl.int64)[:, None] * inputs + places[None, :]
    up_lines = lines
    if GATED:
        up_lines += width.to(tl.int64) * inputs  # a width of one is a constant, which has no type
    there = real[:, None] & (places < inputs)[None, :]
    gates = tl.load(lines, mask=there, other=0.0, eviction_policy="evict_first")
    ups = gates
    if GATED:
        ups = tl.load(up_lines, mask=there, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    up_sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        values = tl.load(x + start + places, mask=places < inputs - start, other=0.0).to(tl.float32)
        there = real[:, None] & (places < inputs - start - INPUTS)[None, :]
        following = tl.load(lines + start + INPUTS, mask=there, other=0.0, eviction_policy="evict_first")
        sums += gates.to(tl.float32) * values[None, :]
        gates = following
        if GATED:
            following = tl.load(up_lines + start + INPUTS, mask=there, other=0.0, eviction_policy="evict_first")
            up_sums += ups.to(tl.float32) * values[None, :]
            ups = following
    found = tl.sum(sums, 1)
    if BIAS:
        found += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, 1)
        if BIAS:
            up += tl.load(bias + width + output, mask=real, other=0.0).to(tl.float32)
        found = gate_values(found.to(out.dtype.element_ty), up.to(out.dtype.element_ty))
    tl.store(out + output, found.to(out.dtype.element_ty), mask=real)


@triton.jit
def store_tile(
    sums, ups, bias, out, row, output, rows, width,
    SWAP_AB: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Bias, gate and rounding of a finished tile; what lies past the last row or output is not written."""
    if SWAP_AB:
        sums = sums.trans()
        ups = ups.trans()
    real = output < width
    if BIAS:
        sums += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            ups += tl.load(bias + width + output, mask=real, other=0.0).to(tl.float32)[None, :]
        sums = gate_values(sums.to(out.dtype.element_ty), ups.to(out.dtype.element_ty))
    targets = out + row.to(tl.int64)[:, None] * width + output[None, :]
    tl.store(targets, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & real[None, :])


@triton.jit
def load_tile(lines, start, inputs, INPUTS: tl.constexpr, EVEN: tl.constexpr, UPRIGHT: tl.constexpr):
    """Inputs from start on of some lines, `[lines, inputs]` or UPRIGHT `[inputs, lines]`; zeros past their end."""
    inner = start + tl.arange(0, INPUTS)
    if UPRIGHT:
        places = lines[None, :] + inner[:, None]
        there = (inner < inputs)[:, None]
    else:
        places = lines[:, None] + inner[None, :]
        there = (inner < inputs)[None, :]
    if EVEN:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=there, other=0.0)
    return found


@triton.jit
def load_tma_tile(matrix, row, start, UPRIGHT: tl.constexpr):
    """A tile by TMA, `[rows, inputs]` or UPRIGHT `[inputs, rows]`."""
    tile = matrix.load([row, start])
    if UPRIGHT:
        tile = tile.trans()
    return tile


@triton.jit
def load_weights(
    weight, lines, row, start, inputs, INPUTS: tl.constexpr, EVEN: tl.constexpr, UPRIGHT: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """A tile of a weight, of which `lines` are pointers, or whose first is `row` of a descriptor."""
    if TMA:
        tile = load_tma_tile(weight, row, start, UPRIGHT)
    else:
        tile = load_tile(lines, start, inputs, INPUTS, EVEN, UPRIGHT)
    return tile


@triton.jit
def line_pointers(weight, line, width, inputs, TMA: tl.constexpr):
    """Pointers to lines of a weight, and to those `width` further on; what has a descriptor needs none."""
    if TMA:
        lines = line
        up_lines = line
    else:
        lines = weight + line.to(tl.int64) * inputs
        up_lines = lines + width.to(tl.int64) * inputs
    return lines, up_lines


@triton.jit
def add_product(values, weights, sums, SWAP_AB: tl.constexpr):
    """sums + values @ weights; SWAP_AB: sums + weights @ values."""
    if SWAP_AB:
        sums = tl.dot(weights, values, sums, input_precision="ieee")
    else:
        sums = tl.dot(values, weights, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=("rows", "turn", "adapters", "workers"))  # a single row is no case of its own
def tile_kernel(
    x, weight, bias, out, rows, width, inputs, x_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SWAP_AB: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    a=None, b=None, places=None, order=None, row_tiles=None, total=None, partials=None, shrunk=None, counts=None,
    turn=0, a_stride=0, b_stride=0, a_lines=0, adapters=0, second=0, third=0, workers=0,
    RANK: tl.constexpr = 0, CHUNK: tl.constexpr = 0, SHARE: tl.constexpr = 0, SHARES: tl.constexpr = 0,
    LINES: tl.constexpr = 0, BLOCKS: tl.constexpr = 0,
):  # fmt: skip
    """One tile. Lines past the last row or output repeat it. RANK: of adapters, 0 without any; `workers`
    programs before those of the tiles shrink for them.

    The next kernel is let in at the end alone: its programs would take their places unevenly before.
    """
    high = tl.program_id(0)
    wide = tl.program_id(1)
    if RANK > 0:
        if high < workers:
            if PDL:
                tl.extra.cuda.gdc_wait()
            shrink_units(
                x, a, partials, shrunk, counts, turn, order, row_tiles, total, rows, inputs, x_stride, a_stride,
                a_lines, adapters, workers, SHARE, SHARES, LINES, BLOCKS,
            )  # fmt: skip
            return
        wide = (high - workers) // tl.cdiv(rows, ROWS)
        high = (high - workers) % tl.cdiv(rows, ROWS)
    row = high * ROWS + tl.arange(0, ROWS)
    output = wide * OUTPUTS + tl.arange(0, OUTPUTS)
    x_lines = x + tl.minimum(row, rows - 1).to(tl.int64) * x_stride
    lines = weight + tl.minimum(output, width - 1).to(tl.int64) * inputs
    up_lines = lines
    if GATED:
        up_lines += width.to(tl.int64) * inputs  # a width of one is a constant, which has no type
    sums = tl.zeros([OUTPUTS, ROWS] if SWAP_AB else [ROWS, OUTPUTS], tl.float32)
    ups = sums
    if RANK > 0:  # neither weights nor places change in a step
        place = tl.load(places + row, mask=row < rows, other=0)
        expanding, expanding_up = expanding_halves(
            b, counts, output, width, adapters, b_stride, RANK, CHUNK, SWAP_AB, GATED
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, inputs, INPUTS):
        values = load_tile(x_lines, start, inputs, INPUTS, EVEN, SWAP_AB)
        weights = load_tile(lines, start, inputs, INPUTS, EVEN, not SWAP_AB)
        sums = add_product(values, weights, sums, SWAP_AB)
        if GATED:
            weights = load_tile(up_lines, start, inputs, INPUTS, EVEN, not SWAP_AB)
            ups = add_product(values, weights, ups, SWAP_AB)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if RANK > 0:
        sums, ups = add_adapters(
            sums, ups, expanding, expanding_up, b, counts, turn, total, shrunk, place, row, output, width,
            wide * OUTPUTS, second, third, adapters, a_lines, b_stride, RANK, CHUNK, BLOCKS, SWAP_AB, GATED,
        )  # fmt: skip
    store_tile(sums, ups, bias, out, row, output, rows, width, SWAP_AB, GATED, BIAS)


@triton.jit(do_not_specialize=("rows", "turn", "adapters", "workers"))
def tma_kernel(
    x, weight, bias, out, rows, width, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SWAP_AB: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, FLAT: tl.constexpr, PDL: tl.constexpr,
    plain=None, x_stride=0, a=None, b=None, places=None, order=None, row_tiles=None, total=None, partials=None,
    shrunk=None, counts=None, turn=0, a_stride=0, b_stride=0, a_lines=0, adapters=0, second=0, third=0, workers=0,
    RANK: tl.constexpr = 0, CHUNK: tl.constexpr = 0, SHARE: tl.constexpr = 0, SHARES: tl.constexpr = 0,
    LINES: tl.constexpr = 0, BLOCKS: tl.constexpr = 0,
):  # fmt: skip
    """Every so many-th tile. Neighbouring programs take the tiles of up to 8 heights over the same outputs.

    x and weight are descriptors, which give zeros past the end; FLAT fetches for the next tile while one ends. RANK: as
    of `tile_kernel`, whose x is plain.
    """
    high = tl.cdiv(rows, ROWS)
    tiles = high * tl.cdiv(width, OUTPUTS)
    group = 8 * tl.cdiv(width, OUTPUTS)
    if RANK > 0:
        if tl.program_id(0) < workers:
            if PDL:
                tl.extra.cuda.gdc_wait()
            shrink_units(
                plain, a, partials, shrunk, counts, turn, order, row_tiles, total, rows, inputs, x_stride, a_stride,
                a_lines, adapters, workers, SHARE, SHARES, LINES, BLOCKS,
            )  # fmt: skip
            return
    elif PDL:
        tl.extra.cuda.gdc_wait()
    first_tile = tl.program_id(0)
    programs = tl.num_programs(0)
    if RANK > 0:
        first_tile -= workers
        programs -= workers
    for tile in tl.range(first_tile, tiles, programs, flatten=FLAT):
        top = tile // group * 8
        size = tl.minimum(high - top, 8)
        first_row = (top + tile % group % size) * ROWS
        first_output = tile % group // size * OUTPUTS
        sums = tl.zeros([OUTPUTS, ROWS] if SWAP_AB else [ROWS, OUTPUTS], tl.float32)
        ups = sums
        row = first_row + tl.arange(0, ROWS)
        output = first_output + tl.arange(0, OUTPUTS)
        if RANK > 0:
            place = tl.load(places + row, mask=row < rows, other=0)
            expanding, expanding_up = expanding_halves(
                b, counts, output, width, adapters, b_stride, RANK, CHUNK, SWAP_AB, GATED
            )  # fmt: skip
            if PDL:
                tl.extra.cuda.gdc_wait()
        for start in range(0, inputs, INPUTS):
            values = load_tma_tile(x, first_row, start, SWAP_AB)
            sums = add_product(values, load_tma_tile(weight, first_output, start, not SWAP_AB), sums, SWAP_AB)
            if GATED:
                ups = add_product(values, load_tma_tile(weight, width + first_output, start, not SWAP_AB), ups, SWAP_AB)
        if RANK > 0:
            sums, ups = add_adapters(
                sums, ups, expanding, expanding_up, b, counts, turn, total, shrunk, place, row, output, width,
                first_output, second, third, adapters, a_lines, b_stride, RANK, CHUNK, BLOCKS, SWAP_AB, GATED,
            )  # fmt: skip
        store_tile(sums, ups, bias, out, row, output, rows, width, SWAP_AB, GATED, BIAS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
