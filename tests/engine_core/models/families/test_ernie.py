from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Ernie4_5_MoeConfig, Ernie4_5Config, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "ernie4_5": (Ernie4_5Config, {"head_dim": 16, "pad_token_id": 0}),
    "ernie4_5, biases, untied": (
        Ernie4_5Config,
        {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False, "pad_token_id": 0},
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40, "pad_token_id": 0},
    ),
    "ernie4_5_moe, some layers": (
        Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "pad_token_id": 0,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
