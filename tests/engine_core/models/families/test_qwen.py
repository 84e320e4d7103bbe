from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from penstock.engine_core.models.attention import SelfAttention
from tests.engine_core.models.parity import SIZES, check_parity, ours, write_checkpoint

MIXED = ["full_attention", "sliding_attention", "full_attention"]
CASES: dict[str, dict[str, Any]] = {
    "2.5": {},
    "tied, multi-query": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "window in the upper layers": {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    "window by layer types": {"use_sliding_window": True, "sliding_window": 9, "layer_types": MIXED},
    "window switched off": {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    check_parity(tmp_path, Qwen2Config(**{**SIZES, **CASES[case]}))


def test_bias_is_on_the_inputs_of_attention_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Qwen2Config(**SIZES))
    model = ours(tmp_path)
    attention = model.blocks[0].attention
    assert isinstance(attention, SelfAttention)
    assert attention.qkv.bias is not None
    assert attention.output.bias is None
    assert model.blocks[0].mlp.down.bias is None
