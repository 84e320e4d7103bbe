from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, Gemma3TextConfig, GemmaConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gemma": (GemmaConfig, {"head_dim": 16}),
    "gemma, biases": (GemmaConfig, {"head_dim": 24, "attention_bias": True, "hidden_act": "gelu"}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 16,
            "sliding_window": 11,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2, no caps": (
        Gemma2Config,
        {"head_dim": 24, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": (Gemma3TextConfig, {"head_dim": 16, "sliding_window": 11, "sliding_window_pattern": 3}),
    "gemma3, stretched": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}))
