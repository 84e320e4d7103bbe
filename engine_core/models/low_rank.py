"""What adapters add to a product, as the layer that makes it has it."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.quantized import Rows
from penstock.kernels.records import AdapterRows, ExpertAdapters, LowRankExperts, LowRankInputs, LowRankWeight


class StepAdapters:
    """What all matrices read of the step at hand."""

    def __init__(self) -> None:
        self.rows: AdapterRows | None = None  # None: no row has an adapter


class Adapted:
    """Additions of all places to one Linear's product."""

    def __init__(self, weight: LowRankWeight, step: StepAdapters) -> None:
        self._weight = weight
        self._step = step

    @property
    def active(self) -> bool:
        """Whether a row of this step has an adapter."""
        return self._step.rows is not None

    def of(self, x: Rows) -> LowRankInputs | None:
        """What they are to add to the product of `x  # [tokens, inputs]`; None in a step without adapters."""
        if self._step.rows is None:
            return None
        assert isinstance(x, Tensor), "Linear.rows asks for rows as they are"
        return LowRankInputs(x, self._step.rows, self._weight)


class AdaptedExperts:
    """Additions of all places to the products of a mixture."""

    def __init__(self, gate_up: LowRankExperts, down: LowRankExperts, step: StepAdapters) -> None:
        self._gate_up, self._down = gate_up, down
        self._step = step

    @property
    def active(self) -> ExpertAdapters | None:
        """Of the step at hand; None: no row has an adapter."""
        rows = self._step.rows
        return None if rows is None else ExpertAdapters(rows.places, self._gate_up, self._down)
