"""Groups of modules with a scheme each, as compressed-tensors has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from penstock.engine_core.models.quantization.compressed_tensors import selector
from penstock.engine_core.models.weight_files import SINGLE
from tests.engine_core.models.parity import SIZES, PagedRun, ours, random_prompts, theirs
from tests.engine_core.models.quantized_folders import CONFIGS, write_pair

PACKED = ".weight_packed"


def test_targets_are_names_or_patterns() -> None:
    found = selector(["re:.*k_proj", "lm_head"])
    assert found.matches("layers.0.self_attn.k_proj")
    assert found.matches("lm_head")
    assert not found.matches("layers.0.self_attn.q_proj")


@pytest.mark.parametrize(("name", "tolerance"), [("w4a16", 1e-5), ("w8a16", 1e-5), ("fp8 channels", 5e-3)])
def test_transformers_reads_the_same(tmp_path: Path, name: str, tolerance: float) -> None:
    """Through the library, which rounds rows to 8 bits, too: a quotient that is almost a half may go the other way."""
    quantized, _ = write_pair(tmp_path, LlamaConfig(**{**SIZES, "intermediate_size": 128}), CONFIGS[name])
    as_library_writes(quantized, CONFIGS[name])
    prompts = random_prompts(2)
    with torch.inference_mode():
        expected = theirs(quantized)(torch.tensor(prompts)).logits
        run = PagedRun(ours(quantized), prompts)
        run.prefill()
    found = torch.stack([torch.cat(sequence.logits) for sequence in run.sequences])
    assert (found - expected).norm() < tolerance * expected.norm()


def as_library_writes(folder: Path, quantization: dict[str, Any]) -> None:
    """With the shapes that it wants of packed weights, and the word that they are compressed."""
    tensors = load_file(folder / SINGLE)
    bits = quantization["config_groups"]["group_0"]["weights"]["num_bits"]
    for packed in [name for name in tensors if name.endswith(PACKED)]:
        outputs, words = tensors[packed].shape
        tensors[packed.replace(PACKED, ".weight_shape")] = torch.tensor([outputs, words * 32 // bits])
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quantization_status"] = "compressed"
    (folder / "config.json").write_text(json.dumps(config))
