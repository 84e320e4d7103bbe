from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import FalconH1Config, PreTrainedConfig

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import families
from penstock.engine_core.models.spec import decoder_spec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, check_parity

MAMBA: dict[str, Any] = {"mamba_d_ssm": 48, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.45,
    "ssm_multipliers": [0.6, 0.8, 1.4, 0.9, 0.5],
    "mlp_multipliers": [0.88, 0.3],
}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "falcon_h1": (FalconH1Config, {**MAMBA, **MULTIPLIERS}),
    "falcon_h1, a norm behind the gate, silent multipliers": (
        FalconH1Config,
        {**MAMBA, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1, "mamba_d_conv": 2,
         "mamba_conv_bias": False},
    ),
    "falcon_h1, a norm before the gate, mamba_expand, heads of another size": (
        FalconH1Config,
        {**MAMBA, **MULTIPLIERS, "mamba_rms_norm": True, "mamba_d_ssm": None, "head_dim": 24,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("attention_bias", True, "without biases"),
        ("mlp_bias", True, "without biases"),
        ("projectors_bias", True, "without biases"),
        ("mamba_proj_bias", True, "without biases"),
        ("mamba_d_head", 5, "must come to 48"),
        ("ssm_multipliers", [1.0, 1.0], "a list of 5 numbers"),
        ("mlp_multipliers", [1.0, 0.0], "a list of 2 numbers above 0"),
        ("mlp_multipliers", [1.0, True], "a list of 2 numbers above 0"),
        ("key_multiplier", 0.0, "a number of"),
        ("value_multiplier", 0.5, "does not know"),
    ],
)
def test_what_is_refused(key: str, value: Any, why: str) -> None:
    file = ConfigFile(Path("config.json"), {**SIZES, **MAMBA, key: value})
    with pytest.raises(ModelError, match=why) as found:
        decoder_spec(file, families()["falcon_h1"])
    assert key in str(found.value)
