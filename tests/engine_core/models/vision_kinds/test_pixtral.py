"""The vision encoder of Mistral 3 as a config.json that was published describes it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.images.processor_spec import LongestEdge, Size
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.engine_core.models.vision_kinds import vision_shapes
from penstock.engine_core.models.vision_spec import ProjectionSpec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.vision.test_pixtral import PROCESSOR

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


def read(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return read_spec(folder)


def test_a_published_config(tmp_path: Path) -> None:
    spec = read(tmp_path, MISTRAL_SMALL_3_2).vision
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
    with pytest.raises(ModelError, match=complaint):
        read(tmp_path, config)
