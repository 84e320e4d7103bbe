"""What a folder says of its image processor is read as transformers reads it; what is not known is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.engine_core.images.processor_spec import FixedSize, LongestEdge, ProcessorSpec, SmartResize
from penstock.engine_core.models.image_processor import CLIP_MEAN, CLIP_STD, HALF, read_processor
from penstock.protocol.errors import ModelError

QWEN = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD), "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
GEMMA = {
    "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5] * 3, "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256,
    "image_std": [0.5] * 3, "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None, "processor_class": "Gemma3Processor", "resample": 2,
    "rescale_factor": 0.00392156862745098, "size": {"height": 896, "width": 896},
}  # fmt: skip
PIXTRAL = {
    "crop_size": None, "data_format": "channels_first", "default_to_square": True, "device": None,
    "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": list(CLIP_MEAN), "image_processor_type": "PixtralImageProcessorFast", "image_std": list(CLIP_STD),
    "input_data_format": None, "patch_size": 14, "processor_class": "PixtralProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "return_tensors": None, "size": {"longest_edge": 1540},
}  # fmt: skip
READ = {
    "qwen": (QWEN, "qwen2_5_vl", 28, SmartResize(least=3136, most=12845056, factor=28), CLIP_MEAN, 3),
    "qwen3": (QWEN3, "qwen3_vl", 32, SmartResize(least=65536, most=16777216, factor=32), HALF, 3),
    "gemma": (GEMMA, "gemma3", 14, FixedSize(height=896, width=896), HALF, 2),
    "pixtral": (PIXTRAL, "mistral3", 28, LongestEdge(height=1540, width=1540, factor=28), CLIP_MEAN, 3),
    "silent qwen": ({}, "qwen3_5", 28, SmartResize(), CLIP_MEAN, 3),
    "silent gemma": ({}, "gemma3", 14, FixedSize(height=224, width=224), HALF, 2),
    "silent pixtral": ({}, "mistral3", 28, LongestEdge(height=1024, width=1024, factor=28), CLIP_MEAN, 3),
    "both": (
        {**QWEN, "size": {"shortest_edge": 1, "longest_edge": 2}}, "", 28,
        SmartResize(least=3136, most=12845056, factor=28), CLIP_MEAN, 3,
    ),
    "square": ({**GEMMA, "size": 448}, "", 14, FixedSize(height=448, width=448), HALF, 2),
}  # fmt: skip


def read(folder: Path, values: Any, model_type: str = "", cell: int = 28, **files: Any) -> ProcessorSpec | None:
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_processor(folder, model_type, cell)


@pytest.mark.parametrize("name", READ)
def test_published_files_are_read(name: str, tmp_path: Path) -> None:
    values, model_type, cell, resize, mean, resample = READ[name]
    found = read(tmp_path, values, model_type, cell)
    assert found is not None
    assert (found.resize, found.mean, found.resample) == (resize, mean, resample)
    assert found.rescale == 1 / 255


def test_defaults_are_those_of_the_classes() -> None:
    """So that a new version of transformers that changes them is noticed."""
    assert Qwen2VLImageProcessorPil.size == {"shortest_edge": SmartResize().least, "longest_edge": SmartResize().most}
    for kind, mean, std, resample in (
        (Qwen2VLImageProcessorPil, CLIP_MEAN, CLIP_STD, 3),
        (Gemma3ImageProcessorPil, HALF, HALF, 2),
        (PixtralImageProcessorPil, CLIP_MEAN, CLIP_STD, 3),
    ):
        assert (tuple(kind.image_mean), tuple(kind.image_std), int(kind.resample)) == (mean, std, resample)
        assert kind.rescale_factor == 1 / 255
        assert (kind.do_resize, kind.do_rescale, kind.do_normalize) == (True, True, True)
    assert Gemma3ImageProcessorPil.size == {"height": 224, "width": 224}
    assert PixtralImageProcessorPil.size == {"longest_edge": 1024}


def test_what_transformers_writes_now_goes_first(tmp_path: Path) -> None:
    nested = {"processor_class": "Qwen3VLProcessor", "image_processor": QWEN3}
    found = read(tmp_path, QWEN, "", 32, processor_config=nested)
    assert found is not None
    assert found.resize == READ["qwen3"][3]


def test_a_folder_without_either_file_has_no_processor(tmp_path: Path) -> None:
    assert read_processor(tmp_path, "qwen3_vl", 32) is None
    (tmp_path / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    assert read_processor(tmp_path, "mistral3", 28) is None


REFUSED = {
    "class": ({"image_processor_type": "LlavaNextImageProcessor"}, "", 28, "image_processor_type is 'LlavaNext"),
    "no class": ({}, "llava", 28, "a llava has none by default"),
    "crop": ({**QWEN, "do_center_crop": True}, "", 28, "do_center_crop is True; Penstock does not know"),
    "pad": ({**GEMMA, "do_pad": True}, "", 14, "do_pad is True"),
    "unknown": ({**QWEN3, "sharpen": 2}, "", 32, "sharpen is 2"),
    "raw": ({**QWEN, "do_normalize": False}, "", 28, "do_normalize is False; Penstock resizes"),
    "scan": ({**GEMMA, "do_pan_and_scan": True}, "", 14, "do_pan_and_scan is True; .* whole pictures"),
    "factor": (QWEN, "", 32, "patch_size is 14; with merge_size it is 28 pixels, and the vision encoder has 32"),
    "edges": ({**QWEN3, "size": {"shortest_edge": 9, "longest_edge": 8}}, "", 32, "size is .* it allows no picture"),
    "side": ({**QWEN3, "size": {"height": 9, "width": 8}}, "", 32, "size is .* it must be an object of"),
    "half a size": ({**GEMMA, "size": {"height": 9}}, "", 14, "width is None; it must be an integer"),
    "no multiple": ({**GEMMA, "size": {"height": 900, "width": 896}}, "", 14, "multiples of the vision encoder's"),
    "mean": ({**QWEN, "image_mean": [1, 2]}, "", 28, "image_mean is"),
    "std": ({**QWEN, "image_std": [1, 2, 0]}, "", 28, "it divides"),
    "filter": ({**QWEN, "resample": 9}, "", 28, "resample is 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    values, model_type, cell, complaint = REFUSED[name]
    with pytest.raises(ModelError, match=complaint) as caught:
        read(tmp_path, values, model_type, cell)
    assert "preprocessor_config.json" in str(caught.value)


def test_the_processors_patches_are_the_encoders(tmp_path: Path) -> None:
    outer = {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2}
    assert read(tmp_path, PIXTRAL, "", 28, processor_config=outer) is not None
    with pytest.raises(ModelError, match=r"processor_config\.json: patch_size is 14; with spatial_merge_size it is 14"):
        read(tmp_path, PIXTRAL, "", 28, processor_config={**outer, "spatial_merge_size": 1})
    with pytest.raises(ModelError, match="image_processor must be an object"):
        read(tmp_path, PIXTRAL, "", 28, processor_config={"image_processor": []})
