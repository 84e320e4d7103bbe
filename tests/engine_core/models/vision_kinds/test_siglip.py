"""Gemma 3's vision encoder as a config.json that was published describes it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.images.processor_spec import FixedSize, Size
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.engine_core.models.vision_kinds import vision_shapes
from penstock.engine_core.models.vision_spec import ProjectionSpec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.vision.test_siglip import CONFIG, INNER, PROCESSOR

GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def read(folder: Path, config: dict[str, Any], processor: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return read_spec(folder)


def test_a_published_config(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA_3_4B, {**PROCESSOR, "size": {"height": 896, "width": 896}}).vision
    assert spec is not None
    assert (spec.kind, spec.token_id, spec.mutual, spec.mrope) == ("siglip", 262144, True, False)
    assert (spec.layers, spec.hidden, spec.heads, spec.head_dim, spec.width) == (27, 1152, 16, 72, 4304)
    assert (spec.patch, spec.positions, spec.merge, spec.pooled, spec.outputs) == (14, 64, 4, 256, 2560)
    assert (spec.activation, spec.gated, spec.bias, spec.theta) == ("gelu_tanh", False, True, 0.0)
    assert spec.norm == NormSpec(eps=1e-6, centered=True)
    assert spec.projection == ProjectionSpec(norm=NormSpec(eps=1e-6, offset=1.0))
    assert spec.processor.resize == FixedSize(height=896, width=896)
    assert spec.rows(Size(896, 896)) == 256
    shapes = vision_shapes(spec)
    assert shapes[f"{INNER}embeddings.position_embedding.weight"] == (4096, 1152)
    assert shapes["multi_modal_projector.mm_input_projection_weight"] == (1152, 2560)
    assert len(shapes) == 7 + 27 * 16


def changed(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **outer: Any) -> dict[str, Any]:
    config = CONFIG.to_dict()
    config["architectures"] = ["Gemma3ForConditionalGeneration"]
    config["vision_config"].update(vision or {})
    config["text_config"].update(text or {})
    return {**config, **outer}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (changed({"image_size": 34}), "image_size is 34; patches of 4 pixels do not fill it"),
        (changed({"image_size": 64}), "image_size is 64; the image processor makes another of pictures"),
        (changed({"num_attention_heads": 5}), "num_attention_heads is 5; the hidden_size of 48"),
        (changed({"num_channels": 4}), "num_channels is 4; Penstock serves images of 3"),
        (changed({"hidden_act": "relu"}), "hidden_act is 'relu'; Penstock serves"),
        (changed({"rope_theta": 3.0}), "rope_theta is 3.0; Penstock does not know"),
        (changed(mm_tokens_per_image=9), "mm_tokens_per_image is 9; the square of a divisor of 8"),
        (changed(mm_tokens_per_image=8), "mm_tokens_per_image is 8; the square of a divisor of 8"),
        (changed(image_token_index=96), "image_token_id is 96, and the vocabulary has 96"),
        (changed(image_token_index="<image>"), "image_token_index is '<image>'; it must be an integer"),
    ],
)
def test_what_is_not_served_is_refused(config: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=complaint):
        read(tmp_path, config, PROCESSOR)


def test_another_name_of_the_placeholder(tmp_path: Path) -> None:
    config = changed(image_token_id=9)
    del config["image_token_index"]
    spec = read(tmp_path, config, PROCESSOR)
    assert spec.vision is not None
    assert spec.vision.token_id == 9
    assert spec.without_vision().blocks == spec.blocks
