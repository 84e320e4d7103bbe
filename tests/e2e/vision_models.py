"""Tiny random models of text and images in folders of their makers' layout, with the embedded model's tokenizer, and
what transformers generates with them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.shapes import COPIED, widen
from benchmarks.vision_shapes import IMAGE_TOKENS, see
from penstock.engine_core.embedded import demo_folder

VOCABULARY = 4104
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
    "eos_token_id": 4089, "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


class SeeingModel(msgspec.Struct, frozen=True):
    """A folder, and the model that was saved there."""

    folder: Path
    model: PreTrainedModel

    def greedy(self, prompt: Sequence[int], pictures: Sequence[Image.Image], count: int) -> list[int]:
        """Tokens that transformers writes behind a prompt whose placeholders stand for these pictures."""
        processor = Qwen2VLImageProcessorPil.from_pretrained(self.folder)
        made = processor(images=list(pictures), return_tensors="pt")
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            found = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=made["pixel_values"],
                image_grid_thw=made["image_grid_thw"], mm_token_type_ids=(ids == IMAGE_TOKENS["image_token_id"]).int(),
                max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return [int(token) for token in found[0, len(prompt) :]]


def write_qwen3_vl(folder: Path) -> SeeingModel:
    """Qwen3-VL with two levels of DeepStack."""
    torch.manual_seed(3)
    config = Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE}, vision_config=VISION, tie_word_embeddings=False, **IMAGE_TOKENS
    )
    model = Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weights in model.parameters():  # far enough apart for no rounding to decide a token
            weights.copy_(torch.randn_like(weights) * (0.3 if weights.ndim > 1 else 0.1) + (weights.ndim == 1))
    model.save_pretrained(folder)
    demo = demo_folder()
    for name in COPIED:
        shutil.copyfile(demo / name, folder / name)
    tokenizer: dict[str, Any] = json.loads((demo / "tokenizer.json").read_bytes())
    see(folder, tokenizer, json.loads((folder / "config.json").read_bytes()))
    widen(tokenizer, VOCABULARY)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return SeeingModel(folder, model)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    chance = np.random.default_rng(seed)
    return Image.fromarray(chance.integers(0, 256, (height, width, 3), np.uint8))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
