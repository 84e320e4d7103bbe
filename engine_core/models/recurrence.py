"""From a recurrent layer's spec to its tensors and arithmetic."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.engine_core.models.gated_delta import GatedDeltaNet
from penstock.engine_core.models.layer_spec import LayerSpec
from penstock.engine_core.models.layers import Destinations, Placement
from penstock.engine_core.models.mamba import Mamba
from penstock.engine_core.models.mamba_spec import MambaSpec
from penstock.engine_core.models.recurrence_spec import GatedDeltaSpec, ShortConvolutionSpec
from penstock.engine_core.models.short_convolution import ShortConvolution
from penstock.kernels.quantized import RowFormat, Rows
from penstock.kernels.states import LayerState, StateBatch


class Recurrence(Protocol):
    """A recurrent layer, on one rank's share of it."""

    @property
    def rows(self) -> RowFormat | None:
        """What x may be rounded to before."""
        ...

    def forward(self, x: Rows, batch: StateBatch, state: LayerState) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum; advances the state."""
        ...

    def destinations(self) -> Destinations:
        """By names within the layer's part."""
        ...


def layer_recurrence(layer: LayerSpec, hidden: int, placement: Placement) -> Recurrence | None:
    spec = layer.recurrence
    if isinstance(spec, GatedDeltaSpec):
        return GatedDeltaNet(spec, layer.norm, hidden, placement)
    if isinstance(spec, MambaSpec):
        return Mamba(spec, layer.norm, hidden, placement)
    if isinstance(spec, ShortConvolutionSpec):
        return ShortConvolution(spec, hidden, placement)
    return None
