from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HyperCLOVAXConfig,
    PreTrainedConfig,
)

from penstock.engine_core.models.families import families
from penstock.engine_core.models.reading import ModelFile
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, check_parity

HYBRID: dict[str, Any] = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "shared_intermediate_size": 48,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.5,
}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "granite": (
        GraniteConfig,
        {"attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 2.5},
    ),
    "granite, biases": (GraniteConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granitemoe": (
        GraniteMoeConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.5,
        },
    ),
    "hyperclovax": (
        HyperCLOVAXConfig,
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 0.4, "attention_multiplier": 0.2},
    ),
    "hyperclovax, no norms behind, biases": (
        HyperCLOVAXConfig,
        {"head_dim": 24, "use_post_norm": False, "attention_bias": True, "mlp_bias": True},
    ),
    "granitemoeshared": (GraniteMoeSharedConfig, {"num_local_experts": 6, "shared_intermediate_size": 48}),
    "granitemoehybrid": (GraniteMoeHybridConfig, {**HYBRID, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granitemoehybrid, rotated, without experts or recurrences": (
        GraniteMoeHybridConfig,
        {
            **HYBRID,
            "num_local_experts": 0,
            "layer_types": ["attention"] * 3,
            "position_embedding_type": "rope",
            "attention_bias": True,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("layer_types", ["mamba"] * 3, "at least one layer attends"),
        ("layer_types", ["mamba", "attention"], "for each of the 3 layers"),
        ("layer_types", ["mamba", "attention", "sliding"], "it must name attention or mamba"),
        ("position_embedding_type", "alibi", "rope and nope"),
        ("mamba_n_groups", 3, "divide mamba_n_heads"),
    ],
)
def test_what_is_refused(key: str, value: Any, why: str) -> None:
    family = families()["granitemoehybrid"]
    file = ModelFile(Path("config.json"), {**SIZES, **HYBRID, key: value}, family.defaults)
    with pytest.raises(ModelError, match=why) as found:
        family.read(file)
    assert key in str(found.value)
