"""Small random models of text and images, as transformers writes them, and their vision encoders as Penstock reads
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from penstock.engine_core.distributed.group import ALONE
from penstock.engine_core.loading import load
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights
from penstock.engine_core.models.vision.tower import Tower, tower

TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip


def write(folder: Path, config: PreTrainedConfig, processor: Mapping[str, Any]) -> Any:
    """A random model with numbers that make every part count, in fp32."""
    torch.manual_seed(11)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "pos_embed" in name else parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def read_tower(folder: Path, dtype: torch.dtype = torch.float32) -> Tower:
    """The encoder of a folder with its weights, which a start has checked."""
    spec = read_spec(folder)
    assert spec.vision is not None, "it sees images"
    check_weights(folder, spec)
    device = torch.device("cpu")
    made = tower(spec.vision, Placement(dtype, device, ALONE))
    load(build(spec, dtype, device, 64), folder, tower=made)
    return made


def read_model(folder: Path) -> Decoder:
    """The text half of a folder with its weights."""
    spec = read_spec(folder)
    model = build(spec, torch.float32, torch.device("cpu"), spec.max_position)
    load(model, folder)
    return model


def random_image(height: int, width: int, seed: int = 3) -> Tensor:
    """Pixels, uint8 `[height, width, 3]`."""
    return torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
