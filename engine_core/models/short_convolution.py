"""A short convolution between two gates (LFM2), on one rank's share of its channels."""

from __future__ import annotations

from torch import Tensor

from penstock.engine_core.models.parts import Placement, spread
from penstock.engine_core.models.recurrence import Recurrence
from penstock.engine_core.models.recurrence_spec import ShortConvolutionSpec
from penstock.kernels.quantized import Rows
from penstock.kernels.short_convolution import short_convolution
from penstock.kernels.states import LayerState, StateBatch


class ShortConvolution(Recurrence[ShortConvolutionSpec]):
    """output(c * convolution(b * x)), where b, c and x are of one product."""

    def __init__(self, spec: ShortConvolutionSpec, hidden: int, placement: Placement) -> None:
        parts = tuple(spread("in_proj", spec.channels, placement) for _ in range(3))
        super().__init__(spec, parts, hidden, placement, bias=spec.bias, conv_bias=spec.bias)

    def forward(self, x: Rows, batch: StateBatch, state: LayerState) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum."""
        b, c, x = self.inputs.forward(x).chunk(3, -1)
        found = short_convolution(
            b * x, self.filters, self.bias, state.ring, batch, activated=False, tails=state.tails
        )  # fmt: skip
        return self.output.forward(found.mul_(c))
