"""Products of tokens with the experts that each was sent to, in Triton.

Pairs of a token and an expert are sorted by expert (`kernels.routing_triton`) and go through the matrix units in tiles,
none over two experts. The host does not know how many tiles there are, so as many programs are launched as there may
be, and those without a tile return at once; consecutive programs have the same rows. One token, and few of short
experts, are `kernels.vector_experts_triton`'s.

Each pair's result is a row of its own, and a token's rows are added up in the order of its experts, in fp32: no sum
depends on the order of programs or on other tokens. A row is rounded to the same values in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels.activation import SILU, activate
from penstock.kernels.activation_triton import finish_tile
from penstock.kernels.chip import chip_of
from penstock.kernels.grouped_experts_triton import multiply_planes
from penstock.kernels.grouped_linear import PlaneWeight
from penstock.kernels.launch import begin_pdl
from penstock.kernels.linear_plans import plans_of
from penstock.kernels.linear_tilings import ExpertTiling, Tiling
from penstock.kernels.linear_triton import add_product, line_pointers, load_tile, load_weights, tma_compatible
from penstock.kernels.low_rank_experts_triton import Added
from penstock.kernels.quantized import QuantizedWeight
from penstock.kernels.quantized_experts_triton import multiply_in_order, multiply_pairs
from penstock.kernels.quantized_linear import kind_of
from penstock.kernels.records import NO_BIASES, Activation, ExpertAdapters, ExpertBiases, Routes
from penstock.kernels.routing_triton import Schedule, load_tile_pairs, sort_pairs
from penstock.kernels.vector_experts_triton import multiply_pair_by_pair, takes_pairs

Weight = Tensor | QuantizedWeight | PlaneWeight
COLUMNS = 1024  # of a token's sum in one program


def multiply_experts(
    x: Tensor, routes: Routes, gate_up: Weight, down: Weight, first: int, biases: ExpertBiases, activation: Activation,
    *, gated: bool = True, adapters: ExpertAdapters | None = None, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """`kernels.experts.expert_mlp` on a GPU."""
    if adapters is None and not invariant and takes_pairs(gate_up, len(x)) and takes_pairs(down, len(x)):
        return multiply_pair_by_pair(x, routes, gate_up, down, first, biases, activation, gated=gated)
    hidden, width = x.shape[1], down.shape[-1]
    kind = down.form.name if isinstance(down, PlaneWeight) else "" if isinstance(down, Tensor) else kind_of(down)
    plan = plans_of(x.device).find((width, hidden, x.dtype, False, routes.total, kind, False))
    tiling = plan.way(routes.experts.numel() / routes.total)
    assert isinstance(tiling, ExpertTiling)
    return multiply_sorted(x, routes, gate_up, down, first, tiling, biases, activation, gated=gated, adapters=adapters)


def multiply_sorted(
    x: Tensor, routes: Routes, gate_up: Weight, down: Weight, first: int, tiling: ExpertTiling,
    biases: ExpertBiases = NO_BIASES, activation: Activation = SILU, *, gated: bool = True,
    adapters: ExpertAdapters | None = None,
) -> Tensor:  # fmt: skip
    """The products of the tokens of each expert together. Gates are taken where the first ones end, another activation
    in a pass of its own, and any where adapters add to what it reads. Tiles serve what `sorted` rows cannot."""
    hidden = x.shape[1]
    held = down.shape[0] // hidden if isinstance(down, PlaneWeight) else down.shape[0]
    chosen = routes.experts.shape[1]
    plain = gated and activation == SILU and adapters is None
    if tiling.sorted and plain and biases.gate_up is None and biases.down is None:
        found = multiply_in_order(x, routes.experts, gate_up, down, first)
        if found is not None:
            return sum_lines(found[0], routes, first, held, found[1])
    schedule = sort_pairs(routes.experts, first, held, tiling.down.rows)
    gate = activation if gated and adapters is None else None
    added = Added(schedule, tiling.down.rows, chosen, adapters)
    if isinstance(gate_up, PlaneWeight):
        assert isinstance(down, PlaneWeight)
        inner = multiply_planes(x, gate_up, biases.gate_up, schedule, tiling.gate_up, chosen, gate, held)
        added.to_gate_up(inner, x)
        inner = inner if gate is not None else activate(inner, activation, gated=gated)
        lines = multiply_planes(inner, down, biases.down, schedule, tiling.down, 1, None, held)
        added.to_down(lines, inner)
    elif isinstance(gate_up, Tensor):
        assert isinstance(down, Tensor)
        inner = multiply_tiles(x, gate_up, biases.gate_up, schedule, tiling.gate_up, chosen, gate)
        added.to_gate_up(inner, x)
        inner = inner if gate is not None else activate(inner, activation, gated=gated)
        lines = multiply_tiles(inner, down, biases.down, schedule, tiling.down, 1, None)
        added.to_down(lines, inner)
    else:
        assert not isinstance(down, Tensor | PlaneWeight)
        lines = multiply_pairs(x, gate_up, down, schedule, tiling, chosen, biases, activation, added, gated=gated)
    return sum_lines(lines, routes, first, held)


def sum_lines(lines: Tensor, routes: Routes, first: int, held: int, places: Tensor | None = None) -> Tensor:
    """Each token's sum of its pairs' lines by their shares. places: int32 [pairs], where each pair's line stands."""
    tokens, chosen = routes.experts.shape
    hidden = lines.shape[1]
    out = torch.empty(tokens, hidden, dtype=lines.dtype, device=lines.device)
    pdl = chip_of(lines.device).pdl
    sum_kernel[(tokens, triton.cdiv(hidden, COLUMNS))](
        lines, routes.experts, routes.shares, out, hidden, first,
        HELD=held, CHOSEN=chosen, COLUMNS=COLUMNS, PDL=pdl, places=places, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def multiply_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, schedule: Schedule, tiling: Tiling, chosen: int,
    gate: Activation | None,
) -> Tensor:  # fmt: skip
    """A row for each pair: row pair // chosen of x times its expert, of which the gate is taken if there is one. Rows
    of experts not held stay unset."""
    held, outputs, inputs = weight.shape
    width = outputs // 2 if gate is not None else outputs
    kind, slope, limit, shift = gate or SILU
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert bias is None or bias.is_contiguous()
    lines = weight.view(held * outputs, inputs)
    tma = tiling.tma and tma_compatible(lines)
    out = torch.empty(len(schedule.order), width, dtype=x.dtype, device=x.device)
    columns = triton.cdiv(width, tiling.outputs)
    pdl = chip_of(x.device).pdl
    expert_kernel[(columns * len(schedule.tiles),)](
        x, TensorDescriptor(lines, list(lines.shape), [inputs, 1], [tiling.outputs, tiling.inputs])
        if tma else lines, lines if bias is None else bias,
        schedule.order, schedule.tiles, schedule.total, out, width, inputs, x.stride(0), columns,
        CHOSEN=chosen, ROWS=tiling.rows, OUTPUTS=tiling.outputs, INPUTS=tiling.inputs, SWAP_AB=tiling.swap_ab,
        GATED=gate is not None, KIND=kind, SLOPE=slope, LIMIT=limit, SHIFT=shift, BIAS=bias is not None,
        TMA=tma, EVEN=inputs % tiling.inputs == 0, PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def load_share(experts, shares, pair, size, first, HELD: tl.constexpr):
    """A pair's expert, counted from the first that is held, and its share and a size, both zero if it is not held."""
    expert = tl.load(experts + pair) - first
    held = (expert >= 0) & (expert < HELD)
    return expert, tl.where(held, tl.load(shares + pair), 0.0), tl.where(held, size, 0)


@triton.jit(do_not_specialize=("first",))
def sum_kernel(
    lines, experts, shares, out, width, first,
    HELD: tl.constexpr, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr, places=None,
):  # fmt: skip
    """Part of a token's sum over the rows of its pairs."""
    begin_pdl(PDL)
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for at in tl.static_range(CHOSEN):
        pair = token * CHOSEN + at
        _, share, size = load_share(experts, shares, pair, width, first, HELD)
        if places is not None:
            pair = tl.load(places + pair, mask=size > 0, other=0)
        line = tl.load(lines + pair.to(tl.int64) * width + column, mask=column < size, other=0.0)
        total += share * line.to(tl.float32)
    tl.store(out + token.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def expert_kernel(
    x, weight, bias, order, tiles, count, out, width, inputs, x_stride, columns,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SWAP_AB: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BIAS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile, if there is one: pairs of an expert. Rows past the last pair or output repeat it."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0) // columns
    if tile >= tl.load(count):
        return
    expert, line, size, pair = load_tile_pairs(order, tiles, tile, ROWS)
    first = tl.program_id(0) % columns * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    top = expert * (2 * width if GATED else width)
    x_lines = x + pair // CHOSEN * x_stride
    sums = tl.zeros([OUTPUTS, ROWS] if SWAP_AB else [ROWS, OUTPUTS], tl.float32)
    ups = sums
    lines, up_lines = line_pointers(weight, top + tl.minimum(output, width - 1), width, inputs, TMA)
    for start in range(0, inputs, INPUTS):
        values = load_tile(x_lines, start, inputs, INPUTS, EVEN, SWAP_AB)
        weights = load_weights(weight, lines, top + first, start, inputs, INPUTS, EVEN, not SWAP_AB, TMA)
        sums = add_product(values, weights, sums, SWAP_AB)
        if GATED:
            weights = load_weights(weight, up_lines, top + width + first, start, inputs, INPUTS, EVEN, not SWAP_AB, TMA)
            ups = add_product(values, weights, ups, SWAP_AB)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP_AB:
        sums = sums.trans()
        ups = ups.trans()
    found = finish_tile(
        sums, ups, bias + top, output, width, out.dtype.element_ty, BIAS, GATED, KIND, SLOPE, LIMIT, SHIFT
    )
    real = (line < size)[:, None] & (output < width)[None, :]
    tl.store(out + pair[:, None] * width + output[None, :], found, mask=real)
