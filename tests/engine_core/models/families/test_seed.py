from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig, SeedOssConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "biases of q, k and v": (SeedOssConfig, {"head_dim": 24, "pad_token_id": 0}),
    "all biases": (SeedOssConfig, {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True, "pad_token_id": 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}))
