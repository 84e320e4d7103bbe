from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from tests.engine_core.models.parity import PROMPT, SIZES, check_parity, ours, write_checkpoint

CASES: dict[str, dict[str, Any]] = {
    "window within a chunk": {"sliding_window": 13},
    "window over several chunks": {"sliding_window": PROMPT - 20},
    "window of one block": {"sliding_window": 8},
    "no window": {"sliding_window": None},
    "tied": {"sliding_window": 30, "tie_word_embeddings": True, "head_dim": 32},
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    check_parity(tmp_path, MistralConfig(**{**SIZES, **CASES[case]}))


def test_every_layer_has_the_window(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MistralConfig(**SIZES, sliding_window=11))
    attentions = [block.attention for block in ours(tmp_path).blocks]
    assert [attention.options.window for attention in attentions] == [11, 11, 11]
