"""Pictures in the sizes that a model takes, with the arithmetic of the image processors of transformers (those that
compute by Pillow)."""

from __future__ import annotations

from PIL import Image

from penstock.engine_core.images.processor_spec import ProcessorSpec, Size
from penstock.protocol.errors import InvalidRequest


def resize(image: Image.Image, processor: ProcessorSpec, detail: str) -> Image.Image:
    """A picture in RGB as the model sees it. Raises InvalidRequest for one that is too narrow for the model."""
    size = Size(image.height, image.width)
    target = processor.target(size, detail)
    if target is None:
        sides = f"{size.width} x {size.height} pixels"
        most = processor.resize.sharpest
        message = f"it has {sides}; for this model one side may be at most {most} times the other"
        raise InvalidRequest(message, code="image_too_small")
    if target == size:  # Pillow would copy it
        return image
    return image.resize((target.width, target.height), Image.Resampling(processor.resample))
