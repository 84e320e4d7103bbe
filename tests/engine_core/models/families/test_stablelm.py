from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig, StableLmConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "norms of each head, beside each other": (StableLmConfig, {"qk_layernorm": True, "use_parallel_residual": True}),
    "biases, one behind the other": (StableLmConfig, {"use_qkv_bias": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)
