"""Configurations of Qwen's models of text and images as they were published, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.images.processor_spec import SmartResize
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.protocol.errors import ModelError

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
QWEN_25_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
}  # fmt: skip
QWEN_25_VL_PROCESSOR = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP,
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
TOKENS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653
}  # fmt: skip
ALTERNATE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
QWEN_3_VL_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "rope_scaling": ALTERNATE,
    "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
}  # fmt: skip
QWEN_3_VL_VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024,
    "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "qwen3_vl", "num_heads": 16,
    "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
QWEN_3_VL_2B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"], **TOKENS, "model_type": "qwen3_vl",
    "text_config": {
        **QWEN_3_VL_TEXT, "model_type": "qwen3_vl_text", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0", "vision_config": QWEN_3_VL_VISION,
}  # fmt: skip
LARGE = {**QWEN_3_VL_VISION, "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152,
         "intermediate_size": 4304}  # fmt: skip
QWEN_3_VL_30B: dict[str, Any] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], **TOKENS, "model_type": "qwen3_vl_moe",
    "text_config": {
        **QWEN_3_VL_TEXT, "model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    },
    "tie_word_embeddings": False, "vision_config": {**LARGE, "model_type": "qwen3_vl_moe"},
}  # fmt: skip
QWEN_3_VL_PROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
QWEN_35_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "video_token_id": 248057,
    "vision_start_token_id": 248053, "vision_end_token_id": 248054, "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "use_cache": True, "vocab_size": 248320, "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
    "tie_word_embeddings": False,
    "vision_config": {**LARGE, "deepstack_visual_indexes": [], "model_type": "qwen3_5", "out_hidden_size": 4096},
}  # fmt: skip


def read(folder: Path, config: Mapping[str, Any], processor: Mapping[str, Any] = QWEN_3_VL_PROCESSOR) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return read_spec(folder)


def test_qwen2_5_vl(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN_25_VL_7B, QWEN_25_VL_PROCESSOR)
    found = spec.vision
    assert found is not None
    assert (found.kind, found.token_id, found.patch, found.merge, found.frames) == ("qwen", 151655, 14, 2, 2)
    assert (found.layers, found.hidden, found.heads, found.width, found.outputs) == (32, 1280, 16, 3420, 3584)
    assert (found.activation, found.gated, found.norm.centered, found.positions) == ("silu", True, False, 0)
    assert (found.window, found.full, found.theta, found.levels) == (112, (7, 15, 23, 31), 10000.0, ())
    assert (found.mrope, found.mutual, found.row_width) == (True, False, 3584)
    assert found.processor.resize == SmartResize(least=3136, most=12845056, factor=28)
    assert {(own.rope.sections, own.rope.sections_alternate) for own in spec.attentions} == {((16, 24, 24), False)}


@pytest.mark.parametrize(
    ("config", "sizes", "levels"),
    [(QWEN_3_VL_2B, (24, 1024, 16, 4096), (5, 11, 17)), (QWEN_3_VL_30B, (27, 1152, 16, 4304), (8, 16, 24))],
)
def test_qwen3_vl(config: Mapping[str, Any], sizes: tuple[int, ...], levels: tuple[int, ...], tmp_path: Path) -> None:
    spec = read(tmp_path, config)
    found = spec.vision
    assert found is not None
    assert (found.layers, found.hidden, found.heads, found.width) == sizes
    assert (found.token_id, found.patch, found.merge, found.frames, found.outputs) == (151655, 16, 2, 2, 2048)
    assert (found.activation, found.gated, found.norm.centered, found.positions) == ("gelu_tanh", False, True, 48)
    assert (found.window, found.levels, found.mrope, found.row_width) == (0, levels, True, 4 * 2048)
    assert {(own.rope.sections, own.rope.sections_alternate) for own in spec.attentions} == {((24, 20, 20), True)}


def test_qwen3_5(tmp_path: Path) -> None:
    """The layer of multi-token prediction turns like the others."""
    spec = read(tmp_path, QWEN_35_9B)
    found = spec.vision
    assert found is not None
    assert (found.token_id, found.layers, found.hidden, found.outputs) == (248056, 27, 1152, 4096)
    assert (found.levels, found.positions, found.row_width) == ((), 48, 4096)
    assert spec.body.mtp is not None
    layers = (*spec.blocks, spec.body.mtp.layer)
    ropes = [layer.attention.rope for layer in layers if layer.attention is not None]
    assert len(ropes) == 9
    assert {(rope.sections, rope.sections_alternate, rope.dim) for rope in ropes} == {((11, 11, 10), True, 64)}


@pytest.mark.parametrize(
    ("config", "key", "value", "why"),
    [
        (QWEN_3_VL_2B, "num_heads", 15, "heads must share"),
        (QWEN_3_VL_2B, "num_attention_heads", 512, "multiples of 4"),
        (QWEN_3_VL_2B, "num_position_embeddings", 2305, "square"),
        (QWEN_3_VL_2B, "deepstack_visual_indexes", [5, 24], "24 layers"),
        (QWEN_3_VL_2B, "deepstack_visual_indexes", [5, 5], "different"),
        (QWEN_3_VL_2B, "out_hidden_size", 4096, "embeddings of 4096, and the text half has room for 2048"),
        (QWEN_3_VL_2B, "hidden_act", "relu2", "serves .* gelu_pytorch_tanh"),
        (QWEN_3_VL_2B, "in_channels", 4, "three"),
        (QWEN_3_VL_2B, "spatial_merge_size", 4, "the vision encoder has 64"),
        (QWEN_3_VL_2B, "patch_size", [16, 16], "integer"),
        (QWEN_3_VL_2B, "rope_parameters", {"rope_type": "yarn"}, "axial"),
        (QWEN_3_VL_2B, "rope_parameters", [1], "an object"),
        (QWEN_3_VL_2B, "head_dim", 32, "share of hidden_size"),
        (QWEN_3_VL_2B, "attention_window", 7, "does not know what it changes"),
        (QWEN_25_VL_7B, "window_size", 27, "at least the 28 pixels"),
        (QWEN_25_VL_7B, "fullatt_block_indexes", ["7"], "32 layers"),
        (QWEN_35_9B, "deepstack_visual_indexes", [3], "none in this family"),
    ],
)
def test_what_is_refused(config: Mapping[str, Any], key: str, value: Any, why: str, tmp_path: Path) -> None:
    changed = {**config, "vision_config": {**config["vision_config"], key: value}}
    if key == "num_attention_heads":
        del changed["vision_config"]["num_heads"]
    with pytest.raises(ModelError, match=why):
        read(tmp_path, changed, QWEN_25_VL_PROCESSOR if config is QWEN_25_VL_7B else QWEN_3_VL_PROCESSOR)


@pytest.mark.parametrize("token", [151936, -1, "<image>"])
def test_a_placeholder_that_is_no_token_is_refused(token: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="image_token_id"):
        read(tmp_path, {**QWEN_3_VL_2B, "image_token_id": token})


def test_the_placeholder_of_a_silent_file(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN_3_VL_2B.items() if key != "image_token_id"}
    found = read(tmp_path, config).vision
    assert found is not None
    assert found.token_id == 151655
