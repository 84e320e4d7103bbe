from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig, PreTrainedConfig

from penstock.engine_core.models.families import families
from penstock.engine_core.models.families.gemma4 import read_gemma4
from penstock.engine_core.models.reading import ModelFile
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, check_parity

GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "final_logit_softcapping": 5.0,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 0,
}
UNIFIED = {key: value for key, value in GEMMA4.items() if not key.endswith("per_layer_input")}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "dense": (Gemma4TextConfig, {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "own values": (Gemma4TextConfig, {**GEMMA4, "attention_bias": True, "final_logit_softcapping": None}),
    "unified": (Gemma4UnifiedTextConfig, {**UNIFIED, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "by layer": (
        Gemma4TextConfig,
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "experts": (
        Gemma4TextConfig,
        {**GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("use_bidirectional_attention", "all", "as a decoder"),
        ("num_kv_shared_layers", 3, "a layer of each kind"),
        ("per_layer_config", {"1": {"head_dim": 32}}, "of all full_attention layers alike"),
        ("per_layer_config", {"1": {"rope": 1}, "3": {"rope": 1}}, "of all full_attention layers alike"),
        ("enable_moe_block", True, "num_experts is None"),
    ],
)
def test_what_is_not_served_is_refused_by_name(key: str, value: object, complaint: str) -> None:
    file = ModelFile(Path("config.json"), {**SIZES, **GEMMA4, key: value}, families()["gemma4_text"].defaults)
    with pytest.raises(ModelError, match=f"{complaint}"):
        read_gemma4(file)


def test_global_heads_are_read_from_both_forms_of_files() -> None:
    values = {**SIZES, **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    defaults = families()["gemma4_text"].defaults
    published = read_gemma4(ModelFile(Path("config.json"), values, defaults))
    by_layer = {str(layer): {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3)}
    del values["global_head_dim"], values["num_global_key_value_heads"]
    assert read_gemma4(ModelFile(Path("config.json"), {**values, "per_layer_config": by_layer}, defaults)) == published
    assert [layer.attention.head_dim for layer in published.layers if layer.attention] == [16, 32, 16, 32]
