"""Gemma 3's vision encoder against transformers', and what is said of it in a published config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3Config, Gemma3ImageProcessorPil

from benchmarks.vision_shapes import tower_flops
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.attention import Pages
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.spec import read_spec
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


@torch.inference_mode()
def test_operations(tmp_path: Path) -> None:
    """As torch counts those of transformers."""
    reference = write(tmp_path, CONFIG, PROCESSOR)
    reference.set_attn_implementation("eager")
    spec, size = read_spec(tmp_path).vision, Size(SIDE, SIDE)
    assert spec is not None
    with FlopCounterMode(display=False) as counted:
        expected(reference, random_image(*size))
    assert tower_flops(spec, size) == counted.get_total_flops()


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
            images = ImageRows(self.row_of[positions], self.rows)
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
