from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2Config, Lfm2MoeConfig, PreTrainedConfig

from penstock.engine_core.models.families import families
from penstock.engine_core.models.reading import ModelFile
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, check_parity

KINDS: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"]}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "lfm2": (Lfm2Config, {**KINDS, "block_multiple_of": 24}),
    "lfm2, biases, a width as it is, a convolution of four": (
        Lfm2Config,
        {"full_attn_idxs": [2], "block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 4,
         "tie_word_embeddings": False},
    ),
    "lfm2_moe": (
        Lfm2MoeConfig,
        {**KINDS, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1,
         "routed_scaling_factor": 1.5},
    ),
    "lfm2_moe, no bias, shares as they are": (
        Lfm2MoeConfig,
        {**KINDS, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_dense_layers": 0,
         "use_expert_bias": False, "norm_topk_prob": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}), chance=2.0)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("layer_types", ["conv"] * 3, "at least one layer attends"),
        ("layer_types", ["conv", "full_attention"], "it must name full_attention or conv"),
        ("full_attn_idxs", [3], "a list of layers, 0 to 2"),
        ("conv_L_cache", 5, "2 to 4"),
        ("tie_embedding", False, "tie_word_embeddings says otherwise"),
    ],
)
def test_what_is_refused(key: str, value: Any, why: str) -> None:
    family = families()["lfm2"]
    values = {**SIZES, **(KINDS if key != "full_attn_idxs" else {}), key: value}
    file = ModelFile(Path("config.json"), values, family.defaults)
    with pytest.raises(ModelError, match=why) as found:
        family.read(file)
    assert key in str(found.value)
