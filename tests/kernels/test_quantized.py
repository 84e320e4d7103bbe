"""Layouts of quantized weights, and the arithmetic to which every kernel is held."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.quantized import (
    FLOAT8,
    Float4Weight,
    Float8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    alike,
    as_low,
    can_stack,
    held_bytes,
    multiply_reference,
    packed_pairs,
    pad_outputs,
    quantize_rows,
    stack_experts,
    stack_outputs,
    take_outputs,
    unpacked,
)


def codes(outputs: int, inputs: int, bits: int = 4) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)


@given(st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_pairs_are_packed_with_the_first_in_the_lower_bits(outputs: int, pairs: int) -> None:
    found = codes(outputs, 2 * pairs)
    assert torch.equal(unpacked(packed_pairs(found)), found)
    assert packed_pairs(torch.tensor([[1, 2]], dtype=torch.uint8)).item() == 0x21


def test_a_group_is_its_numbers_less_the_zero_point_times_the_scale() -> None:
    numbers, scales, zeros = codes(3, 8), torch.rand(3, 2), codes(3, 2)
    found = GroupedWeight(4, 4, packed_pairs(numbers), scales, zeros).dequantized(torch.float32)
    for output in range(3):
        for at in range(8):
            expected = (int(numbers[output, at]) - int(zeros[output, at // 4])) * scales[output, at // 4]
            assert found[output, at] == expected


def test_without_zero_points_the_middle_is_zero() -> None:
    for bits, middle in ((4, 8), (8, 128)):
        numbers = torch.full((1, 8), middle, dtype=torch.uint8)
        held = packed_pairs(numbers) if bits == 4 else numbers
        assert not GroupedWeight(bits, 8, held, torch.ones(1, 1)).dequantized(torch.float32).any()


def test_mxfp4_is_a_table_of_sixteen_numbers_times_a_power_of_two() -> None:
    numbers = torch.arange(16, dtype=torch.uint8).repeat(1, 2)
    found = Float4Weight(packed_pairs(numbers), torch.tensor([[128]], dtype=torch.uint8), 32).dequantized(torch.float32)
    positive = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert found[0, :16].tolist() == [*positive, *(-value for value in positive)]


def test_nvfp4_has_a_scale_of_16_inputs_times_one_of_all() -> None:
    numbers = torch.full((2, 32), 2, dtype=torch.uint8)  # 1.0
    scales = torch.tensor([[1.5, 3.0], [0.5, 7.0]]).to(FLOAT8)
    found = Float4Weight(packed_pairs(numbers), scales, 16, torch.tensor([0.5, 2.0])).dequantized(torch.float32)
    assert found[:, ::16].tolist() == [[0.75, 1.5], [1.0, 14.0]]


def test_a_block_may_be_cut_at_the_end() -> None:
    values = torch.ones(3, 5).to(FLOAT8)
    found = Float8Weight(values, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (2, 4), "block").dequantized(torch.float32)
    assert found.tolist() == [[1.0] * 4 + [2.0]] * 2 + [[3.0] * 4 + [4.0]]


@pytest.mark.parametrize("kind", [FLOAT8, torch.int8])
@pytest.mark.parametrize("block", [0, 4])
def test_rows_are_rounded_by_the_largest_number_of_row_or_block(kind: torch.dtype, block: int) -> None:
    x = torch.tensor([[1.0, -2.0, 0.0, 0.5, 8.0], [0.0] * 5])
    values, scales = quantize_rows(x, kind, block)
    found = values.float() * (scales.repeat_interleave(4, 1)[:, :5] if block else scales)
    assert found[0, 4] == pytest.approx(8.0)
    assert (found - x).abs().max() <= 8.0 / 16
    assert not found[1].any()
    if block:
        assert found[0, 1] == pytest.approx(-2.0)


def test_a_given_scale_clips_what_is_beyond_it() -> None:
    values, _ = quantize_rows(torch.tensor([[1000.0, -1.0]]), torch.int8, scale=torch.tensor([1.0]))
    assert values.tolist() == [[127, -1]]


def test_products_round_rows_as_the_weight_says() -> None:
    torch.manual_seed(1)
    x, exact = torch.randn(4, 64), torch.randn(8, 64)
    scales = exact.abs().amax(1)
    eights = Int8Weight((exact / scales[:, None] * 127).round().to(torch.int8), scales / 127)
    floats = Float8Weight((exact / scales[:, None] * 448).to(FLOAT8), scales / 448)
    weights_only = Float8Weight(floats.values, floats.scales, activations="none")
    values, x_scales = quantize_rows(x, torch.int8)
    expected = (values.int() @ eights.values.int().T).double() * x_scales.double() * eights.scales.double()
    assert torch.allclose(multiply_reference(x, eights).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(multiply_reference(x, weights_only), x @ floats.dequantized(torch.float32).T)
    assert not torch.equal(multiply_reference(x, floats), multiply_reference(x, weights_only))


def test_an_order_says_which_input_of_x_belongs_to_each_of_the_weight() -> None:
    x, order = torch.randn(2, 8), torch.randperm(8).int()
    weight = GroupedWeight(4, 4, packed_pairs(codes(3, 8)), torch.rand(3, 2), order=order)
    dense = torch.empty(3, 8)
    dense[:, order.long()] = weight.dequantized(torch.float32)
    assert torch.allclose(multiply_reference(x, weight), x @ dense.T, atol=1e-5)


def layouts(outputs: int = 32, inputs: int = 64) -> dict[str, QuantizedWeight]:
    """A random weight of each layout."""
    values, rows = torch.randn(outputs, inputs).to(FLOAT8), torch.rand(outputs) + 0.5
    groups, tiles = torch.rand(outputs, inputs // 16) + 0.5, torch.rand(outputs // 16, inputs // 16) + 0.5
    return {
        "float8": Float8Weight(values, rows),
        "blocks": Float8Weight(values, tiles, (16, 16), "block"),
        "int8": Int8Weight(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), rows),
        "groups": GroupedWeight(4, 16, codes(outputs, inputs // 2, 8), groups, codes(outputs, inputs // 16)),
        "nvfp4": Float4Weight(codes(outputs, inputs // 2, 8), groups.to(FLOAT8), 16, rows),
    }


def numbers(weight: QuantizedWeight) -> torch.Tensor:
    return weight.dequantized(torch.float32)


@pytest.mark.parametrize("name", layouts())
def test_weights_of_a_layout_are_stacked_by_outputs_and_experts(name: str) -> None:
    first, second = layouts()[name], layouts()[name]
    assert can_stack(first, second)
    assert torch.equal(numbers(stack_outputs([first, second])), torch.cat((numbers(first), numbers(second))))
    assert torch.equal(numbers(stack_experts([first, second])), torch.stack((numbers(first), numbers(second))))
    for other in set(layouts()) - {name}:
        assert not can_stack(first, layouts()[other])


def test_what_products_treat_differently_is_not_stacked() -> None:
    first = layouts()["float8"]
    assert isinstance(first, Float8Weight)
    given = [replace(first, activations="static", input_scale=torch.tensor([scale])) for scale in (0.5, 0.5, 0.25)]
    assert can_stack(given[0], given[1])
    assert not can_stack(given[0], given[2])
    assert not can_stack(first, replace(first, activations="none"))
    mine, other = alike(given[0], given[2])
    assert can_stack(mine, other)
    assert mine.input_scale.tolist() == [0.5]  # type: ignore[union-attr]
    assert stack_experts(given).input_scale.tolist() == [0.5]  # type: ignore[union-attr]
    grouped = layouts()["groups"]
    assert isinstance(grouped, GroupedWeight)
    turned = replace(grouped, order=torch.arange(63, -1, -1))
    assert not can_stack(grouped, turned)
    assert not can_stack(turned, replace(turned, order=torch.arange(64)))


def test_blocks_are_stacked_where_they_end_with_the_first() -> None:
    first, second = layouts(outputs=48)["blocks"], layouts()["blocks"]
    assert can_stack(first, second)
    cut = take_outputs(first, torch.arange(40))
    assert isinstance(cut, Float8Weight)
    assert cut.block == (8, 16), "so many rows are no whole blocks"
    assert torch.equal(numbers(cut), numbers(first)[:40])
    turned = take_outputs(first, torch.arange(48).view(3, 16).flip(0).flatten())
    assert isinstance(turned, Float8Weight)
    assert turned.block == (16, 16), "whole blocks in another order"
    assert torch.equal(numbers(turned), numbers(first).view(3, 16, -1).flip(0).flatten(0, 1))
    mixed = take_outputs(first, torch.tensor([*range(4), *range(8, 16), *range(4, 8), *range(16, 48)]))
    assert isinstance(mixed, Float8Weight)
    assert mixed.block == (16, 16)
    crossed = take_outputs(first, torch.tensor([*range(4), *range(8, 20), *range(4, 8), *range(20, 48)]))
    assert isinstance(crossed, Float8Weight)
    assert crossed.block == (4, 16)
    assert torch.equal(numbers(crossed)[4:16], numbers(first)[8:20])
    assert can_stack(crossed, as_low(second, crossed))
    assert torch.equal(numbers(as_low(second, crossed)), numbers(second))
    assert as_low(crossed, second) is crossed, "a block of 4 has none of 16"
    ragged = replace(first, values=first.values[:40])  # type: ignore[type-var]
    assert not can_stack(ragged, second)
    joined = stack_outputs(alike(ragged, second))
    assert torch.equal(numbers(joined), torch.cat((numbers(ragged), numbers(second))))


@pytest.mark.parametrize("name", layouts())
def test_outputs_are_taken_in_an_order_and_padded(name: str) -> None:
    weight = layouts()[name]
    within = torch.arange(32).view(-1, 16).flip(1).flatten()  # in their blocks
    for rows in (torch.randperm(32), within):
        assert torch.equal(numbers(take_outputs(weight, rows)), numbers(weight)[rows])
    kept = take_outputs(weight, within)
    assert getattr(kept, "block", None) == getattr(weight, "block", None)
    padded = pad_outputs(weight, 40)
    assert padded.shape == (40, 64)
    assert torch.equal(numbers(padded)[:32], numbers(weight))
    assert not numbers(padded)[32:].any()
    assert held_bytes(padded) > held_bytes(weight)
