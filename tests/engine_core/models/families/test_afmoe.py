from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AfmoeConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mixed": (
        AfmoeConfig,
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "sliding_window": 11,
            "global_attn_every_n_layers": 2,
            "mup_enabled": True,
            "route_scale": 1.7,
        },
    ),
    "one key-value head, all sparse": (
        AfmoeConfig,
        {
            "head_dim": 24,
            "num_key_value_heads": 1,
            "num_dense_layers": 0,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "num_shared_experts": 1,
            "moe_intermediate_size": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 13,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
