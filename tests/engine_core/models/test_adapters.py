"""Places of adapters: what they take, and that only what has them is adapted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.models.adapter_folder import adaptable, place_bytes
from penstock.engine_core.models.adapters import AdapterPlaces, linears
from penstock.engine_core.models.layer_spec import MlpSpec
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.sharding import part_spec
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.specs import small_experts, small_spec

MIXTURE = {"experts": small_experts(4, 2, 16, shared=MlpSpec(width=24), shared_gate=True), "sparse": (False, True)}

APART = {"experts": small_experts(4, 2, 16, shared=MlpSpec(width=24), shared_name="dense", apart=True, stacked=True)}


def places_of(spec: ModelSpec, group: Group) -> AdapterPlaces:
    model = build(spec, torch.float32, torch.device("cpu"), 16, group=group)
    return AdapterPlaces(model, spec, 3, 20)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("size", [1, 2])
def test_memory_is_what_is_planned(size: int, rank: int) -> None:
    """Of a rank's share, experts' routers left out; ranks of 20 are padded to 32."""
    if rank < size:
        spec = small_spec(layers=2, **MIXTURE)
        places = places_of(spec, Group(rank, size, 0, 1, None, None, None, None))
        assert places.rank == 32
        assert places.memory.nbytes == 3 * place_bytes(part_spec(spec, size), 20, 4)


@pytest.mark.parametrize("experts", [MIXTURE, APART], ids=["shared", "apart"])
def test_what_may_be_adapted_has_places_and_nothing_else(experts: dict[str, Any]) -> None:
    """By the names of the folder's checks; every A and B has a run of its own."""
    spec = small_spec(layers=2, **experts)
    places = places_of(spec, Group())
    memory = places.host_memory()
    for at, name in enumerate(adaptable(spec), start=1):
        held = dict(places.destinations(memory, name, 32))
        assert held.keys() == {"A", "B"}
        for place in held.values():
            assert place.tensor is not None
            assert not place.tensor.any()
            place.tensor.fill_(at)
    assert memory.all()
    assert list(places.destinations(memory, "model.layers.1.mlp.gate", 32)) == []


def test_a_matrix_without_a_place_is_refused_and_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine_core.models.adapters.linears", lambda block: list(linears(block))[1:])
    places = places_of(small_spec(layers=1), Group())
    with pytest.raises(ModelError, match=r"adapters of model.layers.0.self_attn.k_proj are not served"):
        dict(places.destinations(places.host_memory(), "model.layers.0.self_attn.k_proj", 4))
    assert dict(places.destinations(places.host_memory(), "model.layers.0.self_attn.o_proj", 4))


def test_a_product_that_cannot_be_adapted_has_nothing_to_look_at() -> None:
    spec = small_spec(layers=2, **MIXTURE)
    model = build(spec, torch.float32, torch.device("cpu"), 16)
    AdapterPlaces(model, spec, 1, 4)
    mixture = model.blocks[1].mlp
    assert vars(mixture)["router"].adapted is None
    assert vars(mixture)["shared_gate"].adapted is None
    assert all(
        linear.adapted is not None and not linear.adapted.active
        for block in model.blocks
        for _, linear in linears(block)
    )
