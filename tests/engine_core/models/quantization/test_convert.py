"""Tensors of checkpoints as layouts in memory: against readers of the formats' descriptions, number by number, and
against the libraries that write them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.engine_core.models.quantization.convert import check_numbers, read_matrix
from penstock.engine_core.models.quantization.weight_format import Role, StoredPart, WeightFormat, trimmed
from penstock.kernels.quantized import GroupedWeight, QuantizedWeight
from penstock.protocol.errors import ModelError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's nibbles, from the lowest


def read(form: WeightFormat, name: str = "model.layers.0.mlp.up_proj", **raw: Tensor) -> QuantizedWeight:
    held: dict[Role, Tensor] = {role: tensor for role, tensor in raw.items() if tensor is not None}  # type: ignore[misc]
    return read_matrix(form, held, name)


def fits(part: StoredPart, found: Mapping[str, Tensor], outputs: int, inputs: int) -> bool:
    """Whether a library's tensor has the shape of a part."""
    return trimmed(found[part.suffix[1:]].shape) == trimmed(part.shape(outputs, inputs))


def words(numbers: Sequence[Sequence[int]], bits: int) -> Tensor:
    """Each row's numbers in int32, the first in the lowest bits."""
    per, rows = 32 // bits, []
    for row in numbers:
        packs = [sum(number << bits * at for at, number in enumerate(row[first : first + per]))
                 for first in range(0, len(row), per)]  # fmt: skip
        rows.append([pack - (1 << 32) if pack >= 1 << 31 else pack for pack in packs])
    return torch.tensor(rows, dtype=torch.int32)


def number(word: int, at: int, bits: int) -> int:
    return word >> bits * at & ((1 << bits) - 1)


def numbers(rows: int, columns: int, bits: int) -> list[list[int]]:
    found: list[list[int]] = torch.randint(0, 1 << bits, (rows, columns)).tolist()
    return found


def transposed(table: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(row) for row in zip(*table, strict=True)]


def scales_of(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(rows, columns) + 0.5).to(dtype)


def grouped(values: list[list[int]], scales: Tensor, zeros: list[list[int]], group: Sequence[int]) -> Tensor:
    """(value - zero) * scale, number by number; group: of each input."""
    return torch.tensor([
        [(value - zeros[output][group[at]]) * scales[output, group[at]].item() for at, value in enumerate(row)]
        for output, row in enumerate(values)
    ])  # fmt: skip


def runs(inputs: int, group: int) -> list[int]:
    return [at // group for at in range(inputs)]


shapes = given(outputs=st.integers(1, 4), groups=st.integers(1, 3), group=st.sampled_from((0, 8, 32)))
few = settings(max_examples=12, deadline=None)


# --------------------------------------------------------------------------- 8 bits


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (3, 3), (8, 1)])
def test_blocks_of_float8_have_a_scale_each(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    form = WeightFormat(kind="float8", block=(2, 3), activations="block")
    values = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    scales = scales_of(math.ceil(outputs / 2), math.ceil(inputs / 3), torch.bfloat16)
    found = read(form, values=values, scales=scales).dequantized(torch.float32)
    for output in range(outputs):
        for at in range(inputs):
            expected = values[output, at].float() * scales[output // 2, at // 3].float()
            assert found[output, at] == expected


def test_blocks_are_transformers() -> None:
    form = WeightFormat(kind="float8", block=(128, 128), activations="block")
    values, scales = torch.randn(256, 384).to(torch.float8_e4m3fn), scales_of(2, 3)
    found = read(form, values=values, scales=scales)
    assert torch.equal(found.dequantized(torch.float32), Fp8Dequantize(None)._dequantize_one(values, scales))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_may_be_powers_of_two(dtype: torch.dtype) -> None:
    form = WeightFormat(kind="float8", block=(2, 2), activations="block")
    scales = torch.tensor([[120, 127], [128, 130]], dtype=torch.uint8)
    found = read(form, values=torch.ones(4, 4).to(torch.float8_e4m3fn), scales=scales.view(dtype))
    assert found.dequantized(torch.float32)[::2, ::2].tolist() == [[2**-7, 1.0], [2.0, 8.0]]


@pytest.mark.parametrize(
    ("kind", "strategy"), [*itertools.product(("float8", "int8"), ("tensor", "channel")), ("float8", "block")]
)
def test_eight_bits_are_compressed_tensors(kind: str, strategy: str) -> None:
    block = (4, 8) if strategy == "block" else None
    weight, scale = (
        torch.randn(8, 16),
        {"channel": scales_of(8, 1), "block": scales_of(2, 2)}.get(strategy, torch.ones(1)),
    )
    values = {"num_bits": 8, "type": "float" if kind == "float8" else "int", "strategy": strategy}
    if block is not None:
        values["block_structure"] = list(block)
    scheme = QuantizationScheme(targets=["Linear"], weights=values)
    compressor = BaseCompressor.get_value_from_registry("naive-quantized")
    stored = compressor.compress({"weight": weight, "weight_scale": scale / 20}, scheme)
    form = WeightFormat(kind=kind, per_tensor=strategy == "tensor", block=block)  # type: ignore[arg-type]
    assert all(fits(part, stored, 8, 16) for part in form.stored())
    found = read(form, values=stored["weight"], scales=stored["weight_scale"])
    assert torch.equal(found.dequantized(torch.float32), compressor.decompress(stored, scheme)["weight"])


@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_a_scale_of_activations_is_kept(kind: str) -> None:
    form = WeightFormat(kind=kind, per_tensor=True, activations="static")  # type: ignore[arg-type]
    values = torch.ones(2, 2).to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    found = read(form, values=values, scales=torch.tensor(2.0), input_scale=torch.tensor(0.5, dtype=torch.bfloat16))
    assert found.activations == "static"  # type: ignore[union-attr]
    assert found.input_scale.tolist() == [0.5]  # type: ignore[union-attr]


def test_experts_come_first() -> None:
    values = torch.randn(3, 4, 8).to(torch.float8_e4m3fn)
    form, whole = WeightFormat(kind="float8"), WeightFormat(kind="float8", per_tensor=True)
    for one, scales in ((form, torch.rand(3, 4, 1)), (whole, torch.rand(3))):
        found = read(one, values=values, scales=scales).dequantized(torch.float32)
        for expert in range(3):
            single = read(one, values=values[expert], scales=scales[expert]).dequantized(torch.float32)
            assert torch.equal(found[expert], single)


# --------------------------------------------------------------------------- groups


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@shapes
@few
def test_packed_integers(bits: int, symmetric: bool, outputs: int, groups: int, group: int) -> None:
    size, inputs = group or 16 * groups, (group or 16) * groups
    count = inputs // size
    values, zeros, scales = numbers(outputs, inputs, bits), numbers(outputs, count, bits), scales_of(outputs, count)
    form = WeightFormat(kind="grouped", packing="packed", bits=bits, group=group, symmetric=symmetric)
    packed_zeros = None if symmetric else words(transposed(zeros), bits).T
    found = read(form, values=words(values, bits), scales=scales, zeros=packed_zeros)  # type: ignore[arg-type]
    middle = [[1 << bits - 1] * count] * outputs
    expected = grouped(values, scales, middle if symmetric else zeros, runs(inputs, size))
    assert torch.equal(found.dequantized(torch.float32), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, None])
def test_packed_integers_are_compressed_tensors(bits: int, symmetric: bool, group: int | None) -> None:
    """In bfloat16, in which the library multiplies: numbers times scales are exact in fp32, and rounded once."""
    outputs, inputs = 12, 96
    count = inputs // (group or inputs)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric,
               "strategy": "group" if group else "channel", "group_size": group}  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    zeros = torch.randint(-(1 << bits - 1), 1 << bits - 1, (outputs, count), dtype=torch.int8)
    state = {
        "weight": torch.randn(outputs, inputs, dtype=torch.bfloat16),
        "weight_scale": scales_of(outputs, count, torch.bfloat16) / 8,
        "weight_zero_point": torch.zeros_like(zeros) if symmetric else zeros,
    }
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    stored = compressor.compress(state, scheme)
    form = WeightFormat(kind="grouped", packing="packed", bits=bits, group=group or 0, symmetric=symmetric)
    parts = {part.role: stored[part.suffix[1:]] for part in form.stored()}
    for part in form.stored():
        assert fits(part, stored, outputs, inputs)
    found = read_matrix(form, parts, "w").dequantized(torch.bfloat16)
    assert torch.equal(found, compressor.decompress(stored, scheme)["weight"])


@pytest.mark.parametrize("packing", ["packed", "gptq"])
def test_an_order_of_inputs_is_that_of_their_groups(packing: str) -> None:
    outputs, inputs, size = 8, 32, 8
    group = torch.randperm(inputs).div(size, rounding_mode="floor")
    values, scales = numbers(outputs, inputs, 4), scales_of(outputs, inputs // size)
    form = WeightFormat(kind="grouped", packing=packing, bits=4, group=size, ordered=True)  # type: ignore[arg-type]
    raw: dict[Role, Tensor] = {"values": words(values, 4), "scales": scales, "groups": group.int()}
    if packing == "gptq":
        sevens = words([[7] * outputs] * (inputs // size), 4)
        raw |= {"values": words(transposed(values), 4), "scales": scales.T, "zeros": sevens}
        raw["values"] = words(values, 4).T.contiguous()
    found = read_matrix(form, raw, "w")
    assert isinstance(found, GroupedWeight)
    assert found.order is not None
    assert found.order.dtype is torch.int32
    expected = grouped(values, scales, [[8] * (inputs // size)] * outputs, group.tolist())
    assert torch.equal(found.dequantized(torch.float32), expected[:, found.order])


def test_an_order_that_is_none_is_not_kept() -> None:
    raw: dict[Role, Tensor] = {"values": words(numbers(2, 16, 4), 4), "scales": scales_of(2, 2)}
    for first in (0, 5):  # a rank's share of the inputs begins with a later group
        raw["groups"] = torch.tensor(runs(16, 8)) + first
        form = WeightFormat(kind="grouped", packing="packed", bits=4, group=8, ordered=True)
        assert read_matrix(form, raw, "w").order is None  # type: ignore[union-attr]


def test_groups_that_are_no_runs_are_refused_where_the_config_knows_no_order() -> None:
    raw: dict[Role, Tensor] = {
        "values": words(numbers(16, 8, 4), 4),
        "scales": scales_of(2, 8),
        "zeros": words([[7] * 8] * 2, 4),
        "groups": torch.tensor([0, 1] * 8),
    }
    raw["values"] = words(numbers(8, 16, 4), 4).T.contiguous()
    form = WeightFormat(kind="grouped", packing="gptq", bits=4, group=8)
    with pytest.raises(ModelError, match=r"^q_proj: its groups are no runs of inputs, though the config says"):
        read_matrix(form, raw, "q_proj")
    uneven = torch.tensor([0] * 7 + [1] * 9).flip(0)
    ordered = WeightFormat(kind="grouped", packing="gptq", bits=4, group=8, ordered=True)
    with pytest.raises(ModelError, match=r"^q_proj: its 2 groups are not of 8 inputs each$"):
        read_matrix(ordered, {**raw, "groups": uneven}, "q_proj")


@shapes
@few
def test_awq(outputs: int, groups: int, group: int) -> None:
    outputs, size, inputs = 8 * outputs, group or 16 * groups, (group or 16) * groups
    count = inputs // size
    qweight = torch.randint(-(2**31), 2**31, (inputs, outputs // 8), dtype=torch.int32)
    qzeros = torch.randint(-(2**31), 2**31, (count, outputs // 8), dtype=torch.int32)
    scales = scales_of(count, outputs, torch.float16)
    form = WeightFormat(kind="grouped", packing="awq", bits=4, group=group, symmetric=False)
    found = read(form, values=qweight, zeros=qzeros, scales=scales).dequantized(torch.float32)
    for at in range(inputs):
        for word in range(outputs // 8):
            for nibble, column in enumerate(AWQ_COLUMNS):
                value = number(int(qweight[at, word]), nibble, 4) - number(int(qzeros[at // size, word]), nibble, 4)
                output = 8 * word + column
                assert found[output, at].item() == value * scales[at // size, output].item()


def test_awq_is_compressed_tensors_reading_of_it() -> None:
    qweight = torch.randint(-(2**31), 2**31, (64, 4), dtype=torch.int32)
    qzeros = torch.randint(-(2**31), 2**31, (2, 4), dtype=torch.int32)
    scales = scales_of(2, 32, torch.float16)
    weight, scale, zero = AutoAWQConverter(group_size=32)._convert_gemm_module(qweight, scales, qzeros)
    assert zero is not None
    expected = (weight.float().view(32, 2, 32) - zero.float()[..., None]) * scale.float()[..., None]
    form = WeightFormat(kind="grouped", packing="awq", bits=4, group=32, symmetric=False)
    found = read(form, values=qweight, zeros=qzeros, scales=scales).dequantized(torch.float32)
    assert torch.equal(found, expected.flatten(1))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("packing", ["gptq", "gptq_v2"])
@shapes
@few
def test_gptq(bits: int, packing: str, outputs: int, groups: int, group: int) -> None:
    """v1 stores zero points less one, in whole words: where one is zero it borrows from the next."""
    outputs, size, inputs = 8 * outputs, group or 16 * groups, (group or 16) * groups
    count = inputs // size
    values, zeros, scales = numbers(outputs, inputs, bits), numbers(outputs, count, bits), scales_of(outputs, count)
    qzeros = words(transposed(zeros), bits)
    if packing == "gptq":
        ones = sum(1 << at for at in range(0, 32, bits))
        qzeros = qzeros - ones
    form = WeightFormat(kind="grouped", packing=packing, bits=bits, group=group, symmetric=False)  # type: ignore[arg-type]
    groups_of = torch.tensor(runs(inputs, size), dtype=torch.int32)
    qweight = words(values, bits).T.contiguous()
    found = read(form, values=qweight, zeros=qzeros, scales=scales.T, groups=groups_of).dequantized(torch.float32)
    assert torch.equal(found, grouped(values, scales, zeros, runs(inputs, size)))


def test_symmetric_gptq_has_no_zero_points_but_the_middle() -> None:
    form = WeightFormat(kind="grouped", packing="gptq", bits=4, group=8)
    raw: dict[Role, Tensor] = {
        "values": words(numbers(8, 8, 4), 4).T.contiguous(),
        "scales": scales_of(1, 8),
        "zeros": words([[7] * 8], 4),
    }
    assert read_matrix(form, raw, "w").zeros is None  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"^w: its zero points are not those of symmetric weights, which the config"):
        read_matrix(form, {**raw, "zeros": words([[7] * 7 + [6]], 4)}, "w")


# --------------------------------------------------------------------------- floats of 4 bits


def float4(blocks: Tensor, scales: Tensor) -> list[float]:
    """Two numbers a byte, the lower nibble first, times a scale of them all."""
    found = []
    for byte in blocks.flatten().tolist():
        found += [E2M1[byte & 15] * scales.item(), E2M1[byte >> 4] * scales.item()]
    return found


def test_mxfp4_of_gpt_oss() -> None:
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8)
    form = WeightFormat(kind="float4", packing="blocks", bits=4, group=32)
    found = read(form, values=blocks, scales=scales).dequantized(torch.float32)
    for place in ((0, 0, 0), (1, 5, 2), (0, 3, 1)):
        expert, output, group = place
        expected = float4(blocks[place], 2.0 ** (scales[place].float() - 127))
        assert found[expert, output, 32 * group : 32 * group + 32].tolist() == expected
    oracle = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(read(form, values=blocks, scales=scales).dequantized(torch.bfloat16), oracle.transpose(1, 2))


@pytest.mark.parametrize("packing", ["nvfp4", "packed"])
def test_nvfp4_multiplies_or_divides_by_a_factor(packing: str) -> None:
    values = torch.randint(0, 256, (4, 16), dtype=torch.uint8)
    scales = (torch.rand(4, 2) * 100).to(torch.float8_e4m3fn)
    factor = torch.tensor(0.25 if packing == "nvfp4" else 4.0)
    form = WeightFormat(kind="float4", packing=packing, bits=4, group=16)  # type: ignore[arg-type]
    found = read(form, values=values, scales=scales, factor=factor).dequantized(torch.float32)
    for output in range(4):
        for group in range(2):
            expected = float4(values[output, 8 * group : 8 * group + 8], scales[output, group].float() * 0.25)
            assert found[output, 16 * group : 16 * group + 16].tolist() == expected


@pytest.mark.parametrize("name", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_packed_floats_are_compressed_tensors(name: str) -> None:
    group, outputs, inputs = (16, 8, 64) if name.startswith("nv") else (32, 8, 64)
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group,
               "strategy": "tensor_group" if group == 16 else "group",
               "scale_dtype": torch.float8_e4m3fn if group == 16 else torch.uint8}  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state = {"weight": torch.randn(outputs, inputs), "weight_scale": 2.0 ** torch.randint(-3, 3, (outputs, 4)).float()}
    if group == 16:
        state["weight_global_scale"] = torch.tensor([8.0])
    else:
        state["weight_scale"] = state["weight_scale"][:, :2].contiguous()
    compressor = BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress(state, scheme)
    form = WeightFormat(kind="float4", packing="packed", bits=4, group=group)
    parts = {part.role: stored[part.suffix[1:]] for part in form.stored() if not part.optional}
    for part in form.stored():
        assert part.optional or fits(part, stored, outputs, inputs)
    found = read_matrix(form, parts, "w").dequantized(torch.float32)
    expected = compressor.decompress(stored, scheme)["weight"].float()
    assert torch.equal(found, expected)


# --------------------------------------------------------------------------- numbers that are none


FLOAT8, FLOAT4 = WeightFormat(kind="float8"), WeightFormat(kind="float4", packing="blocks", bits=4, group=32)
ORDERED = WeightFormat(kind="grouped", packing="gptq", bits=4, group=8, ordered=True)


@pytest.mark.parametrize(("role", "stored", "why"), [
    ("scales", torch.tensor([1.0, float("nan")]), "has scales that are not finite; download it again"),
    ("scales", torch.tensor([1.0, -math.inf, math.inf]), "has scales that are not finite; download it again"),
    ("scales", torch.tensor([[100, 255]], dtype=torch.uint8), "has scales that are not finite; download it again"),
    ("scales", torch.tensor([255, 0], dtype=torch.uint8).view(torch.float8_e8m0fnu),
     "has scales that are not finite; download it again"),
    ("scales", torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn),
     "has scales that are not finite; download it again"),
    ("scales", torch.zeros(2, 3, dtype=torch.float16), "has no scale but zero; download it again"),
    ("factor", torch.tensor([0.5, 0.0]), "has no scale but zero; download it again"),  # of one of two experts
    ("input_scale", torch.tensor(0.0), "has no scale but zero; download it again"),
    ("groups", torch.tensor([0, 2]), "names groups 0 to 2, and the matrix has 2, the first is 0"),
])  # fmt: skip
def test_scales_and_groups_that_no_matrix_has_are_refused_by_tensor(role: Role, stored: Tensor, why: str) -> None:
    form = ORDERED if role == "groups" else FLOAT8
    with pytest.raises(ModelError, match=f"^tensor w {why}$"):
        check_numbers(form, role, stored, 16, "w")


@pytest.mark.parametrize(("form", "role", "stored"), [
    (FLOAT8, "scales", torch.tensor([0.0, 1e-9])),  # an output of zeros
    (FLOAT8, "scales", torch.tensor([-0.5, 0.5])),
    (FLOAT4, "scales", torch.tensor([0, 254], dtype=torch.uint8)),
    (FLOAT4, "scales", torch.zeros(4, dtype=torch.uint8)),  # powers of two: none is zero
    (ORDERED, "groups", torch.tensor([1, 0])),
    (FLOAT8, "values", torch.zeros(4)),
])  # fmt: skip
def test_numbers_that_a_matrix_may_have(form: WeightFormat, role: Role, stored: Tensor) -> None:
    check_numbers(form, role, stored, 16, "w")


# --------------------------------------------------------------------------- shares


FORMS = (
    WeightFormat(kind="float8", block=(16, 16), activations="block"),
    WeightFormat(kind="float8"),
    WeightFormat(kind="int8", per_tensor=True),
    WeightFormat(kind="grouped", packing="packed", bits=4, group=16, symmetric=False),
    WeightFormat(kind="grouped", packing="packed", bits=8, group=0),
    WeightFormat(kind="grouped", packing="awq", bits=4, group=16, symmetric=False),
    WeightFormat(kind="grouped", packing="gptq", bits=8, group=16, symmetric=False),
    WeightFormat(kind="float4", packing="nvfp4", bits=4, group=16),
    WeightFormat(kind="float4", packing="packed", bits=4, group=32),
)


def stored(form: WeightFormat, outputs: int, inputs: int) -> dict[Role, Tensor]:
    """Random tensors as the format's parts describe them."""
    found: dict[Role, Tensor] = {}
    for part in form.stored():
        shape = part.shape(outputs, inputs)
        match part.dtypes[0]:
            case "I32":
                found[part.role] = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)
            case "U8":
                found[part.role] = torch.randint(100, 140, shape, dtype=torch.uint8)
            case "I8":
                found[part.role] = torch.randint(-127, 128, shape, dtype=torch.int8)
            case "F8_E4M3":
                found[part.role] = torch.randn(shape).to(torch.float8_e4m3fn)
            case _:
                found[part.role] = (
                    scales_of(1, math.prod(shape))
                    .view(shape)
                    .to(torch.float16 if form.kind == "grouped" else torch.float32)
                )
    found.pop("groups", None)
    return found


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.packing}-{form.label}")
@pytest.mark.parametrize("counts", ["outputs", "inputs"])
def test_a_slice_of_the_stored_tensors_is_a_slice_of_the_matrix(form: WeightFormat, counts: str) -> None:
    """A rank's share, cut as the parts' axes say, and memory as it is reckoned."""
    raw, half, per = stored(form, 64, 64), {}, form.multiple(counts)  # type: ignore[arg-type]
    assert 32 % per == 0
    for part in form.stored():
        if part.role not in raw:
            continue
        axis = part.axis(counts)  # type: ignore[arg-type]
        tensor = raw[part.role]
        half[part.role] = (
            tensor if axis is None else tensor.narrow(axis, tensor.shape[axis] // 2, tensor.shape[axis] // 2)
        )
    whole, part_of = read_matrix(form, raw, "w"), read_matrix(form, half, "w")
    expected = whole.dequantized(torch.float32)
    expected = expected[32:] if counts == "outputs" else expected[:, 32:]
    assert torch.equal(part_of.dequantized(torch.float32), expected)
    held = sum(value.nbytes for value in vars(whole).values() if isinstance(value, Tensor))
    assert held == form.held_bytes(64, 64)
