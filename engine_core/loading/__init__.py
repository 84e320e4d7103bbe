"""Weights: from safetensors files, or random ones for speed work, straight into a model's own memory."""

from __future__ import annotations

from pathlib import Path

from engine_core.loading.checkpoint import read_checkpoint
from engine_core.loading.dummy import fill_random
from engine_core.models.decoder import Decoder


def load(model: Decoder, folder: Path, load_format: str = "auto", seed: int = 0) -> None:
    """Fill `model` from `folder`; the format is auto, safetensors or dummy (random, nothing is read).

    Raises ModelError naming the file and the tensor: missing, truncated, of a wrong shape or type, unknown, pickled.
    """
    if load_format == "dummy":
        fill_random(model.destinations(), seed)
    else:
        read_checkpoint(folder, model.destinations())
