from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

EXPERTS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "sliding_window": 11,
}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "stretched": (
        GptOssConfig,
        {
            **EXPERTS,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
            "swiglu_limit": 1.5,
        },
    ),
    "no biases of attention, two windows first": (
        GptOssConfig,
        {
            **EXPERTS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "attention_bias": False,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
