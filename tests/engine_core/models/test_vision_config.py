"""What config.json of several vision encoders has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.vision_config import read_sizes, read_token, text_settings
from penstock.protocol.errors import ModelError

SIZES = {"hidden_size": 48, "num_attention_heads": 3, "patch_size": 14, "num_hidden_layers": 2, "intermediate_size": 9}


def config(**values: Any) -> ModelFile:
    return ModelFile(Path("config.json"), values)


def test_sizes() -> None:
    assert read_sizes(config(**SIZES)) == {"hidden": 48, "heads": 3, "patch": 14, "layers": 2, "width": 9}
    assert read_sizes(config(**SIZES, num_channels=3))["hidden"] == 48


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 5),
        ("num_channels", 1),
        ("patch_size", [14, 14]),
        ("patch_size", 4096),
        ("hidden_size", 0),
    ],
)
def test_sizes_that_are_impossible(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"config.json: {key} is"):
        read_sizes(config(**{**SIZES, key: value}))


def test_the_placeholder_has_two_names_and_a_default() -> None:
    assert read_token(config(image_token_index=0, image_token_id=5), 7) == 0
    assert read_token(config(image_token_id=5), 7) == 5
    assert read_token(config(), 7) == 7
    with pytest.raises(ModelError, match="image_token_id is -1"):
        read_token(config(image_token_id=-1), 7)


def test_the_text_half() -> None:
    found = text_settings(config(text_config={"hidden_size": 8}), {"rms_norm_eps": 1e-6})
    assert (found.integer("hidden_size"), found.number("rms_norm_eps")) == (8, 1e-6)
    with pytest.raises(ModelError, match="text_config is None; an object is expected"):
        text_settings(config(), {})
