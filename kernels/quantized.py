"""Quantized weights as products read them, whatever the file said: one layout for each kind of arithmetic.

A weight is `[outputs, inputs]`, or `[experts, outputs, inputs]` of a mixture. Each layout has its rows one behind the
other, so that parts of a fused weight are slices of one memory. Packed values lie with the lowest bits first.

The arithmetic, to which every kernel is held:

- `Float8Weight` and `Int8Weight` with activations: a row of x is divided by its scale and rounded to the weight's type,
  sums are fp32, and are multiplied with the scales of row and weight; in blocks each block of inputs by itself.
- everything else is a product with `dequantized` in x's type: fp32 arithmetic, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FLOAT8 = torch.float8_e4m3fn
LARGEST: Mapping[torch.dtype, float] = {FLOAT8: 448.0, torch.int8: 127.0}
SMALLEST = 1e-12  # scale of a row, so that a row of zeros has one
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1's values by its three lowest bits; the highest is the sign
EXPONENT_BIAS = 127  # of E8M0, OCP Microscaling Formats 1.0

# How a row of x becomes 8 bits: not at all, with a scale for each row, for each block of inputs of a row, or with the
# scale that the checkpoint gives.
Activations: TypeAlias = Literal["none", "row", "block", "static"]


@dataclass(frozen=True, eq=False)
class Float8Weight:
    """E4M3 with a scale for each output, or for each block of outputs and inputs."""

    values: Tensor  # e4m3 [..., outputs, inputs]
    scales: Tensor  # fp32 [..., outputs], or [..., ceil(outputs / rows), ceil(inputs / columns)] of a block
    block: tuple[int, int] | None = None  # rows and columns of a block, (128, 128) in every published checkpoint
    activations: Activations = "row"  # "block" where the weight has blocks, or "none"
    input_scale: Tensor | None = None  # fp32 [1], of "static"

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        scales = self.scales[..., None]
        if self.block is not None:
            scales = spread_blocks(self.scales, self.block, self.shape)
        return (self.values.float() * scales).to(dtype)


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """Integers of 8 bits with a scale for each output, for rows that are integers, too (W8A8)."""

    values: Tensor  # int8 [..., outputs, inputs]
    scales: Tensor  # fp32 [..., outputs]
    activations: Activations = "row"  # or "static"
    input_scale: Tensor | None = None  # fp32 [1], of "static"

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scales[..., None]).to(dtype)


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """Integers of 4 or 8 bits with a scale, and perhaps a zero point, for each group of inputs: (value - zero) * scale.

    order: the input of x that each input of the weight is multiplied with, where groups are not runs of x's inputs.
    """

    bits: int
    group: int  # inputs of a scale; all of them where a scale is an output's
    values: Tensor  # uint8 [..., outputs, inputs * bits / 8]
    scales: Tensor  # 16-bit or fp32 [..., outputs, inputs / group]
    zeros: Tensor | None = None  # uint8 [..., outputs, inputs / group]; None: 2 ** (bits - 1)
    order: Tensor | None = None  # int32 [inputs]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-1], self.values.shape[-1] * 8 // self.bits))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """In the order of the weight's inputs, not of x's."""
        values = (unpacked(self.values) if self.bits == 4 else self.values).float()
        zeros = 2.0 ** (self.bits - 1) if self.zeros is None else self.zeros.float()[..., None]
        groups = values.view(*self.scales.shape, self.group)
        return ((groups - zeros) * self.scales.float()[..., None]).flatten(-2).to(dtype)


@dataclass(frozen=True, eq=False)
class Float4Weight:
    """E2M1 with a scale for each group of inputs: MXFP4 has powers of two of 32 inputs, NVFP4 E4M3 of 16 and one fp32
    scale for all."""

    values: Tensor  # uint8 [..., outputs, inputs / 2]
    scales: Tensor  # uint8 exponents (E8M0) or e4m3 [..., outputs, inputs / group]
    group: int  # 32 or 16
    factors: Tensor | None = None  # fp32 [..., outputs], multiplied with the scales; of NVFP4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-1], self.values.shape[-1] * 2))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Values times scales, rounded once."""
        codes = unpacked(self.values).int()
        table = torch.tensor((*FLOAT4, *(-value for value in FLOAT4)), device=self.values.device)
        if self.scales.dtype is torch.uint8:
            scales = torch.exp2(self.scales.float() - EXPONENT_BIAS)
        else:
            scales = self.scales.float()
        if self.factors is not None:
            scales = scales * self.factors[..., None]
        return (table[codes].view(*scales.shape, self.group) * scales[..., None]).flatten(-2).to(dtype)


class QuantizedRows(NamedTuple):
    """Rows that a kernel before the product has rounded already."""

    values: Tensor  # e4m3 or int8 [rows, inputs]
    scales: Tensor  # fp32 [rows, 1], or [rows, ceil(inputs / block)], which lie by block
    dtype: torch.dtype  # of what was rounded, and of products


Rows: TypeAlias = Tensor | QuantizedRows  # of a product


@dataclass(frozen=True, eq=False)
class RowFormat:
    """What a product wants its rows to be, as `quantize_rows` takes it."""

    kind: torch.dtype
    block: int = 0
    scale: Tensor | None = None  # fp32 [1], given for all rows


QuantizedWeight: TypeAlias = Float8Weight | Int8Weight | GroupedWeight | Float4Weight


def expert_of(weight: QuantizedWeight, expert: int) -> QuantizedWeight:
    """The matrix of one expert. What has no experts' axis, an order and a scale of rows, is all experts'."""
    own: dict[str, Any] = {name: getattr(weight, name)[expert] for name in outputs_axes(weight)}
    return replace(weight, **own)


def tensors_of(weight: DataclassInstance) -> dict[str, Tensor]:
    """The tensors of a layout by the names of its fields."""
    found = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def held_bytes(weight: DataclassInstance) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(weight).values())


def outputs_axes(weight: QuantizedWeight) -> Mapping[str, int]:
    """Of each tensor that has something for each output, or block of outputs, the axis along which it has it."""
    by_block = isinstance(weight, GroupedWeight | Float4Weight)
    by_block = by_block or (isinstance(weight, Float8Weight) and weight.block is not None)
    axes = {"values": -2, "scales": -2 if by_block else -1, "zeros": -2, "factors": -1}
    return {name: axes[name] for name in tensors_of(weight) if name in axes}


def stack_outputs(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight with the outputs of several that `can_stack`, one behind the other."""
    first = weights[0]
    joined: dict[str, Any] = {
        name: torch.cat([getattr(weight, name) for weight in weights], axis)
        for name, axis in outputs_axes(first).items()
    }
    return replace(first, **joined) if len(weights) > 1 else first


def can_stack(first: QuantizedWeight, second: QuantizedWeight) -> bool:
    """Whether one layout can hold both, the second's outputs behind the first's: products treat x alike, and no block
    of outputs would be of both."""
    if type(first) is not type(second) or tensors_of(first).keys() != tensors_of(second).keys():
        return False
    for field in fields(first):
        mine, other = getattr(first, field.name), getattr(second, field.name)
        if field.name in outputs_axes(first):
            if mine.dtype != other.dtype:
                return False
        elif not (torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other):
            return False
    return not (isinstance(first, Float8Weight) and first.block is not None and first.shape[-2] % first.block[0])


def stack_experts(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """`[experts, outputs, inputs]` of one layout. Given scales of x become the largest of all experts'."""
    first = weights[0]
    joined: dict[str, Any] = {
        name: torch.stack([getattr(weight, name) for weight in weights]) for name in outputs_axes(first)
    }
    if isinstance(first, Float8Weight | Int8Weight) and first.input_scale is not None:
        given = torch.stack([tensors_of(weight)["input_scale"] for weight in weights])
        joined["input_scale"] = given.amax(0)
    return replace(first, **joined)


def join_experts(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight with the experts of several of one layout, one behind the other."""
    first = weights[0]
    joined: dict[str, Any] = {
        name: torch.cat([getattr(weight, name) for weight in weights]) for name in outputs_axes(first)
    }
    return replace(first, **joined) if len(weights) > 1 else first


def take_outputs(weight: QuantizedWeight, rows: Tensor) -> QuantizedWeight:
    """The weight with these of its outputs, int64 [rows], in their order. Its blocks of scales become as much lower as
    the order needs: half as high, a quarter, ..."""
    if isinstance(weight, Float8Weight) and weight.block is not None:
        height, columns = weight.block
        blocks = rows // height
        while len(rows) % height or not torch.equal(blocks, blocks[::height].repeat_interleave(height)):
            height = height // 2 if height % 2 == 0 else 1
        scales = weight.scales.index_select(-2, blocks[::height])
        return replace(weight, values=chosen(weight.values, -2, rows), scales=scales, block=(height, columns))
    found: dict[str, Any] = {
        name: chosen(getattr(weight, name), axis, rows) for name, axis in outputs_axes(weight).items()
    }
    return replace(weight, **found)


def lower(weight: Float8Weight, height: int = 1) -> Float8Weight:
    """The same with scales of blocks that are so many outputs high, of which its own are a multiple."""
    assert weight.block is not None, "it has blocks"
    scales = weight.scales.repeat_interleave(weight.block[0] // height, -2)
    scales = scales[..., : -(-weight.shape[-2] // height), :].contiguous()
    return replace(weight, scales=scales, block=(height, weight.block[1]))


def as_low(weight: QuantizedWeight, first: QuantizedWeight) -> QuantizedWeight:
    """The weight with blocks of scales as low as those of one that comes before it, if that can be."""
    blocks = [one.block for one in (weight, first) if isinstance(one, Float8Weight) and one.block is not None]
    if len(blocks) < 2 or blocks[0][0] % blocks[1][0] or not isinstance(weight, Float8Weight):
        return weight
    return lower(weight, blocks[1][0])


def ending(weight: QuantizedWeight, outputs: int) -> QuantizedWeight:
    """The same with no block that is of the first so many outputs and of those behind them."""
    cut = isinstance(weight, Float8Weight) and weight.block is not None and outputs % weight.block[0] > 0
    return lower(weight) if cut and isinstance(weight, Float8Weight) else weight


def alike(first: QuantizedWeight, second: QuantizedWeight) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Two weights of one format, such that they can be stacked: with one given scale of x, the larger, and with blocks
    that end where the first does."""
    given = [tensors_of(weight)["input_scale"] for weight in (first, second) if "input_scale" in tensors_of(weight)]
    if given:
        larger: dict[str, Any] = {"input_scale": torch.stack(given).amax(0)}
        first, second = replace(first, **larger), replace(second, **larger)
    return ending(first, first.shape[-2]), ending(second, first.shape[-2])


def chosen(tensor: Tensor, axis: int, rows: Tensor) -> Tensor:
    """`index_select` of any type."""
    if tensor.itemsize > 1:
        return tensor.index_select(axis, rows)
    return tensor.view(torch.uint8).index_select(axis, rows).view(tensor.dtype)


def pad_outputs(weight: QuantizedWeight, outputs: int) -> QuantizedWeight:
    """The weight with rows of zeros behind its own, so many in all."""
    missing = outputs - weight.shape[-2]
    if not missing:
        return weight
    found: dict[str, Any] = {}
    for name, axis in outputs_axes(weight).items():
        tensor, more = getattr(weight, name), missing
        if name == "scales" and isinstance(weight, Float8Weight) and weight.block is not None:
            more = -(-outputs // weight.block[0]) - tensor.shape[axis]
        shape = list(tensor.shape)
        shape[axis] = more
        found[name] = torch.cat((tensor, tensor.new_zeros(shape)), axis)
    return replace(weight, **found)


def unpacked(values: Tensor) -> Tensor:
    """Two numbers of 4 bits from each byte, the lower first: uint8 [..., n] -> [..., 2 n]."""
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)


def packed_pairs(codes: Tensor) -> Tensor:
    """Two numbers of 4 bits in each byte, the first in the lower: uint8 [..., 2 n] -> [..., n]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def spread_blocks(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """The scale of each number of a matrix of this shape, whose last blocks may be cut."""
    rows, columns = block
    return scales.repeat_interleave(rows, -2)[..., : shape[-2], :].repeat_interleave(columns, -1)[..., : shape[-1]]


def quantize_rows(x: Tensor, kind: torch.dtype, block: int = 0, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`[rows, inputs]` in e4m3 or int8, and fp32 scales `[rows, 1]`, or `[rows, ceil(inputs / block)]` by blocks.

    A scale is the largest number of its row or block over the type's largest; `scale  # fp32 [1]` is given for all.
    Integers are rounded to the nearest, of two the even; what is beyond the type's largest becomes it.
    """
    largest, rows = LARGEST[kind], x.float()
    if scale is not None:
        scales = scale.expand(len(x), 1)
        divisors = scales
    elif block:
        padded = pad(rows, (0, -x.shape[1] % block))
        scales = (padded.view(len(x), -1, block).abs().amax(-1) * (1 / largest)).clamp_min(SMALLEST)
        divisors = scales.repeat_interleave(block, 1)[:, : x.shape[1]]
    else:
        scales = (rows.abs().amax(1, keepdim=True) * (1 / largest)).clamp_min(SMALLEST)
        divisors = scales
    found = (rows * (1 / divisors)).clamp(-largest, largest)
    return (found.round() if kind is torch.int8 else found).to(kind), scales


def rounded_rows(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x as a product with the weight sees it, in x's type or fp32: rounded as its activations are, in the order of the
    weight's inputs. A product of it with the dequantized weight is the reference of every kernel."""
    if isinstance(weight, GroupedWeight):
        return x if weight.order is None else x[:, weight.order]
    if isinstance(weight, Float4Weight) or weight.activations == "none":
        return x
    block = weight.block[1] if isinstance(weight, Float8Weight) and weight.block is not None else 0
    block = block if weight.activations == "block" else 0
    values, scales = quantize_rows(x, weight.values.dtype, block, weight.input_scale)
    spread = scales.repeat_interleave(block, 1)[:, : x.shape[1]] if block else scales
    return values.float() * spread


def multiply_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`[rows, inputs] -> [rows, outputs]` in x's type: the arithmetic of a product, in fp32 throughout."""
    rows = rounded_rows(x, weight)
    exact = rows is not x or rows.dtype is torch.float32
    kind = torch.float32 if exact and not isinstance(weight, GroupedWeight) else x.dtype
    found = rows.float() @ weight.dequantized(kind).float().T
    return (found if bias is None else found + bias.float()).to(x.dtype)
