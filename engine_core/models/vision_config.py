"""What the config.json of several vision encoders has in common. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.vision_spec import COLORS

MOST = 1024  # pixels, patches or frames of a side
THETA = 10000.0  # the base of rotary positions, where a file is silent
ROPE = "rope_parameters"
IMAGE_TOKENS = ("image_token_index", "image_token_id")  # older files have the first


def read_sizes(file: ModelFile) -> dict[str, Any]:
    """The sizes of a transformer over patches, as fields of a `VisionSpec`. Raises ModelError."""
    hidden, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    if hidden % heads:
        raise file.error("num_attention_heads", f"the hidden_size of {hidden} is not divisible by it")
    if file.integer("num_channels", COLORS) != COLORS:
        raise file.error("num_channels", f"Penstock serves images of {COLORS}")
    return {
        "patch": file.integer("patch_size", high=MOST),
        "layers": file.integer("num_hidden_layers", high=4096),
        "hidden": hidden,
        "heads": heads,
        "width": file.integer("intermediate_size"),
    }


def check_head_dim(file: ModelFile, head_dim: int) -> None:
    """Raises ModelError where a file says another size of heads than their share of the hidden size."""
    if file.get("head_dim") not in (None, head_dim):
        raise file.error("head_dim", f"Penstock serves what the heads' share of hidden_size is, {head_dim}")


def read_theta(file: ModelFile, default: float = THETA) -> float:
    """The base of axial rotary positions, which transformers 5 has among `rope_parameters`. Raises ModelError."""
    given = file.get(ROPE) or {}
    if not isinstance(given, dict):
        raise file.error(ROPE, "an object is expected")
    rope = ModelFile(file.path, given)
    if rope.get("rope_type") not in (None, "default", "axial"):
        raise rope.error("rope_type", "Penstock serves axial in vision encoders")
    return rope.number("rope_theta", default, low=2.0)


def read_token(outer: ModelFile, default: int) -> int:
    """The placeholder. outer: the whole config.json."""
    key = next((key for key in IMAGE_TOKENS if outer.get(key) is not None), IMAGE_TOKENS[0])
    return outer.integer(key, default, low=0)


def text_settings(outer: ModelFile, defaults: Mapping[str, Any]) -> ModelFile:
    """The text half's part of the whole config.json."""
    given = outer.get("text_config")
    if not isinstance(given, dict):
        raise outer.error("text_config", "an object is expected")
    return ModelFile(outer.path, given, defaults)
