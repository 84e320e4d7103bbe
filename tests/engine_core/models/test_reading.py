"""Parts of layers from config.json: what several families share, and what is said of values that cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.layer_spec import RopeSpec
from penstock.engine_core.models.reading import FULL, SLIDING, read_activation, read_attention, read_kinds, read_rope
from penstock.protocol.errors import ModelError

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 512}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 3] * 4}


def file(**more: Any) -> ConfigFile:
    return ConfigFile(Path("config.json"), SIZES | more)


def test_longrope() -> None:
    found = read_rope(file(rope_scaling=LONG, original_max_position_embeddings=128))
    assert found == RopeSpec(
        kind="longrope", factor=4.0, original_max_position=128, short_factor=(1.0, 1.5) * 4, long_factor=(2.0, 3.0) * 4,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(128)),
    )  # fmt: skip
    given = read_rope(file(rope_scaling={**LONG, "attention_factor": 1.1}, original_max_position_embeddings=128))
    assert given.attention_factor == 1.1


@pytest.mark.parametrize("value", [None, [1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + ["2"], 3.0])
def test_longrope_has_a_factor_for_each_frequency(value: object) -> None:
    with pytest.raises(ModelError, match=r"config\.json: long_factor is .*a list of 8 numbers above 0"):
        read_rope(file(rope_scaling={**LONG, "long_factor": value}))


@pytest.mark.parametrize(("share", "dim"), [(0.5, 8), (0.25, 4), (0.75, 12), (1.0, 0)])
def test_a_share_of_a_head(share: float, dim: int) -> None:
    assert read_rope(file(partial_rotary_factor=share), partial=0.5).dim == dim
    assert read_rope(file(rope_parameters={"partial_rotary_factor": share}), partial=0.5).dim == dim
    assert read_rope(file(), partial=0.5).dim == 8


@pytest.mark.parametrize("share", [0.0, 0.1, 0.45])
def test_shares_that_leave_no_pairs(share: float) -> None:
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        read_rope(file(partial_rotary_factor=share), partial=0.5)


def test_a_family_that_turns_whole_heads() -> None:
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5; Penstock rotates whole heads"):
        read_rope(file(partial_rotary_factor=0.5))


def test_settings_by_kind_of_layer() -> None:
    settings = {FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}, SLIDING: {"rope_type": "default"}}
    assert read_rope(file(rope_parameters=settings), FULL).theta == 7.0
    assert read_rope(file(rope_parameters=settings), SLIDING) == RopeSpec()


def test_kinds_of_layers() -> None:
    assert read_kinds(file(), [FULL] * 3) == [FULL] * 3
    assert read_kinds(file(layer_types=[SLIDING] * 3), [FULL] * 3) == [SLIDING] * 3
    with pytest.raises(ModelError, match="layer_types"):
        read_kinds(file(layer_types=[SLIDING] * 2), [FULL] * 3)


def test_activations() -> None:
    assert read_activation(file(hidden_act="swish")) == "silu"
    assert read_activation(file(act="gelu_pytorch_tanh"), "act", ("gelu_tanh",)) == "gelu_tanh"
    assert read_activation(file(), "act", ("gelu_tanh", "silu")) == "gelu_tanh"
    for value in ("gelu", ["silu"], 1):
        with pytest.raises(ModelError, match=r"hidden_act is .*silu"):
            read_activation(file(hidden_act=value))


def test_heads_that_do_not_fit() -> None:
    assert read_attention(file(), qk_norm="head").qk_norm == "head"
    with pytest.raises(ModelError, match="num_key_value_heads is 3"):
        read_attention(file(num_key_value_heads=3))
