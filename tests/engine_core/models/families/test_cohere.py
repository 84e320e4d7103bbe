from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Cohere2Config, CohereConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "cohere, a norm of each head": (CohereConfig, {"pad_token_id": 0, "use_qk_norm": True}),
    "cohere": (CohereConfig, {"pad_token_id": 0}),
    "cohere, biases, untied": (
        CohereConfig,
        {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.8, "num_attention_heads": 8},
    ),
    "cohere2": (
        Cohere2Config,
        {"pad_token_id": 0, "sliding_window": 11, "sliding_window_pattern": 2, "logit_scale": 0.25},
    ),
    "cohere2, biases": (
        Cohere2Config,
        {
            "attention_bias": True,
            "sliding_window": 21,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
