"""Products behind pooling, which encoders and classifiers have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.layers import Destination, Destinations, Norm, named
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.pooler import DenseSpec

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class PoolingHead:
    """Products of pooled states, in fp32: there are few rows. Every rank of the last stage has them whole."""

    def __init__(self, layers: Sequence[DenseSpec], placement: Placement) -> None:
        whole = Placement(torch.float32, placement.device)
        here = placement.group.ends
        self.layers = tuple(Dense(layer, whole, here=here) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        """fp32 `[rows, inputs] -> [rows, outputs]`."""
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def destinations(self) -> Destinations:
        return named(*(("", layer) for layer in self.layers))


class Dense:
    """One product with its activation and norm. Not `here` it takes no memory."""

    def __init__(self, spec: DenseSpec, placement: Placement, *, here: bool) -> None:
        self.spec = spec
        self.weight = placement.matrix(spec.outputs, spec.inputs) if here else None
        self.bias = placement.vector(spec.outputs) if here and spec.bias else None
        norm = NormSpec(eps=spec.norm_eps, centered=True, bias=spec.norm_bias)
        self.norm = Norm(spec.outputs, norm, placement) if spec.norm else None

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None, "the last stage"
        x = ACTIVATIONS[self.spec.activation](functional.linear(x, self.weight, self.bias))
        return x if self.norm is None else self.norm.forward(x)

    def destinations(self) -> Destinations:
        spec = self.spec
        yield f"{spec.name}.weight", Destination(self.weight, (spec.outputs, spec.inputs), fan_in=spec.inputs)
        if spec.bias:
            yield f"{spec.name}.bias", Destination(self.bias, (spec.outputs,))
        yield from named((f"{spec.norm}.", self.norm))
