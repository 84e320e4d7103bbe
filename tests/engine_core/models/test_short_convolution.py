from __future__ import annotations

import torch

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.recurrence_spec import ShortConvolutionSpec
from penstock.engine_core.models.short_convolution import ShortConvolution

SPEC = ShortConvolutionSpec(channels=8, width=3, bias=True)


def test_a_rank_has_its_channels_of_all_three_parts() -> None:
    """Gates of the input, gates of the output, and inputs stand one behind the other in one tensor."""
    placement = Placement(torch.float32, torch.device("cpu"), Group(rank=1, size=2))
    found = dict(ShortConvolution(SPEC, 8, placement).destinations())
    assert found["in_proj.weight"].runs == (slice(4, 8), slice(12, 16), slice(20, 24))
    assert (found["out_proj.weight"].axis, found["out_proj.weight"].start) == (1, 4)
    assert found["conv.weight"].runs == found["conv.bias"].runs == (slice(4, 8),)
    share = SPEC.share(2)
    assert isinstance(share, ShortConvolutionSpec)
    assert share.state().channels == share.cut("in_proj") == 4


def test_its_tensors_are_those_that_a_layer_has() -> None:
    layer = ShortConvolution(SPEC, 8, Placement(torch.float32, torch.device("cpu")))
    shapes = {name: place.shape for name, place in layer.destinations()}
    products = {f"{name}.weight": shape for name, shape in SPEC.products(8).items()}
    assert shapes == {**products, **SPEC.others()}
