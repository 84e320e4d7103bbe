"""What recurrent layers have in common, on one rank's share of them: two products, and a short convolution between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from penstock.engine_core.models.layers import Destination, Destinations, Linear, named
from penstock.engine_core.models.parts import Part, Placement, whole
from penstock.engine_core.models.recurrence_spec import RecurrenceSpec
from penstock.kernels.quantized import Rows
from penstock.kernels.states import LayerState, StateBatch

Spec = TypeVar("Spec", bound=RecurrenceSpec)


class Recurrence(ABC, Generic[Spec]):
    """A recurrent layer. inputs: the parts of its first product."""

    def __init__(
        self, spec: Spec, inputs: tuple[Part, ...], hidden: int, placement: Placement, *, bias: bool = False,
        conv_bias: bool = False,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.share = spec.share(placement.size)
        self.rank = placement.rank
        self.inputs = Linear(inputs, hidden, placement, bias=bias, formats=spec.formats)
        self.reader = self.inputs
        self.output = Linear(
            (whole(spec.output, hidden),), spec.products(hidden)[spec.output][1], placement, bias=bias,
            split_inputs=True, formats=spec.formats,
        )  # fmt: skip
        channels = sum(self.share.mixed)
        self.filters = placement.matrix(channels, spec.width)
        self.bias = placement.vector(channels) if conv_bias else None

    @abstractmethod
    def forward(self, x: Rows, batch: StateBatch, state: LayerState) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum; advances the state."""

    def destinations(self) -> Destinations:
        """By names within the layer's part."""
        spec = self.spec
        yield from named(("", self.inputs), ("", self.output))
        first, runs = 0, []
        for wide, own in zip(spec.mixed, self.share.mixed, strict=True):
            runs.append(slice(first + self.rank * own, first + (self.rank + 1) * own))
            first += wide
        filters, shape = self.filters.unsqueeze(1), (first, 1, spec.width)
        yield f"{spec.convolution}.weight", Destination(filters, shape, fan_in=spec.width, runs=tuple(runs))
        if self.bias is not None:
            yield f"{spec.convolution}.bias", Destination(self.bias, (first,), runs=tuple(runs))

    def shared(self, *vectors: tuple[str, Tensor]) -> Destinations:
        """Of vectors that have as many numbers for each rank."""
        for name, held in vectors:
            whole_size = len(held) * self.spec.split()[1] // self.share.split()[1]
            yield name, Destination(held, (whole_size,), 0, self.rank * len(held))
