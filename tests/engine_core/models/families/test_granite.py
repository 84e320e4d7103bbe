from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GraniteConfig, GraniteMoeConfig, HyperCLOVAXConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "granite": (
        GraniteConfig,
        {"attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 2.5},
    ),
    "granite, biases": (GraniteConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granitemoe": (
        GraniteMoeConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.5,
        },
    ),
    "hyperclovax": (
        HyperCLOVAXConfig,
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 0.4, "attention_multiplier": 0.2},
    ),
    "hyperclovax, no norms behind, biases": (
        HyperCLOVAXConfig,
        {"head_dim": 24, "use_post_norm": False, "attention_bias": True, "mlp_bias": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
