from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import ArceeConfig, Jais2Config, NemotronConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "nemotron": (NemotronConfig, {"head_dim": 16}),
    "nemotron, biases": (
        NemotronConfig,
        {
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    "jais2": (Jais2Config, {}),
    "jais2, no biases": (Jais2Config, {"attention_bias": False, "mlp_bias": False, "head_dim": 24}),
    "arcee": (ArceeConfig, {}),
    "arcee, stretched, biases": (
        ArceeConfig,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
