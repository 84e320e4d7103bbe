"""A checkpoint's tensors by the spec alone are those that the model in memory takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import LlamaConfig

from penstock.engine_core.models.families import families
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.engine_core.models.tensors import check_weights, named_as
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES
from tests.engine_core.models.quantized_folders import CONFIGS, write_pair
from tests.engine_core.models.specs import small_experts, small_spec, tensor_shapes

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "headless": {"headless": True},
    "qkv_bias": {"qkv_bias": True},
    "all biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "head norms": {"qk_norm": "head", "head_dim": 6},
}


def sparse(family: str, **more: Any) -> ModelSpec:
    names = families()[family].names if not more.get("stacked") else ()
    spec = small_spec(layers=3, experts=small_experts(4, 2, 24, **more), sparse=(True, False, True))
    return structs.replace(spec, names=names)


SPECS = [
    *(pytest.param(small_spec(layers=2, **form), id=name) for name, form in FORMS.items()),
    *(
        pytest.param(sparse(family, stacked=stacked), id=f"{family}{' stacked' * stacked}")
        for family in ("qwen3_moe", "mixtral")
        for stacked in (False, True)
    ),
]


@pytest.mark.parametrize("spec", SPECS)
def test_names_and_shapes_are_the_models(spec: ModelSpec) -> None:
    model = build(spec, torch.float32, torch.device("cpu"), 16)
    expected = {name: destination.shape for name, destination in model.destinations().items()}
    assert tensor_shapes(spec) == expected


def test_names_follow_the_files() -> None:
    wanted = {"model.embed_tokens.weight": 1, "model.norm.weight": 2}
    spec = small_spec()
    assert named_as(spec, ("embed_tokens.weight",), wanted) == {"embed_tokens.weight": 1, "norm.weight": 2}
    assert named_as(spec, (), wanted) == wanted
    assert named_as(spec, wanted, wanted) == wanted
    beside = {**wanted, "score.weight": 3}
    assert named_as(spec, ("bert.embed_tokens.weight",), beside)["score.weight"] == 3, "a head is no part of the model"


def test_a_group_that_does_not_divide_the_inputs_is_refused_by_matrix(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path, LlamaConfig(**{**SIZES, "intermediate_size": 128}), CONFIGS["w4a16"])
    path = quantized / "config.json"
    path.write_text(path.read_text().replace('"group_size": 32', '"group_size": 48'))
    why = "model.layers.0.self_attn.q_proj cannot be quantized as its config.json says: its 64 inputs are no multiple"
    with pytest.raises(ModelError, match=why):
        check_weights(quantized, read_spec(quantized))
