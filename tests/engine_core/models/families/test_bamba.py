from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import BambaConfig, PreTrainedConfig

from penstock.engine_core.models.families import families
from penstock.engine_core.models.reading import ModelFile
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, check_parity

MAMBA: dict[str, Any] = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "bamba": (BambaConfig, MAMBA),
    "bamba, biases, one group, a convolution of two": (
        BambaConfig,
        {**MAMBA, "mamba_n_groups": 1, "mamba_d_conv": 2, "mamba_conv_bias": False, "attention_bias": True,
         "mlp_bias": True, "tie_word_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("attn_layer_indices", [], "at least one"),
        ("attn_layer_indices", [3], "0 to 2"),
        ("mamba_n_groups", 3, "divide mamba_n_heads"),
        ("mamba_d_head", 5, "must come to 128"),
        ("mamba_d_conv", 5, "2 to 4"),
        ("mamba_proj_bias", True, "without biases"),
        ("time_step_limit", [0.0, 0.1], "without limits"),
    ],
)
def test_what_is_refused(key: str, value: Any, why: str) -> None:
    family = families()["bamba"]
    file = ModelFile(Path("config.json"), {**SIZES, **MAMBA, key: value}, family.defaults)
    with pytest.raises(ModelError, match=why) as found:
        family.read(file)
    assert key in str(found.value)
