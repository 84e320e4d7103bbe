"""Weights: from safetensors files, or random ones for speed work, straight into a model's own memory."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from penstock.engine_core.loading.checkpoint import LEFTOVER, read_checkpoint
from penstock.engine_core.loading.dummy import fill_random
from penstock.engine_core.models.config_file import read_names
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import Destination

PREFIX = "model."
FIRST = "embed_tokens.weight"


def load(model: Decoder, folder: Path, load_format: str = "auto", seed: int = 0) -> None:
    """Fill `model` from `folder`; the format is auto, safetensors or dummy (random, nothing is read).

    Raises ModelError naming the file and the tensor: missing, truncated, of a wrong shape or type, unknown, pickled.
    """
    if load_format == "dummy":
        fill_random(model.destinations(), seed)
    else:
        read_checkpoint(folder, named_as(read_names(folder), model.destinations()), leftover(model))


def leftover(model: Decoder) -> re.Pattern[str]:
    """Names of tensors that a model may have and that are not read: other stages' of a pipeline among them."""
    group, own = model.placement.group, range(model.first, model.first + model.spec.layers)
    if group.stages == 1:
        return LEFTOVER
    others = [rf"^(model\.)?layers\.(?!({'|'.join(map(str, own))})\.)\d+\."]
    if model.embedding is None:
        others.append(r"^(model\.)?embed_tokens\.weight$")
    if not group.ends:
        others.append(r"^(model\.)?norm\.weight$")
    return re.compile("|".join([LEFTOVER.pattern, *others]))


def named_as(stored: Collection[str], destinations: dict[str, Destination]) -> dict[str, Destination]:
    """The destinations by the names that the files have: embedding models are saved without the prefix of a model that
    has a head."""
    if f"{PREFIX}{FIRST}" in stored or FIRST not in stored:
        return destinations
    return {name.removeprefix(PREFIX): destination for name, destination in destinations.items()}
