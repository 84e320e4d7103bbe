"""Tensors that a quantized matrix has in a checkpoint, by shape."""

from __future__ import annotations

from penstock.engine_core.models.quantization.weight_format import WeightFormat, trimmed

BLOCKS = WeightFormat(kind="float8", block=(128, 128), activations="block", scale="weight_scale_inv")
AWQ = WeightFormat(kind="grouped", packing="awq", bits=4, group=64, symmetric=False)


def shapes(form: WeightFormat, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {part.suffix: part.shape(outputs, inputs) for part in form.stored()}


def test_shapes_follow_from_outputs_and_inputs() -> None:
    assert shapes(BLOCKS, 300, 256) == {".weight": (300, 256), ".weight_scale_inv": (3, 2)}
    assert shapes(AWQ, 96, 128) == {".qweight": (128, 12), ".qzeros": (2, 12), ".scales": (2, 96)}


def test_a_share_is_whole_blocks_groups_and_words() -> None:
    assert (BLOCKS.multiple("outputs"), BLOCKS.multiple("inputs")) == (128, 128)
    assert (AWQ.multiple("outputs"), AWQ.multiple("inputs")) == (8, 64)


def test_a_stack_has_an_axis_for_experts_and_the_name_of_its_weight() -> None:
    parts = BLOCKS.stored(stacked=True)
    assert [part.suffix for part in parts] == ["", "_scale_inv"]
    assert [part.shape(256, 128, 4) for part in parts] == [(4, 256, 128), (4, 2, 1)]
    assert [part.axis("experts") for part in parts] == [0, 0]


def test_trailing_axes_of_one_element_make_no_difference() -> None:
    assert trimmed(()) == trimmed((1,)) == trimmed((1, 1)) == ()
    assert trimmed((64,)) == trimmed((64, 1)) != trimmed((1, 64))
