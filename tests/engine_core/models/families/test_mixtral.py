from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from tests.engine_core.models.parity import SIZES, check_parity

CASES: dict[str, dict[str, Any]] = {
    "two of eight": {},
    "one of four, a window": {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 21},
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    check_parity(tmp_path, MixtralConfig(**{**SIZES, **CASES[case]}), chance=2.0)
