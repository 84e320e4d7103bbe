"""Configurations of other families as their makers published them: every key of theirs is read or known to be idle."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import GEMMA, PLAIN_GPT_OSS
from penstock.engine_core.models.layer_spec import NO_ROPE, GateSpec, RopeSpec, RoutingSpec
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


def test_devstral(tmp_path: Path) -> None:
    spec = read(tmp_path, DEVSTRAL_SMALL_2)
    rope = spec.attention.rope
    assert (spec.family, spec.max_position, rope.attention_factor) == ("ministral3", 393216, 1.0)
    assert (rope.temperature, rope.temperature_length, rope.temperature_shift) == (0.1, 8192, 0)
