"""Weights of 4 and 8 bits with scales of groups, in the order in which kernels unpack them quickest.

A word of 16 bits holds four values of 4 bits, or two of 8, whose inputs lie a run apart: so two neighbouring words,
shifted and masked once, are two neighbouring inputs as a matrix unit wants them. Values with one place in their words
are a plane. Runs and planes make a block of inputs, whose scales are one word for each output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from penstock.kernels.quantized import EXPONENT_BIAS, FLOAT8, Float4Weight, GroupedWeight, unpacked

RUNS = (64, 32, 16)
SCALES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", FLOAT8: "e4m3", torch.uint8: "e8m0"}
)
GROUPS = (16, 32, 64, 128, 256)  # inputs of a scale; longer groups repeat theirs
GROUPED = frozenset(
    {f"int{bits}-{group}-{kind}" for bits in (4, 8) for group in GROUPS for kind in ("bf16", "fp16", "fp32")}
    | {"e2m1-16-e4m3", "e2m1-32-e8m0"}
)  # names of forms
COUNTED = 4  # outputs for each counter of a tile: four tiles of the smallest height and width


@dataclass(frozen=True)
class PlaneForm:
    """What a kernel is compiled for."""

    numbers: str  # "int4", "int8", "e2m1"
    run: int  # inputs of a plane in a block
    scales: int  # of a block: 1, 2 or 4
    scale: str  # type of a scale, of SCALES

    @property
    def name(self) -> str:
        """Of a product's weight, as plans know it."""
        return f"{self.numbers}-{self.block // self.scales}-{self.scale}"

    @property
    def planes(self) -> int:
        return 2 if self.numbers == "int8" else 4

    @property
    def block(self) -> int:
        return self.planes * self.run

    @property
    def constants(self) -> dict[str, int | str]:
        """Of kernels. Words are in capitals: a constant that is called as one of Triton's types, as bf16 and int8 are,
        becomes the type where a kernel is loaded that another process has compiled."""
        words = {"NUMBERS": self.numbers.upper(), "SCALE": self.scale.upper()}
        return {"RUN": self.run, "PLANES": self.planes, "SCALES": self.scales, **words}

    def blocks(self, inputs: int) -> int:
        return -(-inputs // self.block)


@dataclass(frozen=True, eq=False)
class PlaneWeight:
    """A weight `[outputs, inputs]` as `kernels.grouped_linear_triton` reads it."""

    form: PlaneForm
    inputs: int
    values: Tensor  # int16 [outputs, blocks * run]
    scales: Tensor  # int32 or int64 [blocks, outputs], the first scale of a block in the lowest bits
    arrivals: Tensor  # int32, zeros: counts the programs of a tile that are done
    zeros: Tensor | None = None  # int32 [blocks, outputs], a byte for each scale; None: the middle of the range
    factors: Tensor | None = None  # fp32 [outputs], multiplied with the scales
    order: Tensor | None = None  # int32 [inputs], see GroupedWeight

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.values.shape[0], self.inputs))

    @property
    def nbytes(self) -> int:
        parts = self.values, self.scales, self.zeros, self.factors, self.order
        return sum(part.nbytes for part in parts if part is not None)


def form_of(weight: GroupedWeight | Float4Weight) -> PlaneForm | None:
    """The form with the longest runs; None where groups do not fit any."""
    numbers = "e2m1" if isinstance(weight, Float4Weight) else f"int{weight.bits}"
    width = 8 * weight.scales.itemsize
    channel = weight.group == weight.shape[-1]
    for run in RUNS:
        block = PlaneForm(numbers, run, 1, "").block
        if channel or weight.group % block == 0:
            return PlaneForm(numbers, run, 1, SCALES[weight.scales.dtype])
        if block % weight.group == 0 and weight.group % run == 0 and block // weight.group * width <= 64:
            return PlaneForm(numbers, run, block // weight.group, SCALES[weight.scales.dtype])
    return None


def form_named(name: str) -> PlaneForm:
    """A form of this name, with the longest runs."""
    numbers, group, scale = name.split("-")
    widths = {"fp32": 32, "bf16": 16, "fp16": 16}
    for run in RUNS:
        block = PlaneForm(numbers, run, 1, scale).block
        scales = max(1, block // int(group))
        if run <= int(group) and scales * widths.get(scale, 8) <= 64:
            return PlaneForm(numbers, run, scales, scale)
    raise AssertionError(name)


def scales_exactly(name: str, dtype: torch.dtype) -> bool:
    """Whether the scales of a form of this name are numbers of the type. Then values may be multiplied with them in it:
    the products are rounded as `dequantized` rounds them."""
    scale = name.rpartition("-")[2]
    return scale == SCALES[dtype] or scale == "e4m3" or (scale == "e8m0" and dtype is torch.bfloat16)


def planes_or_dense(weight: GroupedWeight | Float4Weight, dtype: torch.dtype) -> PlaneWeight | Tensor:
    """The weight as a GPU's products read it, in new memory: in planes, or where its groups fit no block dense, with
    the inputs of x in their order."""
    found = planes_of(weight)
    if found is not None:
        return found
    dense = weight.dequantized(dtype)
    order = weight.order if isinstance(weight, GroupedWeight) else None
    return dense if order is None else torch.empty_like(dense).index_copy_(-1, order.long(), dense)


def planes_of(weight: GroupedWeight | Float4Weight) -> PlaneWeight | None:
    """The weight in planes, in new memory; None where its groups do not fit."""
    form = form_of(weight)
    if form is None:
        return None
    outputs, inputs = weight.shape
    blocks = form.blocks(inputs)
    codes = weight.values if form.numbers == "int8" else unpacked(weight.values)
    codes = torch.nn.functional.pad(codes, (0, blocks * form.block - inputs))
    values = packed_words(codes.view(outputs, blocks, form.planes, form.run).movedim(2, -1), 16 // form.planes)
    zeros = weight.zeros if isinstance(weight, GroupedWeight) else None
    return PlaneWeight(
        form, inputs, values.view(outputs, -1), block_words(weight.scales, weight.group, form, blocks),
        torch.zeros(-(-outputs // COUNTED), dtype=torch.int32, device=values.device),
        None if zeros is None else block_words(zeros, weight.group, form, blocks),
        weight.factors if isinstance(weight, Float4Weight) else None,
        weight.order if isinstance(weight, GroupedWeight) else None,
    )  # fmt: skip


def timed_weight(form: PlaneForm, outputs: int, inputs: int, memory: Tensor) -> PlaneWeight:
    """A weight with what lies in the memory of 16-bit numbers for its values, and scales of 1."""
    blocks = form.blocks(inputs)
    one = {"fp32": 0x3F800000, "bf16": 0x3F80, "fp16": 0x3C00, "e4m3": 0x38, "e8m0": EXPONENT_BIAS}[form.scale]
    kind = {"fp32": torch.int32, "bf16": torch.int16, "fp16": torch.int16}.get(form.scale, torch.uint8)
    ones = torch.full((outputs, blocks * form.scales), one, dtype=kind, device=memory.device)
    return PlaneWeight(
        form, inputs, memory.view(torch.int16).view(outputs, blocks * form.run),
        block_words(ones, form.block // form.scales, form, blocks),
        torch.zeros(-(-outputs // COUNTED), dtype=torch.int32, device=memory.device),
    )  # fmt: skip


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits in one word each, the first in the lowest: uint8 [..., n] -> int16 [...]."""
    found = codes[..., 0].to(torch.int16)
    for at in range(1, codes.shape[-1]):
        found |= codes[..., at].to(torch.int16) << bits * at
    return found


def block_words(scales: Tensor, group: int, form: PlaneForm, blocks: int) -> Tensor:
    """Scales or zero points `[outputs, groups]` as words `[blocks, outputs]`; past the last group they are zero."""
    if group > form.block:
        scales = (
            scales.view(as_bits(scales)).repeat_interleave(-(-group // form.block), 1)[:, :blocks].view(scales.dtype)
        )
    bits = scales.contiguous().view(as_bits(scales))
    bits = torch.nn.functional.pad(bits, (0, blocks * form.scales - bits.shape[1])).view(len(bits), blocks, form.scales)
    width = 8 * bits.itemsize
    wide = torch.int64 if width * form.scales > 32 else torch.int32
    found = torch.zeros(bits.shape[:2], dtype=torch.int64, device=bits.device)
    for at in range(form.scales):
        found |= (bits[..., at].to(torch.int64) & (1 << width) - 1) << width * at
    return found.to(wide).T.contiguous()


def as_bits(tensor: Tensor) -> torch.dtype:
    """The integer type of as many bits."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
