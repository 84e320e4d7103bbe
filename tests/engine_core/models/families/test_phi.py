from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Phi3Config, Phi4MultimodalConfig, PreTrainedConfig

from tests.engine_core.models.parity import SIZES, check_parity, ours, write_checkpoint

SEEN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "crop_size": 28,
        "image_size": 28}  # fmt: skip
HEARD = {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2, "input_size": 16,
         "nemo_conv_channels": 16, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32}  # fmt: skip
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "phi3, a window": (Phi3Config, {"sliding_window": 19, "pad_token_id": 0}),
    "phi4, partly rotated": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "longrope within the short length": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2],
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "longrope beyond it": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 2.0, 3.5, 4.0],
            },
        },
    ),
    "phi4 multimodal": (
        Phi4MultimodalConfig,
        {"pad_token_id": 0, "vision_config": SEEN, "audio_config": HEARD, "sliding_window": 19},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    check_parity(tmp_path, kind(**{**SIZES, **options}))


def test_adapters_of_published_files_are_left_unread(tmp_path: Path) -> None:
    """The makers' edition of Phi 4 multimodal has two adapters beside each matrix."""
    write_checkpoint(tmp_path, Phi3Config(**{**SIZES, "pad_token_id": 0}))
    expected = {name: place.tensor for name, place in ours(tmp_path).destinations().items()}
    tensors = load_file(tmp_path / "model.safetensors")
    named = {name.replace("_proj.weight", "_proj.base_layer.weight"): tensor for name, tensor in tensors.items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        named[name.replace(".weight", ".lora_A.vision.weight")] = torch.zeros(4, 2)
    save_file({**named, "model.embed_tokens_extend.glb_GN": torch.zeros(3)}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    lora = {"r": 320, "layer": "qkv_proj", "lora_alpha": 640}
    more = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "auto_map": {"AutoModel": "a.B"}}
    more |= {"speech_lora": lora, "vision_lora": lora, "full_attn_mod": 1, "lm_head_bias": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    found = ours(tmp_path)
    assert found.spec.family == "phi4mm"
    for name, place in found.destinations().items():
        assert torch.equal(place.tensor, expected[name.replace(".base_layer", "")]), name  # type: ignore[arg-type]
