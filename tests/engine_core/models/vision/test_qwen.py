"""The vision encoders of Qwen against transformers', on images of odd shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.quantization.writing import write_checkpoint
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights, unread_tensors
from penstock.engine_core.models.vision.tower import tower
from penstock.engine_core.models.vision_cost import tower_weight_bytes
from penstock.engine_core.models.vision_kinds import vision_shapes
from penstock.engine_core.models.weight_files import read_names
from penstock.protocol.errors import ModelError
from tests.engine_core.models.vision.vision_folders import TEXT, random_image, read_tower, write

MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
PARTIAL = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "partial_rotary_factor": 0.5}
VISION: dict[str, Any] = {"depth": 3, "hidden_size": 48, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32}
LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALTERNATE = {**MROPE, "mrope_interleaved": True}
TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
PLAIN = {**VISION, "patch_size": 4, "num_position_embeddings": 25}
CASES: dict[str, PreTrainedConfig] = {
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE}, **TOKENS,
        vision_config={**VISION, "patch_size": 4, "window_size": 24, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": ALTERNATE}, **TOKENS,
        vision_config={**PLAIN, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        text_config={**TEXT, **EXPERTS, "rope_parameters": ALTERNATE}, **TOKENS,
        vision_config={**PLAIN, "deepstack_visual_indexes": [1]},
    ),
    "qwen3_5": Qwen3_5Config(
        text_config={**TEXT, **LINEAR, "rope_parameters": PARTIAL}, **TOKENS, vision_config=PLAIN,
    ),
    "qwen3_5_moe": Qwen3_5MoeConfig(
        text_config={**TEXT, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16, "rope_parameters": PARTIAL},
        **TOKENS, vision_config=PLAIN,
    ),
}  # fmt: skip
# Cells of 8 pixels: one, a line, a column, no whole number of windows of 3 cells, and a whole one, and more positions
# than are learned.
SIZES = [Size(8, 8), Size(8, 72), Size(64, 8), Size(40, 56), Size(48, 24), Size(88, 104)]
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1 << 20}, "image_mean": [0.48, 0.45, 0.40],
    "image_std": [0.27, 0.26, 0.28],
}  # fmt: skip


def patches_of(pixels: Tensor) -> Any:
    """What the image processor of transformers makes of an image that needs no resizing."""
    processor = Qwen2VLImageProcessorPil(**{key: PROCESSOR[key] for key in PROCESSOR if key != "image_processor_type"})
    return processor(pixels.permute(2, 0, 1).numpy(), return_tensors="pt", input_data_format="channels_first")


def expected(model: Any, pixels: Tensor) -> Tensor:
    """Rows of transformers: embeddings, then what each DeepStack level adds."""
    found = patches_of(pixels)
    made = model.model.visual(found["pixel_values"], grid_thw=found["image_grid_thw"])
    levels = getattr(made, "deepstack_features", None) or []
    return torch.cat((made.pooler_output, *levels), dim=1)


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_rows(case: str, tmp_path: Path) -> None:
    """Also encoded slice by slice, with a slice for each layer at least."""
    reference = write(tmp_path, CASES[case], PROCESSOR)
    encoder = read_tower(tmp_path)
    for size in SIZES:
        pixels = random_image(*size)
        *waits, rows = encoder.slices(pixels)
        assert rows is not None
        assert rows.shape == (encoder.spec.rows(size), encoder.spec.row_width)
        torch.testing.assert_close(rows, expected(reference, pixels), atol=1e-5, rtol=1e-5)
        assert torch.equal(rows, encoder.encode(pixels))
        assert waits == [None] * (1 + VISION["depth"])


@torch.inference_mode()
@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_in_bfloat16(case: str, tmp_path: Path) -> None:
    """As close to those of fp32 as transformers' are."""
    reference = write(tmp_path, CASES[case], PROCESSOR)
    pixels = random_image(40, 56)
    exact = expected(reference, pixels)
    rows = read_tower(tmp_path, torch.bfloat16).encode(pixels)
    assert rows.dtype == torch.bfloat16
    theirs = expected(reference.to(torch.bfloat16), pixels)
    ours, allowed = ((found.float() - exact).square().mean().sqrt() for found in (rows, theirs))
    assert ours < 1.1 * allowed


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl"])
def test_both_spellings_of_names_are_read(case: str, tmp_path: Path) -> None:
    """The encoder is a part of the model, or stands beside it, as Qwen2.5-VL was published and is still written."""
    write(tmp_path, CASES[case], PROCESSOR)
    before = {name: place.tensor for name, place in read_tower(tmp_path).destinations().items()}
    tensors = load_file(tmp_path / "model.safetensors")
    inside = {name for name in tensors if name.startswith("model.visual.")}
    beside = {name for name in tensors if name.startswith("visual.")}
    assert bool(inside) is (case == "qwen3_vl") is not bool(beside)
    other = {turned(name, inside=bool(beside)): tensor for name, tensor in tensors.items()}
    save_file(other, tmp_path / "model.safetensors")
    after = {name: place.tensor for name, place in read_tower(tmp_path).destinations().items()}
    assert set(after) == set(before) == {name.removeprefix("model.") for name in inside | beside}
    assert all(torch.equal(after[name], before[name]) for name in after)  # type: ignore[arg-type]


def turned(name: str, *, inside: bool) -> str:
    """A tensor's name in the other spelling: everything inside a model, or the encoder beside the text half."""
    if inside:
        name = name.replace("model.", "model.language_model.") if name.startswith("model.") else name
        return f"model.{name}" if name.startswith("visual.") else name
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def test_shapes_are_those_of_the_encoder_in_memory(tmp_path: Path) -> None:
    for case, config in CASES.items():
        folder = tmp_path / case
        write(folder, config, PROCESSOR)
        found = read_tower(folder)
        assert vision_shapes(found.spec) == {name: place.shape for name, place in found.destinations().items()}
        assert found.weight_bytes == tower_weight_bytes(found.spec, 4)
        assert unread_tensors(read_spec(folder), read_names(folder)) == {}


def test_every_rank_has_the_whole_encoder(tmp_path: Path) -> None:
    write(tmp_path, CASES["qwen3_vl"], PROCESSOR)
    spec = read_spec(tmp_path).vision
    assert spec is not None
    shared = Placement(torch.float32, torch.device("cpu"), Group(rank=1, size=2))
    assert tower(spec, shared).weight_bytes == tower_weight_bytes(spec, 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop("model.visual.merger.norm.bias"), "merger.norm.bias is missing"),
        (lambda tensors: tensors.update({"model.visual.more": torch.ones(1)}), "visual.more is not part of the model"),
        (
            lambda tensors: tensors.update({"model.visual.patch_embed.proj.weight": torch.ones(48, 96)}),
            r"patch_embed.proj.weight has shape \[48, 96\]; config.json asks for \[48, 3, 2, 4, 4\]",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(change: Callable[..., Any], why: str, tmp_path: Path) -> None:
    write(tmp_path, CASES["qwen3_vl"], PROCESSOR)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    with pytest.raises(ModelError, match=why):
        check_weights(tmp_path, spec)
    check_weights(tmp_path, spec.without_vision())


@torch.inference_mode()
def test_the_text_half_may_be_quantized(tmp_path: Path) -> None:
    """The encoder is not, and a list says so, or the files alone."""
    plain, out = tmp_path / "plain", tmp_path / "quantized"
    plain.mkdir()
    out.mkdir()
    write(plain, CASES["qwen3_vl"], PROCESSOR)
    rows = read_tower(plain).encode(random_image(16, 24))
    write_checkpoint(plain, read_spec(plain, "int4"), out, torch.device("cpu"), lambda path: None)
    assert torch.equal(read_tower(out).encode(random_image(16, 24)), rows)
    config = json.loads((out / "config.json").read_text())
    assert any("visual" in name for name in config["quantization_config"]["ignore"])
    config["quantization_config"]["ignore"] = ["lm_head"]
    (out / "config.json").write_text(json.dumps(config))
    assert torch.equal(read_tower(out).encode(random_image(16, 24)), rows)


def test_a_quantized_encoder_is_refused_by_name(tmp_path: Path) -> None:
    """And its text half is served alone."""
    write(tmp_path, CASES["qwen3_vl"], PROCESSOR)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.visual.blocks.1.attn.qkv.weight_packed"] = torch.zeros(4, 4, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    group = {"targets": ["re:.*visual.*"], "input_activations": None, "weights": weights}
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                     "config_groups": {"group_0": group}, "ignore": []}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    why = r"visual\.blocks\.1\.attn\.qkv is quantized as its config.json says.*--limit-mm-per-prompt image=0"
    with pytest.raises(ModelError, match=why):
        check_weights(tmp_path, spec)
    check_weights(tmp_path, spec.without_vision())


@torch.inference_mode()
def test_patches_are_those_of_the_image_processor(tmp_path: Path) -> None:
    write(tmp_path, CASES["qwen3_vl"], PROCESSOR)
    embedding = read_tower(tmp_path).embedding  # type: ignore[attr-defined]
    values = torch.arange(256, dtype=torch.uint8)
    every = torch.stack([values.roll(7 * color) for color in range(3)], dim=1).view(16, 16, 3)
    for pixels in (every, random_image(40, 56)):
        assert torch.equal(embedding.patches(pixels), patches_of(pixels)["pixel_values"])
