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
