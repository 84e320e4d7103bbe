from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import HYV3Config, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mixed": (
        HYV3Config,
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "two shared": (
        HYV3Config,
        {
            "head_dim": 24,
            "attention_bias": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "router_scaling_factor": 1.3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
