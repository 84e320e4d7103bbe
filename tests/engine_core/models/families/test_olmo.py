from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Olmo2Config, Olmo3Config, OlmoeConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "olmo2": (Olmo2Config, {}),
    "olmo2, biases, grouped, tied": (
        Olmo2Config,
        {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "olmo3, windows": (Olmo3Config, {"sliding_window": 11, "num_hidden_layers": 4}),
    "olmo3, yarn in full layers": (
        Olmo3Config,
        {
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe, shares of one": (OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
