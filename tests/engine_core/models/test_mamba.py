from __future__ import annotations

import torch

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.mamba import Mamba
from penstock.engine_core.models.parts import Placement
from tests.engine_core.models.test_recurrence_spec import SPEC


def test_a_rank_has_its_groups_of_heads() -> None:
    """One product has gates, inputs, both parts of the groups and time steps; the convolution the three between."""
    placement = Placement(torch.float32, torch.device("cpu"), Group(rank=1, size=2))
    found = dict(Mamba(SPEC, NormSpec(eps=1e-5), 8, placement).destinations())
    inputs = (slice(8, 16), slice(24, 32), slice(35, 38), slice(41, 44), slice(46, 48))
    assert found["in_proj.weight"].runs == inputs
    assert found["conv1d.weight"].runs == found["conv1d.bias"].runs == (slice(8, 16), slice(19, 22), slice(25, 28))
    assert [found[name].start for name in ("A_log", "dt_bias", "D", "norm.weight")] == [2, 2, 2, 8]


def test_its_tensors_are_those_that_a_layer_has() -> None:
    layer = Mamba(SPEC, NormSpec(eps=1e-5), 8, Placement(torch.float32, torch.device("cpu")))
    shapes = {name: place.shape for name, place in layer.destinations()}
    products = {f"{name}.weight": shape for name, shape in SPEC.products(8).items()}
    assert shapes == {**products, **SPEC.others()}
