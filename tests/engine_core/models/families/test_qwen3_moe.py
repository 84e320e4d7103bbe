from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from tests.engine_core.models.parity import SIZES, check_parity

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
CASES: dict[str, dict[str, Any]] = {
    "every layer, shares of one": {"norm_topk_prob": True, "head_dim": 32},
    "every second layer": {"decoder_sparse_step": 2, "head_dim": 16},
    "some layers dense, tied": {"mlp_only_layers": [1], "head_dim": 16, "tie_word_embeddings": True},
    "biases, a window": {"attention_bias": True, "use_sliding_window": True, "sliding_window": 21},
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    check_parity(tmp_path, Qwen3MoeConfig(**{**SIZES, **EXPERTS, **CASES[case]}), chance=2.0)
