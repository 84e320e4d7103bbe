from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Exaone4Config, ExaoneMoeConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "windows in turns": (Exaone4Config, {"sliding_window": 11, "sliding_window_pattern": 2, "head_dim": 16}),
    "all keys": (Exaone4Config, {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "experts": (
        ExaoneMoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "sliding_window": 11,
            "sliding_window_pattern": 3,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}))
