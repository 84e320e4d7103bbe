from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MiniMaxM2Config, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "partly rotated": (
        MiniMaxM2Config,
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8, "num_key_value_heads": 1},
    ),
    "whole heads": (MiniMaxM2Config, {"head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
