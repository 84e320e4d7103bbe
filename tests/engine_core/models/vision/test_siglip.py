"""Gemma 3's vision encoder against transformers', and what is said of it in a published config.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3Config, Gemma3ImageProcessorPil

from penstock.engine_core.images.processor_spec import FixedSize, Size
from penstock.engine_core.models.attention import Pages
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.vision_kinds import vision_shapes
from penstock.engine_core.models.vision_spec import ProjectionSpec
from penstock.kernels.records import AttentionBatch, ImageRows
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import PagedRun
from tests.engine_core.models.vision.vision_folders import TEXT, random_image, read_model, read_tower, write

SIDE = 32
VISION: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": SIDE, "vision_use_head": False,
}  # fmt: skip
TOKENS = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
CONFIG = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, **TOKENS)
PROCESSOR: dict[str, Any] = {
    "do_pan_and_scan": None, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Gemma3ImageProcessor",
    "image_std": [0.5, 0.5, 0.5], "resample": 2, "rescale_factor": 1 / 255, "size": {"height": SIDE, "width": SIDE},
}  # fmt: skip
INNER = "vision_tower.vision_model."
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def expected(model: Any, pixels: Tensor) -> Tensor:
    """Rows of transformers."""
    processor = Gemma3ImageProcessorPil(**{key: PROCESSOR[key] for key in ("image_mean", "image_std", "size")})
    found = processor(pixels.permute(2, 0, 1).numpy(), return_tensors="pt", input_data_format="channels_first")
    rows: Tensor = model.model.get_image_features(found["pixel_values"], return_dict=True).pooler_output
    return rows.view(-1, rows.shape[-1])


@torch.inference_mode()
@pytest.mark.parametrize("rows", [4, 64])
def test_rows(rows: int, tmp_path: Path) -> None:
    """Of cells of several patches, and of single ones; also encoded slice by slice, with a slice for each layer."""
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=rows, **TOKENS)
    reference = write(tmp_path, config, PROCESSOR)
    encoder = read_tower(tmp_path)
    pixels = random_image(SIDE, SIDE)
    *waits, found = encoder.slices(pixels)
    assert found is not None
    torch.testing.assert_close(found, expected(reference, pixels), atol=1e-5, rtol=1e-5)
    assert found.shape == (encoder.spec.rows(Size(SIDE, SIDE)), encoder.spec.row_width) == (rows, TEXT["hidden_size"])
    assert torch.equal(found, encoder.encode(pixels))
    assert waits == [None] * (1 + VISION["num_hidden_layers"])


def rename(folder: Path, prefix: str, place: str) -> None:
    """Spell the encoder's tensors in another of the ways that files have."""
    path = folder / "model.safetensors"
    held = {name.replace(INNER, "vision_tower."): tensor for name, tensor in load_file(path).items()}
    save_file(
        {
            prefix + name.replace("vision_tower.", place) if name.startswith(("vision", "multi")) else name: tensor
            for name, tensor in held.items()
        },
        path,
        {"format": "pt"},
    )


@torch.inference_mode()
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("place", ["vision_tower.", INNER])
def test_names_of_older_and_newer_files(prefix: str, place: str, tmp_path: Path) -> None:
    reference = write(tmp_path, CONFIG, PROCESSOR)
    rename(tmp_path, prefix, place)
    pixels = random_image(SIDE, SIDE)
    found = read_tower(tmp_path).encode(pixels)
    torch.testing.assert_close(found, expected(reference, pixels), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["vision_tower.post_layernorm.bias", "multi_modal_projector.mm_input_projection_weight"]
)
def test_a_missing_tensor_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIG, PROCESSOR)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    assert name in held
    save_file({key: held[key] for key in held if key != name}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=name):
        read_tower(tmp_path)


def test_a_published_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    size = {"height": 896, "width": 896}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "size": size}))
    spec = read_spec(tmp_path).vision
    assert spec is not None
    assert (spec.kind, spec.token_id, spec.mutual, spec.mrope) == ("siglip", 262144, True, False)
    assert (spec.layers, spec.hidden, spec.heads, spec.head_dim, spec.width) == (27, 1152, 16, 72, 4304)
    assert (spec.patch, spec.positions, spec.merge, spec.pooled, spec.outputs) == (14, 64, 4, 256, 2560)
    assert (spec.activation, spec.gated, spec.bias, spec.theta) == ("gelu_tanh", False, True, 0.0)
    assert spec.norm == NormSpec(eps=1e-6, centered=True)
    assert spec.projection == ProjectionSpec(norm=NormSpec(eps=1e-6, offset=1.0))
    assert spec.processor.resize == FixedSize(height=896, width=896)
    assert spec.rows(Size(896, 896)) == 256
    shapes = vision_shapes(spec)
    assert shapes[f"{INNER}embeddings.position_embedding.weight"] == (4096, 1152)
    assert shapes["multi_modal_projector.mm_input_projection_weight"] == (1152, 2560)
    assert len(shapes) == 7 + 27 * 16


def changed(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **outer: Any) -> dict[str, Any]:
    config = CONFIG.to_dict()
    config["architectures"] = ["Gemma3ForConditionalGeneration"]
    config["vision_config"].update(vision or {})
    config["text_config"].update(text or {})
    return {**config, **outer}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (changed({"image_size": 34}), "image_size is 34; patches of 4 pixels do not fill it"),
        (changed({"image_size": 64}), "image_size is 64; the image processor makes another of pictures"),
        (changed({"num_attention_heads": 5}), "num_attention_heads is 5; the hidden_size of 48"),
        (changed({"num_channels": 4}), "num_channels is 4; Penstock serves images of 3"),
        (changed({"hidden_act": "relu"}), "hidden_act is 'relu'; Penstock serves"),
        (changed({"rope_theta": 3.0}), "rope_theta is 3.0; Penstock does not know"),
        (changed(mm_tokens_per_image=9), "mm_tokens_per_image is 9; the square of a divisor of 8"),
        (changed(mm_tokens_per_image=8), "mm_tokens_per_image is 8; the square of a divisor of 8"),
        (changed(image_token_index=96), "image_token_id: 96, and the text half has room for 95"),
        (changed(image_token_index="<image>"), "image_token_index is '<image>'; it must be an integer"),
    ],
)
def test_what_is_not_served_is_refused(config: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    with pytest.raises(ModelError, match=complaint):
        read_spec(tmp_path)


def test_another_name_of_the_placeholder(tmp_path: Path) -> None:
    config = changed(image_token_id=9)
    del config["image_token_index"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    spec = read_spec(tmp_path)
    assert spec.vision is not None
    assert spec.vision.token_id == 9
    assert structs.replace(spec.without_vision(), vision=spec.vision).blocks == spec.blocks


class Illustrated:
    """A decoder for one sequence, whose tokens of images have rows of embeddings, and see their image to its end."""

    def __init__(self, model: Decoder, ids: Tensor, rows: Tensor) -> None:
        self.model, self.spec, self.dtype, self.rows = model, model.spec, model.dtype, rows
        image = ids == TOKENS["image_token_index"]
        self.row_of = torch.where(image, image.cumsum(0) - 1, -1)
        ends = (image & ~image.roll(-1)).nonzero().flatten()  # of each image its last token
        positions = torch.arange(len(ids))
        self.limits = torch.where(image, ends[torch.searchsorted(ends, positions).clamp(max=len(ends) - 1)], 0)

    def forward(self, ids: Tensor, positions: Tensor, batch: AttentionBatch, cache: Sequence[Pages]) -> Tensor:
        if int(positions[-1]) < len(self.limits):
            rows = self.row_of[positions]
            tokens = (rows >= 0).nonzero().flatten()
            images = ImageRows(tokens, rows[tokens], self.rows)
            batch = replace(batch, limits=self.limits[positions], images=images)
        return self.model.forward(ids, positions, batch, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


@torch.inference_mode()
@pytest.mark.parametrize("window", [6, 24])
def test_logits_of_text_and_images(window: int, tmp_path: Path) -> None:
    """Windows shorter and longer than an image, of which two stand behind each other but for one token; by chunks, by
    one that begins within an image, as behind a prefix hit, and for tokens generated behind them."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**TEXT, "num_hidden_layers": 3, "sliding_window": window, "layer_types": kinds}
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=16, **TOKENS)
    reference = write(tmp_path, config, PROCESSOR)
    encoder, decoder = read_tower(tmp_path), read_model(tmp_path)
    images = [random_image(SIDE, SIDE, seed) for seed in range(3)]
    image = [TOKENS["image_token_index"]] * 16
    ids = [11, 12, 13, *image, 14, *image, 15, 16, 17, 18, 19, 20, 21, *image, 22, 23]
    given = torch.tensor([ids])
    types = (given == image[0]).long()
    processor = Gemma3ImageProcessorPil(**{key: PROCESSOR[key] for key in ("image_mean", "image_std", "size")})
    pixels = processor([one.numpy() for one in images], return_tensors="pt", input_data_format="channels_last")
    arguments = {"input_ids": given, "pixel_values": pixels["pixel_values"], "token_type_ids": types}
    expected = reference(**arguments).logits[0]
    illustrated = Illustrated(decoder, given[0], torch.cat([encoder.encode(one) for one in images]))
    run = PagedRun(illustrated, [ids])  # type: ignore[arg-type]
    for count in (2, 17, 1, 17, 24):  # none ends within an image
        run.step([count])
    sequence = run.sequences[0]
    torch.testing.assert_close(torch.cat(sequence.logits), expected, atol=1e-4, rtol=0.0)
    for first in (10, 50):
        sequence.computed = first
        run.step([len(ids) - first])
        torch.testing.assert_close(sequence.logits[-1], expected[first:], atol=1e-4, rtol=0.0)
    written = reference.generate(**arguments, do_sample=False, max_new_tokens=8, min_new_tokens=8, eos_token_id=None)
    assert run.greedy(8) == written[:, len(ids) :].tolist()
