from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from penstock.engine_core.models.attention import SelfAttention
from tests.engine_core.models.parity import SIZES, check_parity, ours, theirs, write_checkpoint

CASES: dict[str, dict[str, Any]] = {
    "dense": {"head_dim": 32},
    "tied, multi-query": {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "biases": {"head_dim": 32, "attention_bias": True},
    "window in the upper layers": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 21,
        "max_window_layers": 2,
    },
    "linear": {"head_dim": 8, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    check_parity(tmp_path, Qwen3Config(**{**SIZES, **CASES[case]}))


def test_heads_have_norms_of_their_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Qwen3Config(**SIZES, head_dim=32))
    attention, reference = ours(tmp_path).blocks[1].attention, theirs(tmp_path).model.layers[1].self_attn
    assert isinstance(attention, SelfAttention)
    assert attention.query_norm is not None
    assert attention.key_norm is not None
    assert torch.equal(attention.query_norm.weight, reference.q_norm.weight)
    assert torch.equal(attention.key_norm.weight, reference.k_norm.weight)
