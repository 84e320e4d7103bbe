"""LoRA adapters of tiny models as peft writes and applies them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.engine_core.models.parity import theirs

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(base: Path, folder: Path, seed: int = 0, **config: Any) -> PeftModel:
    """A random adapter for the model in `base`, of a scale at which every part of it matters; the model with it."""
    config = {"target_modules": SEVEN, "r": 4, "lora_alpha": 8, **config}
    with warnings.catch_warnings():  # peft asks transformers for what is deprecated, and warns of options
        warnings.simplefilter("ignore")
        model = get_peft_model(theirs(base), LoraConfig(**config))
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
        model.save_pretrained(folder)
    return model.eval()


def greedy(model: torch.nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """What the model says to a prompt."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def changed(folder: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """The folder with other settings and tensors: None takes a tensor away."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors:
        weights = folder / "adapter_model.safetensors"
        held = load_file(weights) | tensors
        save_file({name: tensor for name, tensor in held.items() if tensor is not None}, weights)
    return folder
