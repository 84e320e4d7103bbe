from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, PreTrainedConfig

from penstock.engine_core.models.spec import read_spec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, check_parity

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "deepseek_v2, groups": (
        DeepseekV2Config,
        {**LATENT, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 1.5, "rope_parameters": YARN},
    ),
    "deepseek_v2, lite": (DeepseekV2Config, {**LATENT, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v3, groups": (
        DeepseekV3Config,
        {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "deepseek_v3, halves, biases": (
        DeepseekV3Config, {**LATENT, "q_lora_rank": 16, "rope_interleave": False, "attention_bias": True},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {**LATENT, "q_lora_rank": 24, "v_head_dim": 8}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0, expanded=17)


def spec_of(folder: Path, **changes: Any) -> Any:
    config = json.loads(DeepseekV3Config(**{**SIZES, **LATENT, "q_lora_rank": 24}).to_json_string())
    config |= {"architectures": ["DeepseekV3ForCausalLM"], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


def test_kimi_and_what_was_published_with_code(tmp_path: Path) -> None:
    """Kimi K2 is of the class of DeepSeek-V3; both name code of their own, which transformers has by now."""
    found = spec_of(tmp_path, model_type="kimi_k2", auto_map={"AutoModel": "modeling_deepseek.DeepseekV3Model"})
    assert found.family == "deepseek_v3"
    assert found.attention.page_numbers == 32 + 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; numbers are turned in pairs"),
        ({"q_lora_rank": None, "attention_bias": True}, "attention_bias is True; Penstock serves it false"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; sigmoid is expected"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; noaux_tc is expected"),
        ({"kv_lora_rank": None, "model_type": "x"}, "kv_lora_rank is None; it must be an integer"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "norm_topk_prob is True; Penstock serves it false"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": False, "topk_method": "best"}, "topk_method"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
                              "original_max_position_embeddings": 8}}, "rope_scaling is None; Penstock serves latent"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named):
        spec_of(tmp_path, **changes)
