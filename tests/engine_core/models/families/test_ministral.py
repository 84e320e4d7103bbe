from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Ministral3Config, MinistralConfig, PreTrainedConfig

from penstock.engine_core.models.spec import read_spec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, check_parity

YARN: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.4,
}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "ministral": (
        MinistralConfig,
        {
            "head_dim": 16,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (Ministral3Config, {"head_dim": 16, "rope_parameters": YARN}),
    "ministral3, window": (Ministral3Config, {"head_dim": 24, "sliding_window": 13, "rope_parameters": YARN}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}))


def test_positions_of_ministral_3_are_not_guessed(tmp_path: Path) -> None:
    config = Ministral3Config(**SIZES).to_dict() | {"architectures": ["Ministral3ForCausalLM"]}
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json: rope_parameters is None; .*an object is expected"):
        read_spec(tmp_path)
