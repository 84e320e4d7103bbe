"""The text half of models of text and images: the numbers under `text_config`, tensors under names of their own, and
encoders that are left unread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights, unread_tensors
from penstock.engine_core.models.weight_files import read_names
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, PagedRun, ours, random_prompts

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
CLIP = {**VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
TEXT = {**SIZES, "head_dim": 16, "pad_token_id": 0}
CASES: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config={**TEXT, "sliding_window": 11, "sliding_window_pattern": 3}, vision_config=CLIP,
        mm_tokens_per_image=4, image_token_index=5, boi_token_index=6, eoi_token_index=7,
    ),
    "mistral3": Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None}, image_token_index=5,
        vision_config={**CLIP, "model_type": "pixtral", "head_dim": 16},
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={**SIZES, "pad_token_id": 0, "rope_parameters": MROPE}, image_token_id=5, video_token_id=6,
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64},
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}}, image_token_id=5,
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
                       "deepstack_visual_indexes": [0]}, video_token_id=6,
    ),
}  # fmt: skip


def write(folder: Path, config: PreTrainedConfig) -> Any:
    """A random checkpoint, as transformers writes it."""
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    reference, prompts = write(tmp_path, CASES[case]), random_prompts(2)
    prompts = [[token + 8 * (token < 8) for token in prompt] for prompt in prompts]  # no image's
    expected = reference(input_ids=torch.tensor(prompts)).logits
    model = ours(tmp_path)
    check_weights(tmp_path, model.spec)
    run = PagedRun(model, prompts)
    run.prefill()
    for sequence, logits in zip(run.sequences, expected, strict=True):
        torch.testing.assert_close(torch.cat(sequence.logits), logits, atol=1e-4, rtol=0)
    assert sum(unread_tensors(model.spec, read_names(tmp_path)).values()) > 5


def test_both_spellings_of_names_are_read(tmp_path: Path) -> None:
    """Checkpoints of today, and of before the text half became a part of the model."""
    write(tmp_path, CASES["gemma3"])
    before = {name: place.tensor for name, place in ours(tmp_path).destinations().items()}
    tensors = load_file(tmp_path / "model.safetensors")
    named = {name: name.replace("language_model.model.", "model.language_model.") for name in tensors}
    if list(named) == list(named.values()):
        named = {name: name.replace("model.language_model.", "language_model.model.") for name in tensors}
    assert list(named) != list(named.values())
    save_file({named[name]: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for name, place in ours(tmp_path).destinations().items():
        assert torch.equal(place.tensor, before[name]), name  # type: ignore[arg-type]


def test_another_familys_text_half_is_refused(tmp_path: Path) -> None:
    write(tmp_path, CASES["mistral3"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "ministral3"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"text_config is of 'ministral3'; Penstock serves mistral"):
        read_spec(tmp_path)
