"""LoRA folders for a model of `small_spec`, and the names of a server that serves it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from penstock.protocol.config import Config
from penstock.services.client.adapters import AdapterNames
from tests.engine_core.models.specs import small_spec

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def write_folder(folder: Path, rank: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    halves = {"A": np.ones((rank, 32), np.float32), "B": np.ones((32, rank), np.float32)}
    tensors = {f"{PREFIX}.lora_{half}.weight": array for half, array in halves.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def names_of(run_dir: Path | None = None, modules: str = "", directory: Path | None = None) -> AdapterNames:
    """What one api process knows; the model is called demo and demo-alias."""
    config = Config()
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, enable_lora=True),
        api=msgspec.structs.replace(config.api, lora_modules=modules, lora_dir=str(directory or "")),
        run=msgspec.structs.replace(config.run, run_dir=str(run_dir or "")),
    )
    return AdapterNames(config, small_spec(layers=1), ("demo", "demo-alias"))
