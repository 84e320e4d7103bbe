"""Configurations as the makers published them, in the spelling of their day, and what they come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.models.layer_spec import RopeSpec
from penstock.engine_core.models.spec import read_spec
from tests.engine_core.models.specs import windows_of

LLAMA_3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_31_8B = {
    **LLAMA_2_7B,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_scaling": LLAMA_3_ROPE,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_32_1B = {
    **LLAMA_31_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA_3_ROPE, "factor": 32.0},
    "tie_word_embeddings": True,
}
MISTRAL_01 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
MISTRAL_NEMO = {
    **MISTRAL_01,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 131072,
}
QWEN_25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_25_LONG = {
    **QWEN_25_7B,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}
QWEN_3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_LONG = {
    **QWEN_3_06B,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}
VICUNA_16K = {**LLAMA_2_7B, "rope_scaling": {"factor": 4.0, "type": "linear"}}

# heads, kv heads, head size, served length, rope kind, theta, window, tied, bias, type
EXPECTED: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "Llama 2 7B": (LLAMA_2_7B, (32, 32, 128, 4096, "default", 1e4, 0, False, False, "float16")),
    "Llama 3.1 8B": (LLAMA_31_8B, (32, 8, 128, 131072, "llama3", 5e5, 0, False, False, "bfloat16")),
    "Llama 3.2 1B": (LLAMA_32_1B, (32, 8, 64, 131072, "llama3", 5e5, 0, True, False, "bfloat16")),
    "Mistral 7B v0.1": (MISTRAL_01, (32, 8, 128, 32768, "default", 1e4, 4096, False, False, "bfloat16")),
    "Mistral Nemo": (MISTRAL_NEMO, (32, 8, 128, 131072, "default", 1e6, 0, False, False, "bfloat16")),
    "Qwen2.5 7B": (QWEN_25_7B, (28, 4, 128, 32768, "default", 1e6, 0, False, True, "bfloat16")),
    "Qwen2.5 7B long": (QWEN_25_LONG, (28, 4, 128, 131072, "yarn", 1e6, 0, False, True, "bfloat16")),
    "Qwen3 0.6B": (QWEN_3_06B, (16, 8, 128, 40960, "default", 1e6, 0, True, False, "bfloat16")),
    "Qwen3 0.6B long": (QWEN_3_LONG, (16, 8, 128, 131072, "yarn", 1e6, 0, True, False, "bfloat16")),
    "Vicuna 16k": (VICUNA_16K, (32, 32, 128, 16384, "linear", 1e4, 0, False, False, "float16")),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_published_configuration(name: str, tmp_path: Path) -> None:
    config, expected = EXPECTED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    own = spec.attention
    sizes = own.heads, own.kv_heads, own.head_dim, spec.max_position, own.rope.kind, own.rope.theta
    assert (*sizes, max(windows_of(spec)), spec.tied, own.qkv_bias, spec.dtype) == expected
    assert (spec.layers, spec.hidden, spec.vocab_size, spec.longest) == (
        config["num_hidden_layers"],
        config["hidden_size"],
        config["vocab_size"],
        spec.max_position,
    )


def test_rope_of_llama_31(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    expected = RopeSpec(kind="llama3", theta=5e5, factor=8.0, original_max_position=8192)
    assert read_spec(tmp_path).attention.rope == expected
