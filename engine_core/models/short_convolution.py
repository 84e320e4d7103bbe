"""A short convolution between two gates (LFM2), on one rank's share of its channels."""

from __future__ import annotations

from torch import Tensor

from penstock.engine_core.models.layers import Destination, Destinations, Linear, Placement, named, spread, whole
from penstock.engine_core.models.recurrence_spec import ShortConvolutionSpec
from penstock.kernels.quantized import RowFormat, Rows
from penstock.kernels.short_convolution import short_convolution
from penstock.kernels.states import LayerState, StateBatch


class ShortConvolution:
    """output(c * convolution(b * x)), where b, c and x are of one product."""

    def __init__(self, spec: ShortConvolutionSpec, hidden: int, placement: Placement) -> None:
        share = placement.share(spec.channels)
        self.spec = spec
        self.first = placement.rank * share
        parts = tuple(spread("in_proj", spec.channels, placement) for _ in range(3))
        self.inputs = Linear(parts, hidden, placement, bias=spec.bias, formats=spec.formats)
        self.output = Linear(
            (whole("out_proj", hidden),), spec.channels, placement, bias=spec.bias, split_inputs=True,
            formats=spec.formats,
        )  # fmt: skip
        self.filters = placement.matrix(share, spec.width)
        self.bias = placement.vector(share) if spec.bias else None

    @property
    def rows(self) -> RowFormat | None:
        """What x may be rounded to before."""
        return self.inputs.rows

    def forward(self, x: Rows, batch: StateBatch, state: LayerState) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum."""
        b, c, x = self.inputs.forward(x).chunk(3, -1)
        found = short_convolution(
            b * x, self.filters, self.bias, state.ring, batch, activated=False, tails=state.tails
        )  # fmt: skip
        return self.output.forward(found.mul_(c))

    def destinations(self) -> Destinations:
        """By names within the layer's part."""
        spec = self.spec
        yield from named(("", self.inputs), ("", self.output))
        shape = (spec.channels, 1, spec.width)
        yield "conv.weight", Destination(self.filters.unsqueeze(1), shape, 0, self.first, fan_in=spec.width)
        if self.bias is not None:
            yield "conv.bias", Destination(self.bias, shape[:1], 0, self.first)
