"""Room for adapters of routed experts: what each rank has of them, and that a step without adapters has none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.engine_core.models.expert_adapters import ExpertRoom
from penstock.engine_core.models.low_rank import AdaptedExperts, StepAdapters
from penstock.engine_core.models.mlp import SparseMlp
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.registry import build
from penstock.kernels.low_rank import adapter_rows
from tests.engine_core.models.specs import small_experts, small_spec

RANK, MOST = 5, 16
WAYS = {"all": (1, 0, False), "split": (2, 1, False), "whole": (2, 1, True)}


def mixture_of(size: int, rank: int, *, whole: bool, gated: bool = True) -> SparseMlp:
    group = Group(rank, size, 0, 1, None, None, None, None)
    placement = Placement(torch.float32, torch.device("cpu"), group, expert_parallel=whole)
    return SparseMlp(small_experts(4, 2, 16, gated=gated), 32, placement)


def fill(room: ExpertRoom, memory: Tensor, name: str, values: dict[str, Tensor]) -> None:
    """As the loader does: `values` are of the whole model."""
    for half, place in room.destinations(memory, name, RANK):
        assert values[half].shape == place.shape
        if place.tensor is not None:
            cut = values[half]
            if len(place.shape) == 3:
                cut = cut[place.first : place.first + len(place.tensor)]
            runs = place.runs or (slice(place.start, place.start + place.tensor.shape[place.axis]),)
            index = torch.cat([torch.arange(run.start, run.stop, run.step or 1) for run in runs])
            place.tensor.copy_(cut.index_select(place.axis, index))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_experts_one_by_one_and_all_at_once_lie_alike(way: str, gated: bool) -> None:
    """A rank has what its experts, or its share of their width, are multiplied with."""
    size, rank, whole = WAYS[way]
    mixture = mixture_of(size, rank, whole=whole, gated=gated)
    room, parts = ExpertRoom(mixture, MOST, 3), mixture.spec.parts
    shrink, shared = torch.randn(4, RANK, 16), torch.randn(4, RANK, 32)  # A: all first products of an expert have one
    wide, narrow = torch.randn(4, 32, RANK), [torch.randn(4, 16, RANK) for _ in parts]
    first, second = torch.zeros(2, room.end).unbind()
    stack = "gate_up_proj" if gated else "up_proj"
    fill(room, first, stack, {"A": shared, "B": torch.cat(narrow, 1)})
    fill(room, first, "down_proj", {"A": shrink, "B": wide})
    for expert in range(4):
        fill(room, second, f"{expert}.down_proj", {"A": shrink[expert], "B": wide[expert]})
        for name, own in zip(parts, narrow, strict=True):
            fill(room, second, f"{expert}.{name}", {"A": shared[expert], "B": own[expert]})
    assert torch.equal(first, second)
    assert not first[:3].any()
    gate_up, last = room.weights(first[None])
    held = slice(2, 4) if whole else slice(0, 4)
    width = slice(8, 16) if way == "split" else slice(0, 16)
    found = torch.cat([b @ a for a, b in zip(gate_up.a[0].chunk(len(parts), 1), gate_up.b[0].chunk(len(parts), 1),
                                             strict=True)], 1)  # fmt: skip
    expected = torch.cat([own[held, width] @ shared[held] for own in narrow], 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(last.b[0] @ last.a[0], wide[held] @ shrink[held, :, width])


def test_experts_have_room_where_it_is_asked_for() -> None:
    spec = small_spec(layers=2, experts=small_experts(4, 2, 16), sparse=(False, True))
    found = []
    for experts in (False, True):
        model = build(spec, torch.float32, torch.device("cpu"), 16, adapters=True)
        places = AdapterPlaces(model, spec, 2, 4, experts=experts)
        mixture = model.blocks[1].mlp
        assert isinstance(mixture, SparseMlp)
        assert (mixture.adapted is not None) is experts
        found.append(places.memory.shape[1])
    assert found[1] - found[0] == 4 * 16 * 3 * (32 + 16)


def test_a_step_without_adapters_has_no_additions() -> None:
    room, step = ExpertRoom(mixture_of(1, 0, whole=False), MOST, 0), StepAdapters()
    adapted = AdaptedExperts(*room.weights(torch.zeros(2, room.end)), step)
    assert adapted.active is None
    step.rows = adapter_rows(torch.zeros(3, dtype=torch.int32), 2)
    assert adapted.active is not None
    assert adapted.active.places is step.rows.places
