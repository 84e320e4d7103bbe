"""A model folder for dummy weights: nothing but its configuration."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 64
LENGTH = 96


def write_folder(path: Path) -> Path:
    """A tiny Llama that needs no weight file with --load-format dummy."""
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_seeing_folder(path: Path) -> Path:
    """The same of a tiny Qwen3-VL, whose images become a row for each 8 by 8 pixels."""
    write_folder(path)
    config = json.loads((path / "config.json").read_text())
    text = {name: config[name] for name in config if name not in ("architectures", "torch_dtype", "model_type")}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "torch_dtype": "bfloat16",
        "image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8,
        "text_config": {
            **text, "model_type": "qwen3_vl_text", "head_dim": 8,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "out_hidden_size": 16, "patch_size": 4, "num_position_embeddings": 25, "deepstack_visual_indexes": [0],
        },
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path
