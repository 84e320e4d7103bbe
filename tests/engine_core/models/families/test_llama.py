from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from penstock.engine_core.models.attention import SelfAttention
from tests.engine_core.models.parity import SIZES, check_parity, ours, write_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict[str, Any]] = {
    "llama 2": {"num_key_value_heads": None},
    "grouped": {"rms_norm_eps": 1e-5},
    "multi-query, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 24},
    "llama 3.1": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "dynamic within its length": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "yarn": {"rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "yarn with mscale": {"rope_parameters": {**YARN, "rope_theta": 5000.0, "mscale": 0.7, "mscale_all_dim": 1.2}},
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    check_parity(tmp_path, LlamaConfig(**{**SIZES, **CASES[case]}))


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_parity_at_block_size(block_size: int, tmp_path: Path) -> None:
    check_parity(tmp_path, LlamaConfig(**SIZES), block_size=block_size)


def test_biases_are_there_when_the_configuration_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LlamaConfig(**SIZES, attention_bias=True))
    attention = ours(tmp_path).blocks[0].attention
    assert isinstance(attention, SelfAttention)
    assert attention.qkv.bias is not None
    assert attention.output.bias is not None
