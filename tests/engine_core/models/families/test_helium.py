from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import HeliumConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "helium": (HeliumConfig, {"head_dim": 16}),
    "helium, biases": (HeliumConfig, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}))
