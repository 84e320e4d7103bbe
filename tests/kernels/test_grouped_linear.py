"""Weights in groups as kernels read them: which groups fit, and what stands where."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from penstock.kernels import experts, linear
from penstock.kernels.chip import CHIPS
from penstock.kernels.grouped_linear import (
    GROUPED,
    PlaneForm,
    form_named,
    form_of,
    planes_of,
    scales_exactly,
    timed_weight,
)
from penstock.kernels.grouped_tilings import GroupedTiling
from penstock.kernels.linear_tilings import Product, candidates, ruled
from penstock.kernels.quantized import GroupedWeight, multiply_reference
from tests.kernels.grouped_weights import KINDS, grouped


@pytest.mark.parametrize("kind", KINDS)
def test_forms_have_names_that_plans_know(kind: str) -> None:
    form = form_of(grouped(kind, 4, 384))
    assert form is not None
    assert form.name in GROUPED
    assert form_named(form.name) == form


@pytest.mark.parametrize("kind", KINDS)
def test_no_word_of_a_kernel_is_a_type_of_triton(kind: str) -> None:
    """It would become the type where a kernel comes from another process: scales of bf16 were read as exponents."""
    form = form_of(grouped(kind, 4, 384))
    assert form is not None
    words = [value for value in form.constants.values() if isinstance(value, str)]
    assert len(words) == 2
    assert not any(map(tl.dtype.is_dtype, words))


@pytest.mark.parametrize("group", [3, 24, 80])
def test_groups_that_fit_no_block_stay_as_they_are(group: int) -> None:
    values = torch.zeros(2, group, dtype=torch.uint8)
    assert planes_of(GroupedWeight(4, group, values, torch.ones(2, 2))) is None


@pytest.mark.parametrize("ordered", [False, True])
def test_such_weights_are_dense_on_a_gpu(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule for products and for experts: no kernel reads them as they are."""
    monkeypatch.setattr(linear, "chip_of", lambda _: CHIPS["sm_90"])
    monkeypatch.setattr(experts, "chip_of", lambda _: CHIPS["sm_90"])
    values = torch.randint(0, 256, (3, 6, 24), dtype=torch.uint8)
    stacked = GroupedWeight(4, 24, values, torch.rand(3, 6, 2))
    order = torch.randperm(48).int() if ordered else None
    one = GroupedWeight(4, 24, values[0], stacked.scales[0], order=order)
    found, dense = linear.prepared(one, torch.float32), experts.prepared(stacked, torch.float32)
    assert isinstance(found, torch.Tensor)
    assert isinstance(dense, torch.Tensor)
    assert torch.equal(dense, stacked.dequantized(torch.float32))
    x = torch.randn(2, 48)
    torch.testing.assert_close(x @ found.T, multiply_reference(x, one, None))


@pytest.mark.parametrize("group", [192, 512])
def test_groups_longer_than_a_block_repeat_their_scale(group: int) -> None:
    weight = GroupedWeight(4, group, torch.zeros(1, group, dtype=torch.uint8), torch.tensor([[1.0, 2.0]]))
    found = planes_of(weight)
    assert found is not None
    each = group // found.form.block
    assert found.scales.view(torch.float32).flatten().tolist() == [1.0] * each + [2.0] * each


def test_a_word_has_values_that_lie_a_run_apart() -> None:
    codes = torch.arange(256, dtype=torch.uint8) * 7 % 16
    values = codes[0::2] | codes[1::2] << 4
    found = planes_of(GroupedWeight(4, 128, values[None], torch.tensor([[1.0, 2.0]]).bfloat16()))
    assert found is not None
    assert found.form == PlaneForm("int4", 64, 2, "bf16")
    for at, word in enumerate(found.values[0].tolist()):
        assert [word >> 4 * plane & 15 for plane in range(4)] == codes[at::64].tolist()
    assert found.scales.tolist() == [[0x40003F80]]


def test_a_timed_weight_is_finite_and_has_the_memory_s_values() -> None:
    form = form_named("e2m1-32-e8m0")
    memory = torch.randn(3 * form.blocks(256) * form.run).half()
    found = timed_weight(form, 3, 256, memory)
    assert found.values.data_ptr() == memory.data_ptr()
    assert set(found.scales.flatten().tolist()) == {0x7F7F7F7F}


def test_values_are_scaled_in_a_type_that_has_their_scales() -> None:
    found = {name: [scales_exactly(name, dtype) for dtype in (torch.bfloat16, torch.float16)] for name in GROUPED}
    assert found["int4-128-bf16"] == [True, False]
    assert found["int4-128-fp16"] == [False, True]
    assert found["int4-128-fp32"] == [False, False]
    assert found["e2m1-16-e4m3"] == [True, True]
    assert found["e2m1-32-e8m0"] == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_way_scales_values_inexactly(dtype: torch.dtype) -> None:
    for chip in CHIPS.values():
        for gated, width, inputs in ((True, 14336, 4096), (False, 4096, 14336), (False, 6144, 4096)):
            product = Product(width, inputs, dtype, gated, weight="int4-128-bf16")
            ways = [way for rows in (1, 16, 64, 128, 512, 2048) for way in candidates(product, rows, chip)]
            ways += [*ruled(product, chip, invariant=False).ways, *ruled(product, chip, invariant=True).ways]
            scaled = {way for way in ways if isinstance(way, GroupedTiling) and way.scaled}
            assert bool(scaled) == (dtype is torch.bfloat16)
            steady = ruled(product, chip, invariant=True).ways
            assert all(isinstance(way, GroupedTiling) and not way.scaled for way in steady)
            assert all(isinstance(way, GroupedTiling) and way.shares * way.parts == 1 for way in steady)
