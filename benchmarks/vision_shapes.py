"""What shapes that see images have beside their text halves: towers, tokens of images, Qwen's image processor."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.vision_kinds import vision_shapes
from penstock.engine_core.models.vision_spec import VisionSpec

WITHIN = re.compile(r"\.(layers|blocks)\.|pos_embed|position_embedding")  # names of tensors that no row goes through
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # around an image, behind the embedded model's tokens
REFUSAL = "{{- raise_exception('The demo model reads text only.') -}}"  # of its template, in place of an image
IMAGE_TOKENS = {"vision_start_token_id": 4096, "image_token_id": 4097, "vision_end_token_id": 4098}
TOWER: Mapping[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
# Of Qwen3.5-9B.
NINE_TOWER: Mapping[str, Any] = {
    **TOWER,
    "model_type": "qwen3_5",
    "deepstack_visual_indexes": [],
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 4096,
}
NINE_ROPE: Mapping[str, Any] = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
# Of Qwen3-VL-2B.
TWO_TOWER: Mapping[str, Any] = {
    **TOWER,
    "model_type": "qwen3_vl",
    "deepstack_visual_indexes": [5, 11, 17],
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "out_hidden_size": 2048,
}
TWO_ROPE: Mapping[str, Any] = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
TWO_TEXT: Mapping[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl_text",
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 4089,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 5000000, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def seeing(text: Mapping[str, Any], tower: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a wrapper around a text half. rope: what M-RoPE adds to its rotary settings."""
    family = str(tower["model_type"])
    wrapper = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration"}[family]
    inner = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "architectures": [wrapper],
        "model_type": family,
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vocab_size": text["vocab_size"],
        **IMAGE_TOKENS,
        "text_config": {**inner, "rope_parameters": {**text["rope_parameters"], **rope}},
        "vision_config": dict(tower),
    }


def see(folder: Path, tokenizer: dict[str, Any], config: Mapping[str, Any]) -> None:
    """What a folder has of images."""
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    for name, mark in zip(names, MARKS, strict=True):
        token = {"id": config[name], "content": mark, "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({**token, **flags})
    template = folder / "chat_template.jinja"
    written = template.read_text()
    assert REFUSAL in written, "the embedded model's template"
    template.write_text(written.replace(REFUSAL, "{{- '" + "".join(MARKS) + "' -}}"))
    vision = config["vision_config"]
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": vision["spatial_merge_size"],
        "patch_size": vision["patch_size"],
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "temporal_patch_size": vision["temporal_patch_size"],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))


def tower_flops(spec: VisionSpec, size: Size) -> int:
    """Operations of an image, two for each product of numbers."""
    row_weights = sum(math.prod(shape) for name, shape in vision_shapes(spec).items()
                      if len(shape) == 2 and not WITHIN.search(name))  # fmt: skip
    patches, layers = spec.patches(size), spec.taken or spec.layers
    layer = spec.hidden * (4 * spec.hidden + (2 + spec.gated) * spec.width)
    pairs = sum(patches**2 if not spec.window or at in spec.full else window_pairs(spec, size) for at in range(layers))
    products = patches * (spec.patch_numbers * spec.hidden + layers * layer) + spec.rows(size) * row_weights
    return 2 * (products + 2 * spec.hidden * pairs)


def window_pairs(spec: VisionSpec, size: Size) -> int:
    """Pairs of patches of one window."""
    side = spec.window // spec.cell * spec.merge  # patches
    lines, columns = (
        sum(min(side, count - start) ** 2 for start in range(0, count, side))
        for count in (size.height // spec.patch, size.width // spec.patch)
    )
    return lines * columns
