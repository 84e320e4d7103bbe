"""The vision encoder of Mistral 3 against transformers', and what is said of it in a published config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Mistral3Config, PixtralImageProcessorPil

from benchmarks.vision_shapes import tower_flops
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.vision.vision_folders import TEXT, random_image, read_tower, write

VISION: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 112, "hidden_act": "silu",
}  # fmt: skip
MISTRAL = {**TEXT, "model_type": "mistral", "rms_norm_eps": 1e-3, "sliding_window": None}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1e4,
    "max_position_embeddings": 512,
}  # fmt: skip
MINISTRAL = {**TEXT, "model_type": "ministral3", "rope_parameters": YARN}
CASES = {
    "mistral": Mistral3Config(text_config=MISTRAL, vision_config=VISION, image_token_index=5),
    "ministral3": Mistral3Config(
        text_config=MINISTRAL, vision_config={**VISION, "hidden_act": "gelu"}, image_token_index=5,
        multimodal_projector_bias=True, projector_hidden_act="silu",
    ),
    "cells of 12 pixels": Mistral3Config(
        text_config=MISTRAL, vision_config=VISION, image_token_index=5, spatial_merge_size=3
    ),
    "the last but one layer": Mistral3Config(
        text_config=MISTRAL, vision_config=VISION, image_token_index=5, vision_feature_layer=-2
    ),
    "the first layer": Mistral3Config(
        text_config=MISTRAL, vision_config=VISION, image_token_index=5, vision_feature_layer=[1]
    ),
}  # fmt: skip
SHAPES = [(1, 2), (1, 9), (8, 1), (5, 7), (7, 3)]  # lines and columns of cells
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "PixtralImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "patch_size": 14, "processor_class": "PixtralProcessor",
    "resample": 3, "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 1540},
}  # fmt: skip


def expected(model: Any, pixels: Tensor, cell: int) -> Tensor:
    """Rows of transformers."""
    processor = PixtralImageProcessorPil(
        image_mean=PROCESSOR["image_mean"], image_std=PROCESSOR["image_std"], patch_size=cell,
        size={"longest_edge": 1540},
    )  # fmt: skip
    found = processor(pixels.permute(2, 0, 1).numpy(), return_tensors="pt", input_data_format="channels_first")
    made = model.model.get_image_features(found["pixel_values"], image_sizes=found["image_sizes"], return_dict=True)
    rows: Tensor = made.pooler_output[0]
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_rows(case: str, tmp_path: Path) -> None:
    """Also encoded slice by slice, with a slice for each layer that counts."""
    reference = write(tmp_path, CASES[case], PROCESSOR)
    encoder = read_tower(tmp_path)
    cell = encoder.spec.cell
    for lines, columns in SHAPES:
        pixels = random_image(lines * cell, columns * cell)
        *waits, rows = encoder.slices(pixels)
        assert rows is not None
        torch.testing.assert_close(rows, expected(reference, pixels, cell), atol=1e-5, rtol=1e-5)
        assert rows.shape == (lines * columns, TEXT["hidden_size"])
        assert torch.equal(rows, encoder.encode(pixels))
        assert waits == [None] * (1 + encoder.spec.taken)
    assert encoder.encode(random_image(cell, cell)).shape == (1, TEXT["hidden_size"])


@torch.inference_mode()
def test_operations(tmp_path: Path) -> None:
    """As torch counts those of transformers."""
    reference = write(tmp_path, CASES["mistral"], PROCESSOR)
    reference.set_attn_implementation("eager")
    spec, size = read_spec(tmp_path).vision, Size(40, 56)
    assert spec is not None
    with FlopCounterMode(display=False) as counted:
        expected(reference, random_image(*size), 8)
    assert tower_flops(spec, size) == counted.get_total_flops()


@pytest.mark.parametrize(
    "name",
    ["vision_tower.ln_pre.weight", "vision_tower.transformer.layers.2.feed_forward.up_proj.weight",
     "multi_modal_projector.patch_merger.merging_layer.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, CASES["mistral"], PROCESSOR)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    assert name in held
    save_file({key: held[key] for key in held if key != name}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=name):
        read_tower(tmp_path)


@torch.inference_mode()
def test_names_within_the_model(tmp_path: Path) -> None:
    """As some versions of transformers have saved it."""
    reference = write(tmp_path, CASES["mistral"], PROCESSOR)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    save_file({f"model.{name}" if name.startswith(("vision", "multi")) else name: held[name] for name in held}, path)
    pixels = random_image(24, 40)
    torch.testing.assert_close(read_tower(tmp_path).encode(pixels), expected(reference, pixels, 8), atol=1e-5, rtol=0.0)
