"""Qwen3-Next, 3.5 and 3.6 against transformers: layers of recurrence.py and gated_delta.py, as recurrence_spec.py
describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from penstock.engine_core.models.families import families
from penstock.engine_core.models.reading import ModelFile
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, check_parity

LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3_next": (Qwen3NextConfig, {**LINEAR, **EXPERTS, "num_experts": 6, "mlp_only_layers": [1]}),
    "qwen3_5": (Qwen3_5TextConfig, LINEAR),
    "qwen3_5, biases, a convolution of two": (
        Qwen3_5TextConfig,
        {**LINEAR, "attention_bias": True, "linear_conv_kernel_dim": 2},
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig,
        {**LINEAR, **EXPERTS, "num_experts": 6, "num_hidden_layers": 2,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_5_moe, a shared expert like the others": (
        Qwen3_5MoeTextConfig,
        {**LINEAR, **EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 24, "num_hidden_layers": 2,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("linear_num_value_heads", 3, "multiple of linear_num_key_heads"),
        ("layer_types", ["linear_attention"] * 3, "at least one layer attends"),
        ("layer_types", ["sliding_attention"] * 3, "it must name full_attention or linear_attention"),
        ("linear_conv_kernel_dim", 5, "2 to 4"),
    ],
)
def test_what_is_refused(key: str, value: Any, why: str) -> None:
    family = families()["qwen3_5_text"]
    file = ModelFile(Path("config.json"), {**SIZES, **LINEAR, key: value}, family.defaults)
    with pytest.raises(ModelError, match=why) as found:
        family.read(file)
    assert key in str(found.value)
