from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig, SmolLM3Config

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "every fourth without positions": (SmolLM3Config, {"num_hidden_layers": 4, "pad_token_id": 0}),
    "windows, biases": (
        SmolLM3Config,
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 13,
            "attention_bias": True,
            "mlp_bias": True,
            "pad_token_id": 0,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}))
