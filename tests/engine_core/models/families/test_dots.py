from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Dots1Config, PreTrainedConfig, SolarOpenConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "dots1": (
        Dots1Config,
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 13,
        },
    ),
    "dots1, groups": (
        Dots1Config,
        {
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "solar_open": (
        SolarOpenConfig,
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
