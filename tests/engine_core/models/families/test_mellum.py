from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import MellumConfig, PreTrainedConfig

from penstock.engine_core.models.spec import read_spec
from tests.engine_core.models.parity import SIZES, check_parity

EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "windows and positions by layer": (
        MellumConfig,
        {
            **EXPERTS,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": 21,
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e3}},
        },
    ),
    "some layers dense, biases, shares as they are": (
        MellumConfig,
        {
            **EXPERTS,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)


def test_what_a_silent_file_means(tmp_path: Path) -> None:
    """A layer behind the last predicts further tokens, and is left unread."""
    silent = {
        "architectures": ["MellumForCausalLM"], "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_nextn_predict_layers": 1,
        "layer_types": [SLIDING, FULL], "mtp_mlp_layer_types": ["sparse"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(silent))
    found = read_spec(tmp_path)
    assert [layer.attention.window for layer in found.blocks] == [1024, 0]
    assert [layer.attention.rope.theta for layer in found.blocks] == [1e4, 5e5]
    assert [layer.experts is not None for layer in found.blocks] == [True, True]
    assert found.body.unread == ("mtp.",)
