"""Keys of config.json that change arithmetic are refused by name, never passed over; others pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import families
from penstock.engine_core.models.spec import decoder_spec
from penstock.protocol.errors import ModelError

PLAIN: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "intermediate_size": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
}  # fmt: skip

# One of each kind that models of other families have, with a value that asks for something.
ASKING = {
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "logits_soft_cap": 30.0, "logit_scale": 0.0625,
    "logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078,
    "scale_emb": 12, "scale_depth": 1.4, "query_pre_attn_scalar": 256, "lm_head_multiplier": 0.04, "clip_qkv": 8.0,
    "use_qk_norm": True, "qk_layernorm": True, "rotary_pct": 0.25, "rotary_dim": 32, "rope_interleave": True,
    "rope_local_base_freq": 10000.0, "no_rope_layers": [1, 0], "no_rope_layer_interval": 4, "alibi": True,
    "attention_chunk_size": 8192, "attn_temperature_tuning": True, "sliding_window_pattern": 6, "qkv_bias": True,
    "layer_norm_eps": 1e-5, "norm_type": "layernorm", "use_sandwich_norm": True, "swiglu_limit": 7.0, "use_bias": True,
    "hidden_activation": "gelu_pytorch_tanh", "activation_function": "gelu", "kv_lora_rank": 512, "mamba_d_state": 128,
    "use_parallel_residual": True, "position_embedding_type": "alibi", "partial_rotary_factors": [0.5],
    "n_shared_experts": 2, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "linear_num_key_heads": 16,
    "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 2, "attention_sink": True, "mup_width_multiplier": 8.0,
    "output_multiplier_scale": 0.5, "global_attn_every_n_layers": 3, "attn_layer_period": 8,
}  # fmt: skip

HARMLESS = {
    "attention_dropout": 0.1, "embd_pdrop": 0.1, "initializer_range": 0.02, "router_aux_loss_coef": 0.01,
    "output_router_logits": True, "router_jitter_noise": 0.1, "use_cache": True, "pretraining_tp": 2,
    "_name_or_path": "some/where", "transformers_version": "5.0", "unsloth_fixed": True, "unsloth_version": "2026.1",
    "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "id2label": {"0": "A"}, "problem_type": "x",
    "attn_implementation": "sdpa", "model_type": "llama", "architectures": ["LlamaForCausalLM"], "seed": 7,
    "sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_scaling": None, "attention_bias": False,
    "residual_multiplier": 1.0, "embedding_multiplier": 1, "rope_interleave": False, "layer_norm_eps": 1e-6,
    "hidden_activation": "silu", "attn_logit_softcapping": None, "no_rope_layers": [], "num_kv_heads": 2,
    "norm_type": "rmsnorm", "position_embedding_type": "rope", "some_tool": {"of": "a trainer"},
}  # fmt: skip


def read(family: str, **more: Any) -> object:
    return decoder_spec(ConfigFile(Path("config.json"), PLAIN | more), families()[family])


@pytest.mark.parametrize("key", ASKING)
def test_what_changes_arithmetic_is_refused_by_name(key: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {key} is .*does not pass it over"):
        read("llama", **{key: ASKING[key]})


@pytest.mark.parametrize("key", HARMLESS)
def test_what_asks_for_nothing_passes(key: str) -> None:
    assert read("llama", **{key: HARMLESS[key]}) == read("llama")


def test_a_key_that_says_what_the_family_does_anyway_passes() -> None:
    assert read("qwen2", qkv_bias=True) == read("qwen2")
    assert read("qwen3", use_qk_norm=True) == read("qwen3")
    with pytest.raises(ModelError, match="use_qk_norm"):
        read("qwen2", use_qk_norm=True)


def test_windows_that_engines_disagree_about_are_refused() -> None:
    with pytest.raises(ModelError, match="sliding_window is 128"):
        read("llama", sliding_window=128)
    with pytest.raises(ModelError, match="layer_types"):
        read("llama", layer_types=["sliding_attention", "full_attention"])
    assert read("llama", sliding_window=256) == read("llama", sliding_window=128, use_sliding_window=False)


@pytest.mark.parametrize("name", ["long_factor", "short_mscale", "mrope_section", "attn_scale"])
def test_what_is_not_known_of_rotary_positions_is_refused(name: str) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ModelError, match=f"rope_scaling is .*does not know {name}"):
        read("llama", rope_scaling=scaling | {name: [2.0]})
    assert read("llama", rope_scaling=scaling | {name: None}) == read("llama", rope_scaling=scaling)
