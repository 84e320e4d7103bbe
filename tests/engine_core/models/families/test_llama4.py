from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CwmConfig, Llama4TextConfig, PreTrainedConfig

from penstock.engine_core.models.spec import read_spec
from tests.engine_core.models.parity import SIZES, check_parity, write_checkpoint

CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "scout": (
        Llama4TextConfig,
        {
            "head_dim": 16,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 256,
            "floor_scale": 16,
            "attn_scale": 0.4,
            "pad_token_id": 0,
        },
    ),
    "maverick": (
        Llama4TextConfig,
        {
            "head_dim": 16,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 256,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "cwm": (CwmConfig, {"head_dim": 16, "sliding_window": 11}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)


def test_llama_4_is_served_up_to_its_chunk(tmp_path: Path) -> None:
    kind, options = CASES["scout"]
    write_checkpoint(tmp_path, kind(**{**SIZES, **options, "attention_chunk_size": 64}))
    spec = read_spec(tmp_path)
    assert (spec.max_position, spec.longest) == (64, 64)
