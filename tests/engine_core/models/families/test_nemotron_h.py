from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import NemotronHConfig, PreTrainedConfig

from penstock.engine_core.models.families import families
from penstock.engine_core.models.reading import ModelFile
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, check_parity

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 12,
    "time_step_min": 1e-9,  # transformers clamps by it, which the code that trained the models does not
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "nemotron_h": (NemotronHConfig, HYBRID),
    "nemotron_h, biases, the MLP first": (
        NemotronHConfig,
        {
            **HYBRID,
            "layers_block_type": ["mlp", "attention", "mamba", "mlp"],
            "mlp_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 2,
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
        ("hybrid_override_pattern", "ME*X", r"M, \*, - or E"),
        ("hybrid_override_pattern", "ME*", "for each of 4 layers"),
        ("hybrid_override_pattern", "MEM-", "at least one layer attends"),
        ("n_groups", 3, "divide mamba_num_heads"),
        ("attention_bias", True, "without biases"),
        ("use_bias", True, "without biases"),
        ("mlp_bias", True, "without biases"),
        ("mamba_hidden_act", "gelu", "silu"),
        ("mlp_hidden_act", "silu", "relu2"),
        ("moe_latent_size", 32, "read the residual stream"),
        ("n_shared_experts", 2, "one shared expert"),
    ],
)
def test_what_is_refused(key: str, value: Any, why: str) -> None:
    family = families()["nemotron_h"]
    file = ModelFile(Path("config.json"), {**SIZES, **HYBRID, key: value}, family.defaults)
    with pytest.raises(ModelError, match=why) as found:
        family.read(file)
    assert key in str(found.value)


def test_letters_say_the_same_as_names() -> None:
    family = families()["nemotron_h"]
    named = family.read(ModelFile(Path("config.json"), {**SIZES, **HYBRID}, family.defaults))
    spelled = {**SIZES, **HYBRID, "hybrid_override_pattern": "ME*-", "layers_block_type": None}
    assert family.read(ModelFile(Path("config.json"), spelled, family.defaults)) == named
