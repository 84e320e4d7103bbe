"""Parts of layers from config.json: what several families share, and what is said of values that cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.models.layer_spec import RopeSpec
from penstock.engine_core.models.reading import FULL, SLIDING, ModelFile
from penstock.protocol.errors import ModelError

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 512}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 3] * 4}


def file(**more: Any) -> ModelFile:
    return ModelFile(Path("config.json"), SIZES | more)


def test_longrope() -> None:
    found = file(rope_scaling=LONG, original_max_position_embeddings=128).rope()
    assert found == RopeSpec(
        kind="longrope", factor=4.0, original_max_position=128, short_factor=(1.0, 1.5) * 4, long_factor=(2.0, 3.0) * 4,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(128)),
    )  # fmt: skip
    given = file(rope_scaling={**LONG, "attention_factor": 1.1}, original_max_position_embeddings=128).rope()
    assert given.attention_factor == 1.1


@pytest.mark.parametrize("value", [None, [1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + ["2"], 3.0])
def test_longrope_has_a_factor_for_each_frequency(value: object) -> None:
    with pytest.raises(ModelError, match=r"config\.json: long_factor is .*a list of 8 numbers above 0"):
        file(rope_scaling={**LONG, "long_factor": value}).rope()


@pytest.mark.parametrize(("share", "dim"), [(0.5, 8), (0.25, 4), (0.75, 12), (1.0, 0)])
def test_a_share_of_a_head(share: float, dim: int) -> None:
    assert file(partial_rotary_factor=share).rope(partial=0.5).dim == dim
    assert file(rope_parameters={"partial_rotary_factor": share}).rope(partial=0.5).dim == dim
    assert file().rope(partial=0.5).dim == 8


@pytest.mark.parametrize("share", [0.0, 0.1, 0.45])
def test_shares_that_leave_no_pairs(share: float) -> None:
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        file(partial_rotary_factor=share).rope(partial=0.5)


def test_a_family_that_turns_whole_heads() -> None:
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5; Penstock rotates whole heads"):
        file(partial_rotary_factor=0.5).rope()


def test_settings_by_kind_of_layer() -> None:
    settings = {FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}, SLIDING: {"rope_type": "default"}}
    assert file(rope_parameters=settings).rope(FULL).theta == 7.0
    assert file(rope_parameters=settings).rope(SLIDING) == RopeSpec()


def test_kinds_of_layers() -> None:
    assert file().kinds(SLIDING, lambda layer: layer == 1) == [False, True, False]
    assert file(layer_types=[SLIDING] * 3).kinds(SLIDING, lambda layer: False) == [True] * 3
    with pytest.raises(ModelError, match="layer_types"):
        file(layer_types=[SLIDING] * 2).kinds(SLIDING, lambda layer: False)


def test_activations() -> None:
    assert file(hidden_act="swish").activation() == "silu"
    assert file(act="gelu_pytorch_tanh").activation("act", ("gelu_tanh",)) == "gelu_tanh"
    assert file().activation("act", ("gelu_tanh", "silu")) == "gelu_tanh"
    for value in ("gelu", ["silu"], 1):
        with pytest.raises(ModelError, match=r"hidden_act is .*silu"):
            file(hidden_act=value).activation()


def test_heads_that_do_not_fit() -> None:
    assert file().attention(qk_norm="head").qk_norm == "head"
    with pytest.raises(ModelError, match="num_key_value_heads is 3"):
        file(num_key_value_heads=3).attention()
