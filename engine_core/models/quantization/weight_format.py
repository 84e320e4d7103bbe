"""How one matrix is quantized, and which tensors a checkpoint has in its place. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

# A layout of `kernels.quantized`: Float8Weight, Int8Weight, GroupedWeight, Float4Weight.
Kind: TypeAlias = Literal["float8", "int8", "grouped", "float4"]
# As `kernels.quantized.Activations`.
Activations: TypeAlias = Literal["none", "row", "block", "static"]
# How files lay out values and scales: a tensor `weight` of the type itself, and the packings of compressed-tensors,
# AWQ, GPTQ (zero points minus one, or as they are), gpt-oss and ModelOpt; `dense` files are rounded while they load.
Packing: TypeAlias = Literal["dense", "plain", "packed", "awq", "gptq", "gptq_v2", "blocks", "nvfp4"]
Counts: TypeAlias = Literal["experts", "outputs", "inputs", ""]
# What a tensor is: packed or plain values, scales, zero points, the group of each input, a factor of all scales, the
# scale of activations, and what is not needed to read the others.
Role: TypeAlias = Literal["values", "scales", "zeros", "groups", "factor", "input_scale", "unread"]

SCALE_TYPES = ("F32", "BF16", "F16")
EXPONENT_TYPES = ("U8", "F8_E8M0")
DENSE_TYPES = ("F64", "F32", "F16", "BF16")
WORD = 32  # bits of a packed element


class Axis(msgspec.Struct, frozen=True):
    """An axis of a stored tensor: an element for so many experts, outputs or inputs, or of a length of its own."""

    counts: Counts
    per: int = 1  # the last element may stand for fewer; of an axis that counts nothing the length

    def length(self, sizes: dict[Counts, int]) -> int:
        return -(-sizes[self.counts] // self.per) if self.counts else self.per


class StoredPart(msgspec.Struct, frozen=True):
    """A tensor that a checkpoint has of a quantized matrix, by what follows the matrix's name."""

    role: Role
    suffix: str
    dtypes: tuple[str, ...]  # as safetensors calls them
    axes: tuple[Axis, ...]
    optional: bool = False

    def shape(self, outputs: int, inputs: int, experts: int = 1) -> tuple[int, ...]:
        sizes: dict[Counts, int] = {"experts": experts, "outputs": outputs, "inputs": inputs}
        return tuple(axis.length(sizes) for axis in self.axes)

    def axis(self, counts: Counts) -> int | None:
        """The axis along which a share of the outputs, inputs or experts is a slice; None: every rank reads it all."""
        return next((at for at, axis in enumerate(self.axes) if axis.counts == counts), None)


def trimmed(shape: Sequence[int]) -> tuple[int, ...]:
    """Without trailing axes of one element."""
    found = tuple(shape)
    while found and found[-1] == 1:
        found = found[:-1]
    return found


OUTPUTS, INPUTS, EXPERTS = Axis("outputs"), Axis("inputs"), Axis("experts")


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a matrix `[outputs, inputs]` is quantized, in memory and in the file.

    A chip that lacks the arithmetic changes the layouts that `convert` makes, never this: the file stays as it is.
    """

    kind: Kind
    packing: Packing = "plain"
    bits: int = 8
    group: int = 0  # inputs of a scale in a row; 0: all
    block: tuple[int, int] | None = None  # outputs and inputs of a scale
    per_tensor: bool = False  # one scale for the whole matrix
    symmetric: bool = True  # no zero points
    ordered: bool = False  # groups are no runs of inputs: each input has the number of its group
    activations: Activations = "none"
    scale: str = "weight_scale"  # names of tensors
    input_scale: str = "input_scale"

    @property
    def label(self) -> str:
        """For people: what a weight is, and over what a scale stretches."""
        name = {"float8": "FP8", "int8": "INT8", "grouped": f"INT{self.bits}", "float4": "FP4"}[self.kind]
        if self.block is not None:
            return f"{name} in blocks of {self.block[0]}x{self.block[1]}"
        return f"{name} in groups of {self.group}" if self.group else name

    def stored(self, *, stacked: bool = False) -> tuple[StoredPart, ...]:
        """The tensors of a matrix. stacked: of all experts' matrices in one tensor each, with an axis for experts; the
        name of `weight` is then that of the matrix itself."""
        parts = STORED[self.packing](self)
        if not stacked:
            return parts
        return tuple(
            msgspec.structs.replace(part, suffix=stacked_suffix(part.suffix), axes=(EXPERTS, *part.axes))
            for part in parts
        )

    def multiple(self, counts: Counts) -> int:
        """What a rank's share of the outputs or inputs must be a multiple of, where it is not the whole."""
        found = [axis.per for part in self.stored() for axis in part.axes if axis.counts == counts]
        return math.lcm(*found, self.group or 1) if counts == "inputs" else math.lcm(*found)

    def complaint(self, outputs: int, inputs: int) -> str:
        """Why a matrix of this shape cannot have the format, as a clause; empty where it can."""
        if self.group and inputs % self.group:
            return f"its {inputs} inputs are no multiple of the group of {self.group}"
        if self.packing != "plain" and inputs % 8:
            return f"its {inputs} inputs are no multiple of 8"
        if self.packing in ("awq", "gptq", "gptq_v2") and outputs % 8:
            return f"its {outputs} outputs are no multiple of 8"
        return ""

    def held_bytes(self, outputs: int, inputs: int) -> int:
        """Memory of the layout that the matrix becomes."""
        if self.kind == "int8":
            return outputs * inputs + 4 * outputs
        if self.kind == "float8":
            if self.block is None:
                return outputs * inputs + 4 * outputs
            rows, columns = self.block
            return outputs * inputs + 4 * -(-outputs // rows) * -(-inputs // columns)
        groups = outputs * (inputs // (self.group or inputs))
        values = outputs * inputs * self.bits // 8
        if self.kind == "float4":
            return values + groups + (4 * outputs if self.packing == "nvfp4" or self.group == 16 else 0)
        return values + groups * (2 if self.symmetric else 3) + (4 * inputs if self.ordered else 0)


def stacked_suffix(suffix: str) -> str:
    """`.weight` is the name of the stack itself, `.weight_scale_inv` becomes `_scale_inv`."""
    return suffix.removeprefix(".weight") if suffix.startswith(".weight") else suffix


def dense(form: WeightFormat) -> tuple[StoredPart, ...]:
    """A matrix that is not quantized yet."""
    return (StoredPart(role="values", suffix=".weight", dtypes=DENSE_TYPES, axes=(OUTPUTS, INPUTS)),)


def plain(form: WeightFormat) -> tuple[StoredPart, ...]:
    """Values of 8 bits as they are, and what the scales stretch over."""
    dtype = "F8_E4M3" if form.kind == "float8" else "I8"
    if form.block is not None:
        scales: tuple[Axis, ...] = (Axis("outputs", form.block[0]), Axis("inputs", form.block[1]))
    else:
        scales = () if form.per_tensor else (OUTPUTS, Axis("", 1))
    parts = [
        StoredPart("values", ".weight", (dtype,), (OUTPUTS, INPUTS)),
        StoredPart("scales", f".{form.scale}", (*SCALE_TYPES, *EXPONENT_TYPES), scales),
    ]
    if form.activations == "static":
        parts.append(StoredPart("input_scale", f".{form.input_scale}", SCALE_TYPES, ()))
    return tuple(parts)


def packed(form: WeightFormat) -> tuple[StoredPart, ...]:
    """compressed-tensors' pack-quantized, nvfp4-pack-quantized and mxfp4-pack-quantized."""
    scales = (OUTPUTS, Axis("inputs", form.group) if form.group else Axis("", 1))
    if form.kind == "float4":
        exponents = form.group == 32
        dtypes = EXPONENT_TYPES if exponents else ("F8_E4M3",)
        parts = [
            StoredPart("values", ".weight_packed", ("U8",), (OUTPUTS, Axis("inputs", 2))),
            StoredPart("scales", ".weight_scale", dtypes, scales),
        ]
        if not exponents:
            parts.append(StoredPart("factor", ".weight_global_scale", ("F32",), ()))
            parts.append(StoredPart("unread", ".input_global_scale", ("F32",), (), optional=True))
        return tuple(parts)
    per_word = WORD // form.bits
    parts = [
        StoredPart("values", ".weight_packed", ("I32",), (OUTPUTS, Axis("inputs", per_word))),
        StoredPart("scales", ".weight_scale", SCALE_TYPES, scales),
        StoredPart("unread", ".weight_shape", ("I64", "I32"), (Axis("", 2),), optional=True),
    ]
    if not form.symmetric:
        zeros = (Axis("outputs", per_word), scales[1])
        parts.append(StoredPart("zeros", ".weight_zero_point", ("I32",), zeros))
    if form.ordered:
        parts.append(StoredPart("groups", ".weight_g_idx", ("I32", "I64"), (INPUTS,)))
    return tuple(parts)


def awq(form: WeightFormat) -> tuple[StoredPart, ...]:
    per_word = WORD // form.bits
    groups = Axis("inputs", form.group) if form.group else Axis("", 1)
    return (
        StoredPart("values", ".qweight", ("I32",), (INPUTS, Axis("outputs", per_word))),
        StoredPart("zeros", ".qzeros", ("I32",), (groups, Axis("outputs", per_word))),
        StoredPart("scales", ".scales", SCALE_TYPES, (groups, OUTPUTS)),
    )


def gptq(form: WeightFormat) -> tuple[StoredPart, ...]:
    per_word = WORD // form.bits
    groups = Axis("inputs", form.group) if form.group else Axis("", 1)
    return (
        StoredPart("values", ".qweight", ("I32",), (Axis("inputs", per_word), OUTPUTS)),
        StoredPart("zeros", ".qzeros", ("I32",), (groups, Axis("outputs", per_word))),
        StoredPart("scales", ".scales", SCALE_TYPES, (groups, OUTPUTS)),
        StoredPart("groups", ".g_idx", ("I32", "I64"), (INPUTS,), optional=not form.ordered),
    )


def blocks(form: WeightFormat) -> tuple[StoredPart, ...]:
    """MXFP4 as gpt-oss has it, of stacked experts alone."""
    groups = Axis("inputs", form.group)
    return (
        StoredPart("values", "_blocks", ("U8",), (OUTPUTS, groups, Axis("", form.group // 2))),
        StoredPart("scales", "_scales", EXPONENT_TYPES, (OUTPUTS, groups)),
    )


def nvfp4(form: WeightFormat) -> tuple[StoredPart, ...]:
    """As ModelOpt writes it."""
    return (
        StoredPart("values", ".weight", ("U8",), (OUTPUTS, Axis("inputs", 2))),
        StoredPart("scales", ".weight_scale", ("F8_E4M3",), (OUTPUTS, Axis("inputs", form.group))),
        StoredPart("factor", ".weight_scale_2", ("F32",), ()),
        StoredPart("unread", ".input_scale", ("F32",), (), optional=True),
    )


STORED: Mapping[Packing, Callable[[WeightFormat], tuple[StoredPart, ...]]] = {
    "dense": dense,
    "plain": plain,
    "packed": packed,
    "awq": awq,
    "gptq": gptq,
    "gptq_v2": gptq,
    "blocks": blocks,
    "nvfp4": nvfp4,
}

# Quantized matrices of a part of a layer, by their names within it.
Formats: TypeAlias = tuple[tuple[str, WeightFormat], ...]


def format_of(formats: Formats, name: str) -> WeightFormat | None:
    """None: the matrix is not quantized."""
    return next((form for module, form in formats if module == name), None)
