"""What a mixture of experts is by its config.json, in both spellings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.models.layer_spec import RoutingSpec
from penstock.engine_core.models.spec import ModelSpec, read_spec, with_layout
from penstock.protocol.errors import ModelError
from tests.engine_core.models.specs import windows_of
from tests.engine_core.models.test_spec import QWEN2

QWEN_MOE: dict[str, Any] = {
    **QWEN2,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
MIXTRAL_SMALL: dict[str, Any] = {**QWEN2, "architectures": ["MixtralForCausalLM"]}


def spec(folder: Path, base: dict[str, Any], **more: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**base, **more}))
    return read_spec(folder)


def sizes(found: ModelSpec) -> tuple[int, int, int]:
    experts = found.sparse[0]
    return experts.count, experts.routing.chosen, experts.width


def test_qwen(tmp_path: Path) -> None:
    found = spec(tmp_path, QWEN_MOE, norm_topk_prob=True)
    experts, attention = found.sparse[0], found.attention
    assert (found.family, attention.qk_norm, attention.qkv_bias, attention.head_dim) == ("qwen3_moe", "head", False, 8)
    assert (experts.count, experts.width, experts.routing) == (16, 24, RoutingSpec(chosen=3, normalised=True))
    assert found.sparse == (experts,) * 4
    assert not experts.stacked
    assert not spec(tmp_path, QWEN_MOE, attention_bias=True).sparse[0].routing.normalised


def test_what_the_families_assume(tmp_path: Path) -> None:
    """As their configuration classes in transformers do."""
    silent = {name: QWEN2[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
    found = spec(tmp_path, silent, architectures=["Qwen3MoeForCausalLM"], num_attention_heads=8)
    assert sizes(found) == (128, 8, 768)
    assert (found.attention.kv_heads, found.attention.rope.theta) == (4, 1e4)
    assert (found.max_position, found.norm.eps) == (32768, 1e-6)
    found = spec(tmp_path, silent, architectures=["MixtralForCausalLM"], num_attention_heads=8)
    assert sizes(found) == (8, 2, 96)
    assert (found.attention.kv_heads, found.attention.rope.theta) == (8, 1e6)
    assert (found.max_position, found.norm.eps) == (131072, 1e-5)


def test_both_spellings_of_the_number(tmp_path: Path) -> None:
    old = spec(tmp_path, QWEN_MOE)
    new = spec(
        tmp_path, {name: value for name, value in QWEN_MOE.items() if name != "num_experts"}, num_local_experts=16
    )
    assert old == new
    assert spec(tmp_path, MIXTRAL_SMALL, num_local_experts=4).sparse != spec(tmp_path, MIXTRAL_SMALL).sparse


def test_mixtral(tmp_path: Path) -> None:
    found = spec(tmp_path, MIXTRAL_SMALL, num_local_experts=4, sliding_window=8, attention_bias=True)
    assert (windows_of(found), found.attention.qkv_bias, found.attention.qk_norm) == ((8,) * 4, False, "")
    assert sizes(found) == (4, 2, 96)
    assert found.sparse == (found.sparse[0],) * 4
    assert found.sparse[0].routing.normalised


@pytest.mark.parametrize(
    ("more", "sparse"),
    [
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 3}, (False, False, True, False)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"mlp_only_layers": None}, (True,) * 4),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
    ],
)
def test_which_layers_have_experts(tmp_path: Path, more: dict[str, Any], sparse: tuple[bool, ...]) -> None:
    found = spec(tmp_path, QWEN_MOE, **more)
    assert tuple(layer.experts is not None for layer in found.blocks) == sparse


@pytest.mark.parametrize("more", [{"num_experts": 0}, {"decoder_sparse_step": 5}, {"mlp_only_layers": [0, 1, 2, 3]}])
def test_a_model_that_has_none_after_all(tmp_path: Path, more: dict[str, Any]) -> None:
    found = spec(tmp_path, QWEN_MOE, **more)
    assert found.sparse == ()


def test_a_window_is_every_layers(tmp_path: Path) -> None:
    window = {"sliding_window": 32, "max_window_layers": 3}
    assert windows_of(spec(tmp_path, QWEN_MOE, **window)) == (0,) * 4
    assert windows_of(spec(tmp_path, QWEN_MOE, **window, use_sliding_window=True)) == (32,) * 4


def test_some_layers_of_a_model(tmp_path: Path) -> None:
    found = spec(tmp_path, QWEN_MOE, decoder_sparse_step=2)
    part = found.part((1, 2))
    assert (part.layers, windows_of(part), part.hidden) == (2, (0, 0), found.hidden)
    assert [layer.experts is not None for layer in part.blocks] == [True, False]
    plain = spec(tmp_path, QWEN2)
    assert plain.part(range(4)) == plain
    assert plain.part([3]).sparse == ()


@pytest.mark.parametrize(
    ("base", "more", "complaint"),
    [
        (QWEN_MOE, {"num_experts_per_tok": 17}, "num_experts_per_tok is 17.*1 to 16"),
        (MIXTRAL_SMALL, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0.*1 to 8"),
        (MIXTRAL_SMALL, {"num_local_experts": 0}, "num_local_experts is 0"),
        (QWEN_MOE, {"num_experts": "many"}, "num_experts is 'many'"),
        (QWEN_MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        (QWEN_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN_MOE, {"mlp_only_layers": [4]}, r"mlp_only_layers is \[4\]; a list of layers, 0 to 3"),
        (QWEN_MOE, {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (QWEN_MOE, {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        (QWEN_MOE, {"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        (QWEN_MOE, {"architectures": ["DbrxForCausalLM"]}, "architectures.*Qwen3MoeForCausalLM"),
    ],
)
def test_what_is_refused_names_file_and_key(
    tmp_path: Path, base: dict[str, Any], more: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{complaint}"):
        spec(tmp_path, base, **more)


def test_how_the_tensors_lie_is_told_by_their_names(tmp_path: Path) -> None:
    found = spec(tmp_path, MIXTRAL_SMALL)
    stacked = with_layout(found, ["model.layers.0.mlp.experts.gate_up_proj", "lm_head.weight"])
    assert all(experts.stacked for experts in stacked.sparse)
    assert stacked.names == ()  # they are the same in every family
    assert with_layout(found, ["model.layers.0.block_sparse_moe.experts.0.w1.weight"]) == found
    assert with_layout(found, ()) == found
    assert not found.sparse[0].stacked
