"""Configurations of other families as their makers published them: every key of theirs is read or known to be idle."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import GEMMA, PLAIN_GPT_OSS
from penstock.engine_core.models.layer_spec import NO_ROPE, GateSpec, RopeSpec, RoutingSpec
from penstock.engine_core.models.recurrence_spec import MambaSpec
from penstock.engine_core.models.spec import ModelSpec, read_spec
from tests.engine_core.models.specs import windows_of

TRINITY_NANO: dict[str, Any] = {
    "architectures": ["AfmoeForCausalLM"],
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "global_attn_every_n_layers": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 14,
    "load_balance_coeff": 0.001,
    "max_position_embeddings": 131072,
    "model_type": "afmoe",
    "moe_intermediate_size": 256,
    "mup_enabled": True,
    "n_group": 1,
    "num_attention_heads": 8,
    "num_dense_layers": 2,
    "num_expert_groups": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 56,
    "num_key_value_heads": 2,
    "num_limited_groups": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "route_norm": True,
    "route_scale": 2.826,
    "score_func": "sigmoid",
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_mm": True,
    "vocab_size": 200192,
}
FALCON_H1_500M: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32784,
}
HUNYUAN_7B: dict[str, Any] = {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "bos_token_id": 127958,
    "dtype": "bfloat16",
    "eos_token_id": 127960,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "hunyuan_v1_dense",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 127961,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "dynamic", "alpha": 1000, "factor": 1},
    "rope_theta": 10000,
    "use_cla": False,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
DEVSTRAL_SMALL_2: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "mistral3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 393216,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 48.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 100000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "vocab_size": 131072,
    },
}


def read(folder: Path, config: object) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


def test_gpt_oss(tmp_path: Path) -> None:
    spec = read(tmp_path, PLAIN_GPT_OSS.config)
    assert windows_of(spec) == (128, 0) * 12
    experts = spec.sparse[0]
    assert (experts.count, experts.width, experts.bias, experts.router_bias) == (32, 2880, True, True)
    assert experts.gate == GateSpec(slope=1.702, limit=7.0, shift=1.0)
    assert experts.routing == RoutingSpec(chosen=4, normalised=True)
    own = spec.attention
    assert (own.sinks, own.qkv_bias, own.output_bias, own.head_dim) == (True, True, True, 64)
    assert (own.rope.kind, own.rope.factor, own.rope.truncate) == ("yarn", 32.0, False)
    assert own.rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert (spec.max_position, spec.vocab_size) == (131072, 201088)


def test_gpt_oss_whose_layers_are_not_named(tmp_path: Path) -> None:
    """The first one slides."""
    silent = {key: value for key, value in PLAIN_GPT_OSS.config.items() if key != "layer_types"}
    assert windows_of(read(tmp_path, silent)) == (128, 0) * 12


def test_gemma_3(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA.config)
    assert windows_of(spec) == (*(1024, 1024, 1024, 1024, 1024, 0) * 10, 1024, 1024)
    assert spec.attention.scale == pytest.approx(168**-0.5)


def test_trinity(tmp_path: Path) -> None:
    spec = read(tmp_path, TRINITY_NANO)
    assert windows_of(spec) == (2048, 2048, 2048, 0) * 14
    assert [layer.attention.rope == NO_ROPE for layer in spec.blocks[:4]] == [False, False, False, True]
    assert (len(spec.sparse), spec.attention.gated, spec.body.embedding_scale) == (54, True, 32.0)
    assert spec.sparse[0].routing == RoutingSpec(
        chosen=8, scores="sigmoid", normalised=True, bias="expert_bias", scale=2.826
    )


def test_hunyuan(tmp_path: Path) -> None:
    """The base is raised once, whatever the length."""
    spec = read(tmp_path, HUNYUAN_7B)
    assert spec.attention.rope == RopeSpec(theta=pytest.approx(10000 * 1000 ** (128 / 126)))
    assert (spec.attention.qk_norm, spec.attention.qk_norm_turned, spec.longest) == ("head", True, 262144)


def test_falcon_h1(tmp_path: Path) -> None:
    """Attention and a state in every layer."""
    spec = read(tmp_path, FALCON_H1_500M)
    assert len(spec.attentions) == len(spec.recurrences) == 36
    mamba = spec.recurrences[0]
    assert isinstance(mamba, MambaSpec)
    assert (mamba.inner, mamba.heads, mamba.state_dim, mamba.norm) == (1536, 24, 128, "")
    assert mamba.scales == pytest.approx((0.441942, 0.3125, 0.441942, 0.625, 0.441942), rel=1e-5)
    assert spec.attention.scale == pytest.approx(0.390625 / 8)
    assert spec.blocks[0].mixer_scales == pytest.approx((0.9375, 0.235702), rel=1e-5)
    assert spec.body.residual_scale == pytest.approx(0.883883 * 0.5859375, rel=1e-5)


def test_devstral(tmp_path: Path) -> None:
    spec = read(tmp_path, DEVSTRAL_SMALL_2)
    rope = spec.attention.rope
    assert (spec.family, spec.max_position, rope.attention_factor) == ("ministral3", 393216, 1.0)
    assert (rope.temperature, rope.temperature_length, rope.temperature_shift) == (0.1, 8192, 0)
