from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig, YoutuConfig

from tests.engine_core.models.parity import SIZES, check_parity

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "q_lora_rank": 24,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "tied": (YoutuConfig, LATENT),
    "halves, biases, yarn": (
        YoutuConfig,
        {**LATENT, "rope_interleave": False, "attention_bias": True, "rope_parameters": YARN,
         "tie_word_embeddings": False},
    ),
    "queries of the residual stream": (YoutuConfig, {**LATENT, "q_lora_rank": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), expanded=17)
