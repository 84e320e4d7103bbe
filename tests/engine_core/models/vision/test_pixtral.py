"""The vision encoder of Mistral 3 against transformers', and what is said of it in a published config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Mistral3Config, PixtralImageProcessorPil

from penstock.engine_core.images.processor_spec import LongestEdge, Size
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.vision_kinds import vision_shapes
from penstock.engine_core.models.vision_spec import ProjectionSpec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.vision.vision_folders import TEXT, random_image, read_tower, write

VISION: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 112, "hidden_act": "silu",
}  # fmt: skip
MISTRAL = {**TEXT, "model_type": "mistral", "rms_norm_eps": 1e-3, "sliding_window": None}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1e4,
    "max_position_embeddings": 512,
}  # fmt: skip
MINISTRAL = {**TEXT, "model_type": "ministral3", "rope_parameters": YARN}
CASES = {
    "mistral": Mistral3Config(text_config=MISTRAL, vision_config=VISION, image_token_index=5),
    "ministral3": Mistral3Config(
        text_config=MINISTRAL, vision_config={**VISION, "hidden_act": "gelu"}, image_token_index=5,
        multimodal_projector_bias=True, projector_hidden_act="silu",
    ),
    "cells of 12 pixels": Mistral3Config(
        text_config=MISTRAL, vision_config=VISION, image_token_index=5, spatial_merge_size=3
    ),
    "the last but one layer": Mistral3Config(
        text_config=MISTRAL, vision_config=VISION, image_token_index=5, vision_feature_layer=-2
    ),
    "the first layer": Mistral3Config(
        text_config=MISTRAL, vision_config=VISION, image_token_index=5, vision_feature_layer=[1]
    ),
}  # fmt: skip
SHAPES = [(1, 2), (1, 9), (8, 1), (5, 7), (7, 3)]  # lines and columns of cells
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "PixtralImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "patch_size": 14, "processor_class": "PixtralProcessor",
    "resample": 3, "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 1540},
}  # fmt: skip
MISTRAL_SMALL_3_2: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}


def expected(model: Any, pixels: Tensor, cell: int) -> Tensor:
    """Rows of transformers."""
    processor = PixtralImageProcessorPil(
        image_mean=PROCESSOR["image_mean"], image_std=PROCESSOR["image_std"], patch_size=cell,
        size={"longest_edge": 1540},
    )  # fmt: skip
    found = processor(pixels.permute(2, 0, 1).numpy(), return_tensors="pt", input_data_format="channels_first")
    made = model.model.get_image_features(found["pixel_values"], image_sizes=found["image_sizes"], return_dict=True)
    rows: Tensor = made.pooler_output[0]
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_rows(case: str, tmp_path: Path) -> None:
    """Also encoded slice by slice, with a slice for each layer that counts."""
    reference = write(tmp_path, CASES[case], PROCESSOR)
    encoder = read_tower(tmp_path)
    cell = encoder.spec.cell
    for lines, columns in SHAPES:
        pixels = random_image(lines * cell, columns * cell)
        *waits, rows = encoder.slices(pixels)
        assert rows is not None
        torch.testing.assert_close(rows, expected(reference, pixels, cell), atol=1e-5, rtol=1e-5)
        assert rows.shape == (lines * columns, TEXT["hidden_size"])
        assert torch.equal(rows, encoder.encode(pixels))
        assert waits == [None] * (1 + encoder.spec.taken)
    assert encoder.encode(random_image(cell, cell)).shape == (1, TEXT["hidden_size"])


@pytest.mark.parametrize(
    "name",
    ["vision_tower.ln_pre.weight", "vision_tower.transformer.layers.2.feed_forward.up_proj.weight",
     "multi_modal_projector.patch_merger.merging_layer.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, CASES["mistral"], PROCESSOR)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    assert name in held
    save_file({key: held[key] for key in held if key != name}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=name):
        read_tower(tmp_path)


@torch.inference_mode()
def test_names_within_the_model(tmp_path: Path) -> None:
    """As some versions of transformers have saved it."""
    reference = write(tmp_path, CASES["mistral"], PROCESSOR)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    save_file({f"model.{name}" if name.startswith(("vision", "multi")) else name: held[name] for name in held}, path)
    pixels = random_image(24, 40)
    torch.testing.assert_close(read_tower(tmp_path).encode(pixels), expected(reference, pixels, 8), atol=1e-5, rtol=0.0)


def test_a_published_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL_SMALL_3_2))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    spec = read_spec(tmp_path).vision
    assert spec is not None
    assert (spec.kind, spec.token_id, spec.mutual, spec.mrope) == ("pixtral", 10, False, False)
    assert (spec.layers, spec.taken, spec.hidden, spec.heads, spec.width) == (24, 24, 1024, 16, 4096)
    assert (spec.patch, spec.merge, spec.cell, spec.pooled, spec.outputs) == (14, 2, 28, 0, 5120)
    assert (spec.activation, spec.gated, spec.bias, spec.theta) == ("silu", True, False, 10000.0)
    assert spec.norm == NormSpec(eps=1e-5)
    assert spec.projection == ProjectionSpec(norm=NormSpec(eps=1e-5), activation="gelu", bias=False)
    assert spec.processor.resize == LongestEdge(height=1540, width=1540, factor=28)
    assert spec.rows(Size(1540, 56)) == 110
    shapes = vision_shapes(spec)
    assert shapes["multi_modal_projector.patch_merger.merging_layer.weight"] == (1024, 4096)
    assert shapes["multi_modal_projector.linear_2.weight"] == (5120, 5120)
    assert len(shapes) == 6 + 24 * 9


def changed(vision: dict[str, Any] | None = None, **outer: Any) -> dict[str, Any]:
    return {**MISTRAL_SMALL_3_2, "vision_config": {**MISTRAL_SMALL_3_2["vision_config"], **(vision or {})}, **outer}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (changed({"head_dim": 32}), "head_dim is 32; Penstock serves what the heads' share of hidden_size is, 64"),
        (changed({"num_attention_heads": 512}), "num_attention_heads is 512; heads are of 2 numbers"),
        (changed({"rope_parameters": {"rope_type": "yarn"}}), "rope_type is 'yarn'; Penstock serves axial"),
        (changed({"rope_parameters": 3}), "rope_parameters is 3; an object is expected"),
        (changed({"hidden_act": "relu"}), "hidden_act is 'relu'; Penstock serves"),
        (changed({"attention_bias": True}), "attention_bias is True; Penstock does not know"),
        (changed(vision_feature_layer=0), "vision_feature_layer is 0; a layer of 1 to 24"),
        (changed(vision_feature_layer=[-1, -2]), "a layer of 1 to 24 is expected, or from the end of -1 to -24"),
        (changed(projector_hidden_act="tanh"), "projector_hidden_act is 'tanh'; Penstock serves"),
        (changed(spatial_merge_size=0), "spatial_merge_size is 0; it must be an integer of 1"),
        (changed(multimodal_projector_bias=1), "multimodal_projector_bias is 1; it must be true or false"),
    ],
)
def test_what_is_not_served_is_refused(config: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    with pytest.raises(ModelError, match=complaint):
        read_spec(tmp_path)
