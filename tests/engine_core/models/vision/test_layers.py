"""Layers of vision encoders against plain torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.loading.dummy import fill_random
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.layers import Destinations
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.vision.layers import (
    FeedForward,
    ImageAttention,
    PatchEmbedding,
    Segments,
    VisionBlock,
    axial_rotation,
    cells,
    one_segment,
    pixel_table,
)
from penstock.engine_core.models.vision_kinds import BlockNames, block
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.kernels.rope import apply_rope

CPU = torch.device("cpu")
FP32 = Placement(torch.float32, CPU)
PROCESSOR = ProcessorSpec(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
APART = BlockNames("ln1", ("q", "k", "v"), "out", "ln2", ("gate", "up"), "down")


def spec(**fields: object) -> VisionSpec:
    common = {"kind": "qwen", "token_id": 5, "processor": PROCESSOR, "patch": 2, "layers": 1, "hidden": 24, "heads": 2,
              "width": 20, "outputs": 12}  # fmt: skip
    return VisionSpec(**{**common, **fields})  # type: ignore[arg-type]


def filled(places: Destinations) -> dict[str, Tensor]:
    """Random weights by their names, biases among them."""
    found = dict(places)
    fill_random(found, seed=5)
    tensors = {name: place.tensor for name, place in found.items() if place.tensor is not None}
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.normal_(generator=torch.Generator().manual_seed(len(name)))
    return tensors


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def test_values_are_rescaled_in_doubles_and_normalised_in_singles() -> None:
    """As numpy does it in transformers, to the last bit."""
    values = (np.arange(256, dtype=np.uint8).astype(np.float64) * PROCESSOR.rescale).astype(np.float32)
    mean, std = (np.array(part, dtype=np.float32)[:, None] for part in (PROCESSOR.mean, PROCESSOR.std))
    assert np.array_equal(pixel_table(PROCESSOR).numpy(), (values - mean) / std)


def test_patches_of_a_cell_are_together() -> None:
    grid = torch.arange(4 * 6).view(4, 6)
    assert cells(grid, 1).tolist() == list(range(24))
    assert cells(grid, 2).tolist()[:8] == [0, 1, 6, 7, 2, 3, 8, 9]
    assert cells(grid[..., None].expand(4, 6, 3), 2).shape == (24, 3)


@pytest.mark.parametrize("frames", [0, 1, 2])
def test_patches_are_embedded_by_a_convolution(frames: int) -> None:
    layer = PatchEmbedding("conv", spec(frames=frames, merge=2), FP32, bias=True)
    tensors = filled(layer.destinations())
    weight = tensors["conv.weight"]
    assert weight.shape == (24, 3, *[frames][: bool(frames)], 2, 2)
    pixels = torch.randint(0, 256, (8, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    image = torch.stack([pixel_table(PROCESSOR)[color][pixels[..., color].long()] for color in range(3)])
    flat = weight if not frames else weight.sum(2)
    expected = functional.conv2d(image[None], flat, tensors["conv.bias"], stride=2)[0].permute(1, 2, 0)
    torch.testing.assert_close(layer.forward(pixels), cells(expected, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("qkv", [("qkv",), ("q", "k", "v")])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_patches_attend_within_their_segment(qkv: tuple[str, ...], turned: bool, bias: bool) -> None:
    layer, x = ImageAttention(spec(), FP32, qkv, "out", bias=bias), rows(9, 24)
    tensors = filled(layer.destinations())
    assert ("out.bias" in tensors) is bias
    lines, columns = torch.arange(9) // 3, torch.arange(9) % 3
    rotation = axial_rotation(lines, columns, 12, 100.0) if turned else None
    weights = torch.cat([tensors[f"{name}.weight"] for name in qkv])
    added = torch.cat([tensors[f"{name}.bias"] for name in qkv]) if bias else None
    q, k, v = functional.linear(x, weights, added).view(9, 3, 2, 12).unbind(1)
    if rotation is not None:
        q, k = apply_rope(q, rotation), apply_rope(k, rotation)
    for ends in ([0, 9], [0, 4, 5, 9]):
        found = layer.forward(x, rotation, Segments(torch.tensor(ends, dtype=torch.int32), 9))
        for first, end in itertools.pairwise(ends):
            parts = (part[first:end].transpose(0, 1) for part in (q, k, v))
            alone = functional.scaled_dot_product_attention(*parts).transpose(0, 1).flatten(1)
            expected = functional.linear(alone, tensors["out.weight"], tensors.get("out.bias"))
            torch.testing.assert_close(found[first:end], expected, atol=1e-5, rtol=1e-5)


def test_half_of_the_pairs_turn_by_the_line() -> None:
    rotation = axial_rotation(torch.tensor([3]), torch.tensor([5]), 8, 16.0)
    angles = torch.tensor([3.0, 3.0 / 4, 5.0, 5.0 / 4])
    torch.testing.assert_close(rotation.cos[0, 0], angles.cos().repeat(2))
    torch.testing.assert_close(rotation.sin[0, 0], torch.cat((-angles.sin(), angles.sin())))


@pytest.mark.parametrize(
    ("up", "activation"), [(("up",), "gelu"), (("gate", "up"), "silu"), (("gate", "up"), "gelu_tanh")]
)
def test_the_gate_comes_first(up: tuple[str, ...], activation: str) -> None:
    layer, x = FeedForward((24, 20, 16), up, "down", FP32, activation=activation, bias=True), rows(5, 24)
    tensors = filled(layer.destinations())
    products = [functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in up]
    act = functional.silu(products[0]) if activation == "silu" else functional.gelu(
        products[0], approximate="tanh" if activation == "gelu_tanh" else "none"
    )  # fmt: skip
    inner = act * products[1] if len(up) > 1 else act
    expected = functional.linear(inner, tensors["down.weight"], tensors["down.bias"])
    torch.testing.assert_close(layer.forward(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [NormSpec(eps=1e-6), NormSpec(eps=1e-6, centered=True)])
def test_a_block_has_the_tensors_that_its_names_say(norm: NormSpec, bias: bool) -> None:
    own = spec(norm=norm, bias=bias, gated=True)
    layer = VisionBlock(own, APART, FP32)
    shapes = {name: tuple(tensor.shape) for name, tensor in filled(layer.destinations()).items()}
    assert shapes == {name.removeprefix("layers.0."): shape for name, shape in block("layers.0.", own, APART)}
    assert layer.forward(rows(6, 24), None, one_segment(6, CPU)).shape == (6, 24)
