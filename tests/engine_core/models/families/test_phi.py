from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3Config, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "phi3, a window": (Phi3Config, {"sliding_window": 19, "pad_token_id": 0}),
    "phi4, partly rotated": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "longrope within the short length": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2],
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "longrope beyond it": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 2.0, 3.5, 4.0],
            },
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}))
