"""What the config.json of several vision encoders has in common. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.vision_spec import COLORS

MOST = 1024  # pixels or patches of a side
IMAGE_TOKENS = ("image_token_index", "image_token_id")  # older files have the first


def read_sizes(file: ConfigFile) -> dict[str, Any]:
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


def read_token(outer: ConfigFile, default: int) -> int:
    """The placeholder. outer: the whole config.json."""
    key = next((key for key in IMAGE_TOKENS if outer.get(key) is not None), IMAGE_TOKENS[0])
    return outer.integer(key, default, low=0)


def text_settings(outer: ConfigFile, defaults: Mapping[str, Any]) -> ConfigFile:
    """The text half's part of the whole config.json."""
    given = outer.get("text_config")
    if not isinstance(given, dict):
        raise outer.error("text_config", "an object is expected")
    return ConfigFile(outer.path, given, defaults)
