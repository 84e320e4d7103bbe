"""Pixel values are those of the image processors of transformers, to the last bit (reading.py, resize.py)."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.engine_core.images.picture import Picture, digest_of
from penstock.engine_core.images.processor_spec import FixedSize, LongestEdge, ProcessorSpec, Size, SmartResize
from penstock.engine_core.models.image_processor import CLIP_MEAN, CLIP_STD, HALF
from penstock.protocol.errors import InvalidRequest
from tests.engine_core.images.pictures import files, noise, read_picture, write

MOST = 1 << 30
QWEN2 = ProcessorSpec(mean=CLIP_MEAN, std=CLIP_STD)
QWEN3 = ProcessorSpec(mean=HALF, std=HALF, resize=SmartResize(least=65536, most=16777216, factor=32))
SMALL = ProcessorSpec(mean=HALF, std=HALF, resize=SmartResize(least=3136, most=50_000, factor=28))
GEMMA = ProcessorSpec(mean=HALF, std=HALF, resize=FixedSize(height=896, width=896), resample=2)
PIXTRAL = ProcessorSpec(mean=CLIP_MEAN, std=CLIP_STD, resize=LongestEdge(height=1540, width=1540, factor=28))
SPECS = {"qwen2": QWEN2, "qwen3": QWEN3, "small": SMALL, "gemma": GEMMA, "pixtral": PIXTRAL}


def oracle(name: str) -> Any:
    match name:
        case "qwen2":
            return Qwen2VLImageProcessorPil()
        case "qwen3":
            return Qwen2VLImageProcessorPil(
                size={"shortest_edge": 65536, "longest_edge": 16777216}, patch_size=16, image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
            )  # fmt: skip
        case "small":
            return Qwen2VLImageProcessorPil(
                min_pixels=3136, max_pixels=50_000, image_mean=[0.5] * 3, image_std=[0.5] * 3
            )
        case "gemma":
            return Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
        case _:
            return PixtralImageProcessorPil(size={"longest_edge": 1540}, patch_size=28)


def values(picture: Picture, spec: ProcessorSpec) -> NDArray[np.float32]:
    """[3, height, width], as `ProcessorSpec` says."""
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
    rescaled = (pixels.astype(np.float64) * spec.rescale).astype(np.float32)
    return ((rescaled - np.float32(spec.mean)) / np.float32(spec.std)).transpose(2, 0, 1)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", SPECS)
def test_pixel_values_are_those_of_transformers(name: str) -> None:
    """All files with each processor; those that one of them cannot resize are refused."""
    spec, processor = SPECS[name], oracle(name)
    compared = 0
    for what, data in files().items():
        image = load_image(Image.open(io.BytesIO(data)))
        try:
            expected = processor(images=[image], return_tensors="np")["pixel_values"]
        except ValueError:
            with pytest.raises(InvalidRequest, match="one side may be at most"):
                read_picture(data, "auto", spec, MOST)
            continue
        picture = read_picture(data, "high", spec, MOST)
        found: NDArray[np.float32] = values(picture, spec)
        if name in ("gemma", "pixtral"):
            expected = expected[0]
        else:
            factor = processor.patch_size
            found, _, _ = processor.patchify(found, factor, processor.merge_size, processor.temporal_patch_size)
        assert found.dtype == expected.dtype == np.float32
        assert np.array_equal(found, expected), what
        compared += 1
    assert compared > 35


def test_low_detail_is_fitted_into_512_pixels_first() -> None:
    """What that leaves goes through the processor's own limits; a picture that fits, and one size for all, stay."""
    wide, tiny = Size(1000, 4000), Size(30, 40)
    assert QWEN2.target(wide, "low") == QWEN2.resize.target(Size(128, 512)) == (140, 504)
    assert PIXTRAL.target(wide, "low") == (140, 532), "the next multiple above 512"
    assert GEMMA.target(wide, "low") == GEMMA.target(wide, "high") == (896, 896)
    for spec in SPECS.values():
        assert spec.target(tiny, "low") == spec.target(tiny, "auto")
        for detail in ("auto", "high", "original"):
            assert spec.target(wide, detail) == spec.resize.target(wide)
    assert QWEN2.target(Size(30, 5970), "low") is not None, "as narrow as it may be"


def test_what_is_too_narrow_is_refused() -> None:
    narrow = write(noise(1005, 5), "PNG")
    for detail in ("auto", "low"):
        with pytest.raises(InvalidRequest) as caught:
            read_picture(narrow, detail, QWEN2, MOST)
        assert (
            caught.value.message == "it has 1005 x 5 pixels; for this model one side may be at most 200 times the other"
        )
        assert caught.value.code == "image_too_small"
    with pytest.raises(InvalidRequest, match="at most 1540 times the other"):
        read_picture(write(noise(3200, 2), "PNG"), "auto", PIXTRAL, MOST)


def test_a_digest_names_a_file_and_the_detail_that_changes_its_pixels() -> None:
    file = write(noise(56, 28), "PNG")
    one = read_picture(file, "auto", SMALL, MOST)
    assert one.digest == digest_of(file, "auto") == digest_of(file, "high")
    assert len(one.digest) == 16
    others = digest_of(file, "low"), digest_of(file + b"1", "auto"), digest_of(b"full" + file, "auto")
    assert len({one.digest, *others}) == 4
