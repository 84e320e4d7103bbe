"""The sparse MLP: against sums by hand, shared out over ranks in both ways, and read from both layouts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.loading import load
from penstock.engine_core.loading.checkpoint import cuts
from penstock.engine_core.loading.dummy import fill_random
from penstock.engine_core.models import mlp
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layer_spec import ExpertSpec, MlpSpec, RoutingSpec
from penstock.engine_core.models.mlp import Mlp, SparseMlp, layer_mlp
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.kernels.experts import route
from penstock.kernels.records import Routes, Routing
from tests.engine_core.models.parity import SIZES, PagedRun, ours, write_checkpoint
from tests.engine_core.models.specs import resized, small_experts
from tests.engine_core.models.test_layers import SPEC

EXPERTS = small_experts(8, 3, 12)
MODEL = resized(SPEC, layers=2, experts=EXPERTS, sparse=(True, False), mlp_bias=False)
CONFIGS: dict[str, Any] = {
    "qwen": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1], head_dim=16
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}


LAYOUTS: dict[str, dict[str, bool]] = {
    "single": {},
    "single, biased": {"bias": True},
    "without gates": {"gated": False, "bias": True},
    "stacked": {"stacked": True},
    "transposed": {"stacked": True, "transposed": True, "bias": True},
    "interleaved": {"stacked": True, "transposed": True, "interleaved": True, "bias": True, "router_bias": True},
}


def placement(rank: int = 0, size: int = 1, expert_parallel: bool = False, adapters: bool = False) -> Placement:
    group = Group(rank, size)
    return Placement(
        torch.float32, torch.device("cpu"), group, expert_parallel=expert_parallel, adapters=adapters
    )  # fmt: skip


def checkpoint(experts: ExpertSpec = EXPERTS) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {
        name: torch.randn(destination.shape) * (destination.fan_in**-0.5 if destination.fan_in else 1.0)
        for name, destination in SparseMlp(experts, MODEL.hidden, placement()).destinations()
    }


def filled(tensors: dict[str, Tensor], where: Placement, experts: ExpertSpec = EXPERTS) -> SparseMlp:
    """Through a file, as loading does it."""
    made = SparseMlp(experts, MODEL.hidden, where)
    for name, destination in made.destinations():
        assert destination.shape == tensors[name].shape
        if destination.tensor is not None:
            for place, part in cuts(destination, destination.tensor):
                part.copy_(tensors[name][place])
    return made


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as transformers 5 can store them."""

    def all_of(name: str) -> Tensor:
        return torch.stack([tensors[f"experts.{expert}.{name}.weight"] for expert in range(EXPERTS.count)])

    gate_up = torch.cat((all_of("gate_proj"), all_of("up_proj")), dim=1)
    return {
        "gate.weight": tensors["gate.weight"],
        "experts.gate_up_proj": gate_up,
        "experts.down_proj": all_of("down_proj"),
    }


def by_hand(tensors: dict[str, Tensor], x: Tensor, chosen: int, normalised: bool) -> Tensor:
    """Token by token, in double precision."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    found = torch.zeros_like(x, dtype=torch.float64)
    for token, values in enumerate(x.double()):
        shares, experts = torch.softmax(weights["gate.weight"] @ values, 0).topk(chosen)
        if normalised:
            shares /= shares.sum()
        for share, expert in zip(shares, experts.tolist(), strict=True):
            gate, up, down = (weights[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            found[token] += share * (down @ (silu(gate @ values) * (up @ values)))
    return found


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("chosen", [1, 3, 8])
def test_sums_by_hand(chosen: int, normalised: bool) -> None:
    experts = msgspec.structs.replace(EXPERTS, routing=RoutingSpec(chosen=chosen, normalised=normalised))
    tensors = checkpoint()
    made = filled(tensors, placement(), experts)
    for tokens in (0, 1, 7):
        x = torch.randn(tokens, 12)
        expected = by_hand(tensors, x, chosen, normalised)
        torch.testing.assert_close(made.forward(x).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_sums_of_the_ranks_are_the_whole(layout: str, size: int, expert_parallel: bool) -> None:
    experts = msgspec.structs.replace(EXPERTS, **LAYOUTS[layout])
    tensors = checkpoint(experts)
    x = torch.randn(9, 12)
    expected = filled(tensors, placement(), experts).forward(x)
    ranks = [filled(tensors, placement(rank, size, expert_parallel), experts) for rank in range(size)]
    torch.testing.assert_close(sum(rank.forward(x) for rank in ranks), expected)
    held = sum(rank.gate_up.numel() + rank.down.numel() for rank in ranks)
    assert held == (1 + len(experts.parts)) * EXPERTS.count * EXPERTS.width * 12  # no weight twice


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layout", ["single", "stacked", "transposed"])
@pytest.mark.parametrize("gate", [False, True])
def test_a_shared_expert_like_the_others_is_one_of_them(gate: bool, layout: str, size: int) -> None:
    """The same sum as of an MLP apart, and one expert more."""
    options = {**LAYOUTS[layout], "bias": False, "shared": MlpSpec(width=EXPERTS.width), "shared_gate": gate}
    options["routing"] = msgspec.structs.replace(EXPERTS.routing, scale=2.5)  # which is not the shared one's
    experts = msgspec.structs.replace(EXPERTS, **options)
    tensors = checkpoint(experts)
    x = torch.randn(9, 12)
    apart = [filled(tensors, placement(rank, size, adapters=True), experts) for rank in range(size)]
    ranks = [filled(tensors, placement(rank, size), experts) for rank in range(size)]
    assert all(one.shared is not None and len(one.down) == EXPERTS.count for one in apart)
    assert all(one.shared is one.shared_gate is None and len(one.down) == EXPERTS.count + 1 for one in ranks)
    torch.testing.assert_close(sum(rank.forward(x) for rank in ranks), sum(rank.forward(x) for rank in apart))


LIKE = MlpSpec(width=EXPERTS.width)


@pytest.mark.parametrize("shared", [
    MlpSpec(width=2 * EXPERTS.width), MlpSpec(width=EXPERTS.width, activation="gelu_tanh"),
    MlpSpec(width=EXPERTS.width, gated=False), MlpSpec(width=EXPERTS.width, fused=True),
    MlpSpec(width=EXPERTS.width, bias=True), MlpSpec(width=EXPERTS.width, down_bias=True),
])  # fmt: skip
def test_a_shared_expert_of_its_own_kind_stays_apart(shared: MlpSpec) -> None:
    made = SparseMlp(msgspec.structs.replace(EXPERTS, shared=shared), MODEL.hidden, placement())
    assert made.shared is not None
    assert not made.routing.shared


@pytest.mark.parametrize("options", [
    {"bias": True}, {"router_bias": True, "shared_gate": True}, {"gated": False},
    {"routing": RoutingSpec(chosen=1, scales_inputs=True)},
])  # fmt: skip
def test_experts_of_their_own_kind_stay_alone(options: dict[str, Any]) -> None:
    made = SparseMlp(msgspec.structs.replace(EXPERTS, shared=LIKE, **options), MODEL.hidden, placement())
    assert made.shared is not None
    assert not made.routing.shared
    assert SparseMlp(msgspec.structs.replace(EXPERTS, shared=LIKE), MODEL.hidden, placement()).shared is None


def test_ranks_with_whole_experts_share_the_shared_one() -> None:
    experts = msgspec.structs.replace(EXPERTS, shared=LIKE)
    assert SparseMlp(experts, MODEL.hidden, placement(1, 2, expert_parallel=True)).shared is not None


def test_both_layouts_are_one_model() -> None:
    single = filled(checkpoint(), placement())
    other = filled(stacked(checkpoint()), placement(), msgspec.structs.replace(EXPERTS, stacked=True))
    assert torch.equal(single.gate_up, other.gate_up)
    assert torch.equal(single.down, other.down)


def test_gates_and_ups_that_take_turns_are_told_apart() -> None:
    plain = msgspec.structs.replace(EXPERTS, **{**LAYOUTS["interleaved"], "transposed": False, "interleaved": False})
    tensors = checkpoint(plain)
    turned = dict(tensors)
    for name in ("experts.gate_up_proj", "experts.gate_up_proj_bias"):
        gate, up = tensors[name].chunk(2, dim=1)
        turned[name] = torch.stack((gate, up), dim=2).flatten(1, 2)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        turned[name] = turned[name].transpose(1, 2)
    one, other = filled(tensors, placement(), plain), filled(turned, placement(), msgspec.structs.replace(
        plain, transposed=True, interleaved=True))  # fmt: skip
    for name in ("gate_up", "down"):
        assert torch.equal(getattr(one, name), getattr(other, name))
        assert torch.equal(getattr(one.biases, name), getattr(other.biases, name))


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_has_one_source(layout: str, expert_parallel: bool) -> None:
    experts = msgspec.structs.replace(EXPERTS, **LAYOUTS[layout])
    made = SparseMlp(experts, MODEL.hidden, placement(1, 2, expert_parallel))
    for weight in (made.gate_up, made.down):
        weight.zero_()
    for name, destination in made.destinations():
        if destination.tensor is not None and name.startswith("experts"):
            destination.tensor.add_(1)
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in (made.gate_up, made.down))


def test_weights_lie_as_the_device_likes_them() -> None:
    on_cpu, on_gpu = (
        SparseMlp(EXPERTS, MODEL.hidden, Placement(torch.float32, torch.device(device))) for device in ("cpu", "meta")
    )
    assert on_cpu.gate_up.shape == on_gpu.gate_up.shape == (8, 24, 12)
    assert on_cpu.gate_up.stride() == (288, 1, 24)
    assert on_gpu.gate_up.stride() == (288, 12, 1)


def whole_mlp(spec: ModelSpec, layer: int) -> MlpSpec | ExpertSpec:
    found = spec.blocks[layer].mlp
    assert found is not None
    return found


def test_a_layer_has_what_the_spec_says() -> None:
    assert isinstance(layer_mlp(whole_mlp(MODEL, 0), MODEL.hidden, placement()), SparseMlp)
    assert isinstance(layer_mlp(whole_mlp(MODEL, 1), MODEL.hidden, placement()), Mlp)
    assert isinstance(layer_mlp(whole_mlp(SPEC, 0), SPEC.hidden, placement()), Mlp)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_destinations_are_the_tensors_of_a_checkpoint(family: str, original: bool, tmp_path: Path) -> None:
    """As published, expert by expert, and stacked as transformers 5 can store them."""
    write_checkpoint(tmp_path, CONFIGS[family], save_original_format=original)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert any(len(shape) == 3 for shape in stored.values()) != original
    found = {name: destination.shape for name, destination in ours(tmp_path).destinations().items()}
    assert found == stored


@pytest.mark.parametrize("family", CONFIGS)
def test_both_layouts_of_a_checkpoint_load_alike(family: str, tmp_path: Path) -> None:
    for folder, original in (("single", True), ("stacked", False)):
        write_checkpoint(tmp_path / folder, CONFIGS[family], save_original_format=original)
    ids = torch.arange(9).view(1, 9)
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()(ids).logits for folder in ("single", "stacked")
    )
    assert torch.equal(first, second)
    one, other = (ours(tmp_path / folder) for folder in ("single", "stacked"))
    for block, same in zip(one.blocks, other.blocks, strict=True):
        if isinstance(block.mlp, SparseMlp):
            assert isinstance(same.mlp, SparseMlp)
            assert torch.equal(block.mlp.gate_up, same.mlp.gate_up)
            assert torch.equal(block.mlp.down, same.mlp.down)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("original", [True, False])
def test_a_rank_reads_its_own(original: bool, expert_parallel: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["qwen"], save_original_format=original)
    spec = read_spec(tmp_path)

    def rank(number: int) -> Decoder:
        device = torch.device("cpu")
        made = build(spec, torch.float32, device, 64, group=Group(number, 2), expert_parallel=expert_parallel)
        load(made, tmp_path)
        return made

    whole, ranks = ours(tmp_path), [rank(number) for number in range(2)]
    x = torch.randn(5, spec.hidden)
    for layer in (0, 1, 2):
        parts = [made.blocks[layer].mlp.forward(x) for made in ranks]
        torch.testing.assert_close(sum(parts), whole.blocks[layer].mlp.forward(x), rtol=1e-4, atol=1e-5)


def test_random_weights(tmp_path: Path) -> None:
    config = CONFIGS["mixtral"].to_dict() | {"architectures": ["MixtralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = build(read_spec(tmp_path), torch.float32, torch.device("cpu"), 64)
    fill_random(made.destinations(), 0)
    mlp = made.blocks[2].mlp
    assert isinstance(mlp, SparseMlp)
    assert mlp.gate_up.std() == pytest.approx(64**-0.5, rel=0.05)
    assert mlp.down.std() == pytest.approx(96**-0.5, rel=0.05)
    assert not torch.equal(mlp.gate_up[0], mlp.gate_up[1])


def test_a_shallow_model_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["qwen"])
    model = ours(tmp_path)
    short = model.shallow()
    assert short.blocks == tuple(model.blocks)  # the first layer, a dense one, a sparse one
    sparse = build(read_spec(tmp_path).part((0, 2)), torch.float32, torch.device("meta"), 64)
    assert len(sparse.shallow().blocks) == 2
    assert short.spec == model.spec


def test_tokens_of_padding_go_to_no_expert() -> None:
    """A graph's step has more tokens than its rows have."""
    sparse = SparseMlp(EXPERTS, MODEL.hidden, placement())
    torch.manual_seed(0)
    fill_random(dict(sparse.destinations()), 3)
    x = torch.randn(5, MODEL.hidden)
    step: Any = SimpleNamespace(query_start=torch.tensor([0, 1, 3], dtype=torch.int32))
    found = sparse.forward(x, step)
    assert torch.equal(found[:3], sparse.forward(x)[:3])
    assert not found[3:].any()
    assert sparse.forward(x)[3:].any()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_says_how_many_tokens_are_real(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(logits: Tensor, routing: Routing, gates: Tensor | None, real: Tensor | None) -> Routes:
        seen.append((len(logits), None if real is None else real.tolist()))
        return route(logits, routing, gates, real)

    monkeypatch.setattr(mlp, "route", counted)
    write_checkpoint(tmp_path, CONFIGS[name])
    with torch.inference_mode():
        PagedRun(ours(tmp_path), [[1, 2, 3], [4, 5]]).step([3, 2])
    assert seen
    assert set(map(str, seen)) == {"(5, [5])"}
