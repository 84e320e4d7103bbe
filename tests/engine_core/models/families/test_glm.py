from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Glm4Config, Glm4MoeConfig, GlmConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "glm": (GlmConfig, {"head_dim": 16, "pad_token_id": 0}),
    "glm4": (Glm4Config, {"head_dim": 16, "pad_token_id": 0}),
    "glm4, no biases, whole heads": (
        Glm4Config,
        {
            "head_dim": 24,
            "attention_bias": False,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4_moe, two shared": (
        Glm4MoeConfig,
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    ),
    "glm4_moe, groups": (
        Glm4MoeConfig,
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
