from __future__ import annotations

import msgspec
import pytest

from penstock.engine_core.models.quantization.online import NONE, ONLINE, fitted, online
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.protocol.engine_config import QUANTIZATIONS


def test_every_format_of_the_option_is_known() -> None:
    assert (NONE, *ONLINE) == QUANTIZATIONS


@pytest.mark.parametrize("name", ONLINE)
def test_layers_are_rounded_and_the_rest_stays(name: str) -> None:
    found = online(name)
    assert found.format_of("model.layers.3.mlp.up_proj") == ONLINE[name]
    for module in ("lm_head", "model.embed_tokens", "model.layers.3.mlp.gate"):
        assert found.format_of(module) is None


@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (192, 64), (2880, 64), (48, 16)])
def test_groups_divide_what_they_are_of(inputs: int, group: int) -> None:
    assert fitted(ONLINE["int4"], inputs) == msgspec.structs.replace(ONLINE["int4"], group=group)


def test_a_matrix_without_groups_stays_dense() -> None:
    assert fitted(ONLINE["int4"], 40) is None
    assert fitted(ONLINE["fp8"], 40) == ONLINE["fp8"]
    stored = WeightFormat(kind="grouped", packing="awq", bits=4, group=128)
    assert fitted(stored, 40) == stored, "what a file has is not changed"
