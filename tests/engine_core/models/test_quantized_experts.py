"""Mixtures whose experts are quantized, one by one or stacked, a shared one among them, on ranks that share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.loading import load
from penstock.engine_core.loading.dummy import fill_random
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layer_spec import ExpertSpec, MlpSpec, RoutingSpec
from penstock.engine_core.models.memory_estimate import weight_bytes
from penstock.engine_core.models.mlp import SparseMlp
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.sharding import check_ranks
from penstock.engine_core.models.spec import read_spec
from tests.engine_core.models.parity import SIZES, ours, write_checkpoint
from tests.engine_core.models.quantized_folders import CONFIGS, compressed, integers, write_pair
from tests.engine_core.models.specs import tensor_shapes
from tests.engine_core.models.test_quantized_matrix import EXPERTS, LLAMA, changed, check_near, spoken

OSS: dict[str, Any] = {
    **SIZES, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 16,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                             "model.embed_tokens", "lm_head"]}  # fmt: skip
MODELS: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "stacked": (GptOssConfig(**OSS), MXFP4),
    "single": (Qwen3MoeConfig(**EXPERTS), CONFIGS["w4a16"]),
}


def test_stacked_experts_say_what_their_numbers_say(tmp_path: Path) -> None:
    quantized, dense = write_pair(tmp_path, *MODELS["stacked"])
    (tokens, logits), (expected_tokens, expected) = spoken(quantized), spoken(dense)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert tokens == expected_tokens


def sparse(model: Decoder) -> SparseMlp:
    found = model.blocks[0].mlp
    assert isinstance(found, SparseMlp)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("whole", [False, True])
def test_shares_add_up(tmp_path: Path, name: str, whole: bool) -> None:
    quantized, _ = write_pair(tmp_path, *MODELS[name])
    spec, device = read_spec(quantized), torch.device("cpu")
    x = torch.randn(5, spec.hidden, generator=torch.Generator().manual_seed(2))
    total = torch.zeros_like(x)
    for rank in range(2):
        model = build(spec, torch.float32, device, 64, group=Group(rank, 2), expert_parallel=whole)
        load(model, quantized)
        total += sparse(model).forward(x)
    torch.testing.assert_close(total, sparse(ours(quantized)).forward(x), atol=1e-5, rtol=0)


SHARED: dict[str, PreTrainedConfig] = {
    "gate": Qwen2MoeConfig(**{**EXPERTS, "num_key_value_heads": 4, "shared_expert_intermediate_size": 64}),
    "latents": DeepseekV3Config(**{
        **LLAMA, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 64, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "pad_token_id": 0,
    }),
}  # fmt: skip
FORMATS = {
    **CONFIGS,
    "nvfp4": compressed(
        integers(4, type="float", group_size=16, strategy="tensor_group"), None, "nvfp4-pack-quantized"
    ),
    "mxfp4": compressed(integers(4, type="float"), None, "mxfp4-pack-quantized"),
}


@torch.inference_mode()
def loaded(folder: Path, wanted: str = "none", *, apart: bool = False, group: Group | None = None) -> Decoder:
    """apart: as where adapters may add to the products of the shared expert."""
    spec, device = read_spec(folder, wanted), torch.device("cpu")
    model = build(spec, torch.float32, device, spec.max_position, group=group or Group(), adapters=apart)
    load(model, folder)
    return model


def mixtures(model: Decoder) -> list[SparseMlp]:
    return [block.mlp for block in model.blocks if isinstance(block.mlp, SparseMlp)]


def check_joined(joined: Decoder, apart: Decoder) -> None:
    """The same sums, of one expert more and no MLP beside."""
    x = torch.randn(7, joined.spec.hidden, generator=torch.Generator().manual_seed(2))
    for one, other in zip(mixtures(joined), mixtures(apart), strict=True):
        assert one.shared is one.shared_gate is None
        assert other.shared is not None
        assert one.quantized is not None
        assert other.quantized is not None
        assert [len(weight.values) for weight in one.quantized.weights] == [5, 5]  # type: ignore[union-attr]
        assert [len(weight.values) for weight in other.quantized.weights] == [4, 4]  # type: ignore[union-attr]
        check_near(one.forward(x), other.forward(x))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("fp8 static", "w4a16 in order")])
@pytest.mark.parametrize("kind", SHARED)
def test_a_shared_expert_of_their_format_is_one_of_them(tmp_path: Path, name: str, kind: str) -> None:
    quantized, dense = write_pair(tmp_path, SHARED[kind], FORMATS[name])
    model, apart = loaded(quantized), loaded(quantized, apart=True)
    check_joined(model, apart)
    assert tensor_shapes(model.spec) == {name: place.shape for name, place in model.destinations().items()}
    (tokens, logits), (apart_tokens, apart_logits) = spoken(model), spoken(apart)  # packed by now
    assert model.weight_bytes == pytest.approx(weight_bytes(model.spec, 4, dequantized=True), rel=0.01)
    check_near(logits, apart_logits)
    assert tokens == apart_tokens
    expected_tokens, expected = spoken(dense)
    if not name.startswith(("fp8", "int8")):  # weights alone are quantized
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert tokens == expected_tokens


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_a_shared_expert_that_is_rounded_as_they_are_is_one_of_them(tmp_path: Path, name: str, original: bool) -> None:
    """Of files that have the others one by one, and stacked."""
    write_checkpoint(tmp_path, SHARED["gate"], save_original_format=original)
    spec = read_spec(tmp_path, name)
    assert spec.sparse[0].stacked != original
    check_joined(loaded(tmp_path, name), loaded(tmp_path, name, apart=True))


@pytest.mark.parametrize("changes", [
    {"ignore": ["lm_head", "re:.*shared_expert.*"]},
    {"ignore": ["lm_head", "re:.*shared_expert.up_proj"]},
    {"ignore": ["lm_head", r"re:.*mlp.experts\..*"]},
    {"config_groups": {"group_0": {"targets": ["Linear"], "weights": integers(4)},
                       "group_1": {"targets": ["re:.*shared_expert.down_proj"], "weights": integers(8)}}},
    {"config_groups": {"group_0": {"targets": ["Linear"], "weights": integers(4)},
                       "group_1": {"targets": [r"re:.*shared_expert\..*"], "weights": integers(4, group_size=16)}}},
    {"config_groups": {"group_0": {"targets": ["Linear"], "weights": integers(4)},
                       "group_1": {"targets": [r"re:.*shared_expert\..*"], "weights": integers(4, symmetric=False)}}},
])  # fmt: skip
def test_a_shared_expert_of_another_format_stays_apart(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Many checkpoints leave it as it was."""
    quantized, dense = write_pair(tmp_path, SHARED["gate"], changed(CONFIGS["w4a16"], **changes))
    assert all(one.shared is not None and not one.routing.shared for one in mixtures(ours(quantized)))
    (tokens, logits), (expected_tokens, expected) = spoken(quantized), spoken(dense)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert tokens == expected_tokens


def test_a_given_scale_is_not_shared_with_it(tmp_path: Path) -> None:
    """The largest one would be all experts', and the shared one's is of other rows."""
    quantized, _ = write_pair(tmp_path, SHARED["gate"], CONFIGS["fp8 static"])
    assert all(one.shared is not None and not one.routing.shared for one in mixtures(ours(quantized)))


@pytest.mark.parametrize("name", ["fp8 blocks", "int8", "awq", "gptq", "nvfp4"])
def test_shares_of_a_shared_expert_add_up(tmp_path: Path, name: str) -> None:
    quantized, _ = write_pair(tmp_path, SHARED["gate"], FORMATS[name])
    check_ranks(read_spec(quantized), 2)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    for size in (1, 2):
        ranks = [loaded(quantized, group=Group(rank, size)) for rank in range(size)]
        apart = [loaded(quantized, group=Group(rank, size), apart=True) for rank in range(size)]
        for one, other in zip(ranks, apart, strict=True):
            check_joined(one, other)
        total = sum(sparse(rank).forward(x) for rank in ranks)
        check_near(total, sparse(ours(quantized)).forward(x))


@pytest.mark.parametrize("stacked", [False, True])
def test_blocks_that_end_within_an_expert(stacked: bool) -> None:
    """Gates and ups of 48 in blocks of 32."""
    form = WeightFormat(kind="float8", block=(32, 32), activations="block", scale="weight_scale_inv")
    names = ("gate_up_proj",) if stacked else ("gate_proj", "up_proj")
    shared = MlpSpec(width=48, formats=tuple((name, form) for name in ("gate_proj", "up_proj", "down_proj")))
    spec = ExpertSpec(
        count=3, width=48, routing=RoutingSpec(chosen=2), stacked=stacked, shared=shared,
        formats=tuple((name, form) for name in (*names, "down_proj")),
    )  # fmt: skip
    found, x = [], torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    for apart in (False, True):
        made = SparseMlp(spec, 64, Placement(torch.float32, torch.device("cpu"), adapters=apart))
        fill_random(dict(made.destinations()), 1)
        found.append(made.forward(x))
        assert (made.shared is not None) == apart
    check_near(*found)
