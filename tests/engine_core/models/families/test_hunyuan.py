from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import HunYuanDenseV1Config, HunYuanMoEV1Config, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "dense": (
        HunYuanDenseV1Config,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}, "head_dim": 24},
    ),
    "biases, positions as they are": (
        HunYuanDenseV1Config,
        {"attention_bias": True, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "experts": (
        HunYuanMoEV1Config,
        {
            "num_experts": 6,
            "moe_topk": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
