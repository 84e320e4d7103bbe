"""Tensors of quantized checkpoints as the layouts of `kernels.quantized`, bit for bit.

A tensor may be a rank's slice along outputs or inputs, whole groups or blocks of it, and may have an axis for experts
in front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.engine_core.models.quantization.weight_format import Role, WeightFormat
from penstock.engine_core.models.weight_files import AGAIN
from penstock.kernels.quantized import (
    EXPONENT_BIAS,
    Float4Weight,
    Float8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    packed_pairs,
    unpacked,
)
from penstock.protocol.errors import ModelError

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight columns in a word: `0, 2, 4, 6, 1, 3, 5, 7` lie there
NOT_A_NUMBER = 255  # of E8M0
ONES: Mapping[int, int] = {4: 0x11111111, 8: 0x01010101}  # one in each of a word's numbers


def check_numbers(form: WeightFormat, role: Role, stored: Tensor, inputs: int, name: str) -> None:
    """Raise ModelError naming a tensor of scales that make no numbers of a matrix, or of groups that it does not have.

    stored: in the host's memory, of a matrix with so many inputs in all. A group of zeros may have the scale zero.
    """
    if role in ("scales", "factor", "input_scale"):
        exponents = stored.dtype in (torch.uint8, torch.float8_e8m0fnu)
        found = stored.view(torch.uint8) if exponents else stored.float()
        low, high = (float(end) for end in found.aminmax())
        if not math.isfinite(low + high) or (exponents and high == NOT_A_NUMBER):
            raise ModelError(f"tensor {name} has scales that are not finite; {AGAIN}")
        if not exponents and (low == high == 0 or (role != "scales" and not found.all())):
            raise ModelError(f"tensor {name} has no scale but zero; {AGAIN}")
    elif role == "groups":
        low, high, count = int(stored.min()), int(stored.max()), inputs // (form.group or inputs)
        if low < 0 or high >= count:
            raise ModelError(f"tensor {name} names groups {low} to {high}, and the matrix has {count}, the first is 0")


def read_matrix(form: WeightFormat, raw: Mapping[Role, Tensor], name: str) -> QuantizedWeight:
    """The matrix of this name from its stored tensors, by their roles. What is stored need not be kept.

    Raises ModelError naming the matrix where the tensors contradict the format.
    """
    if form.kind == "grouped":
        return read_grouped(form, raw, name)
    if form.kind == "float4":
        return read_float4(form, raw)
    values, activations = raw["values"], form.activations
    scales = read_scales(form, raw["scales"], values)
    input_scale = raw["input_scale"].float().reshape(-1) if activations == "static" else None
    if form.kind == "int8":
        return Int8Weight(values, scales, activations, input_scale)
    return Float8Weight(values, scales, form.block, activations, input_scale)


def read_scales(form: WeightFormat, stored: Tensor, values: Tensor) -> Tensor:
    """fp32, by outputs or by blocks."""
    scales = torch.exp2(stored.float() - EXPONENT_BIAS) if stored.dtype is torch.uint8 else stored.float()
    if form.block is not None:
        return scales
    leading, outputs = values.shape[:-2], values.shape[-2]
    return scales.reshape(*leading, -1).expand(*leading, outputs).contiguous()


def read_float4(form: WeightFormat, raw: Mapping[Role, Tensor]) -> Float4Weight:
    """Two values a byte, as they are stored; a factor of the whole matrix becomes every output's."""
    values, scales = raw["values"], raw["scales"]
    if form.packing == "blocks":
        values = values.flatten(-2)
    if scales.dtype is torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    factors = None
    if "factor" in raw:
        factor = raw["factor"].float()
        factor = 1 / factor if form.packing == "packed" else factor  # compressed-tensors divides by it
        factors = factor.reshape(*values.shape[:-2], 1).expand(values.shape[:-1]).contiguous()
    return Float4Weight(values, scales, form.group, factors)


def read_grouped(form: WeightFormat, raw: Mapping[Role, Tensor], name: str) -> GroupedWeight:
    """Integers as they lie in memory, those of an output one behind the other."""
    values, scales, zeros = raw["values"], raw["scales"], raw.get("zeros")
    if form.packing == "packed":
        values = bytes_of(values)
        if zeros is not None:
            zeros = codes_of(zeros.transpose(-1, -2), form.bits).transpose(-1, -2)[..., : scales.shape[-2], :]
    elif form.packing == "awq":
        assert zeros is not None
        values, zeros, scales = packed_pairs(awq_codes(values)), awq_codes(zeros), scales.transpose(-1, -2)
    else:
        assert zeros is not None
        values, scales = bytes_of(values.transpose(-1, -2)), scales.transpose(-1, -2)
        if form.packing == "gptq":
            zeros = zeros + ONES[form.bits]  # stored less one, words as a whole: zeros borrow from their neighbours
        zeros = codes_of(zeros, form.bits).transpose(-1, -2)
        if form.symmetric:
            if not bool((zeros == 2 ** (form.bits - 1)).all()):
                raise ModelError(f"{name}: its zero points are not those of symmetric weights, which the config says")
            zeros = None
    order = input_order(form, raw["groups"], scales.shape[-1], name) if "groups" in raw else None
    if order is not None:
        values = packed_pairs(unpacked(values)[..., order]) if form.bits == 4 else values[..., order]
    inputs = values.shape[-1] * 8 // form.bits
    return GroupedWeight(
        form.bits,
        form.group or inputs,
        values.contiguous(),
        scales.contiguous(),
        zeros if zeros is None else zeros.contiguous(),
        order if order is None else order.to(torch.int32),
    )


def bytes_of(words: Tensor) -> Tensor:
    """The bytes of int32, the lowest first."""
    return words.contiguous().view(torch.uint8)


def codes_of(words: Tensor, bits: int) -> Tensor:
    """Numbers of 4 or 8 bits from each int32, the lowest first: [..., n] -> uint8 [..., n * 32 / bits]."""
    return unpacked(bytes_of(words)) if bits == 4 else bytes_of(words)


def awq_codes(words: Tensor) -> Tensor:
    """Numbers of 4 bits from AWQ's words of eight outputs each: [..., inputs, n] -> [..., 8 n, inputs]."""
    codes = codes_of(words, 4)
    places = torch.tensor(AWQ_PLACES, device=words.device)
    return codes.view(*words.shape, 8)[..., places].flatten(-2).transpose(-1, -2)


def input_order(form: WeightFormat, groups: Tensor, count: int, name: str) -> Tensor | None:
    """The inputs sorted by their groups; None where they are in this order already."""
    inputs = len(groups)
    size = form.group or inputs
    runs = torch.arange(inputs, device=groups.device) // size
    if torch.equal(groups.long() - groups.min(), runs):
        return None
    if not form.ordered:
        raise ModelError(f"{name}: its groups are no runs of inputs, though the config says that they are")
    order = torch.argsort(groups, stable=True)
    if count * size != inputs or not torch.equal(groups[order].long(), runs):
        raise ModelError(f"{name}: its {count} groups are not of {size} inputs each")
    return order
