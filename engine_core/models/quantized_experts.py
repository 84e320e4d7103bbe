"""Quantized matrices of a mixture of experts, stacked to two weights once all of a layer are read."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from penstock.engine_core.models.layer_spec import ExpertSpec
from penstock.engine_core.models.layers import Destinations, others, quantized
from penstock.engine_core.models.quantization.weight_format import Counts, WeightFormat
from penstock.engine_core.models.quantized_matrix import Owner, QuantizedMatrix
from penstock.kernels.experts import Weight, prepared
from penstock.kernels.grouped_linear import PlaneWeight
from penstock.kernels.quantized import alike, held_bytes, stack_experts, stack_outputs, take_outputs


class ExpertShare(NamedTuple):
    """What a rank has: experts, and numbers of the width of each."""

    first: int
    held: int
    start: int
    width: int


class QuantizedExperts(Owner):
    """The experts of a layer."""

    def __init__(
        self, spec: ExpertSpec, hidden: int, share: ExpertShare, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.hidden = hidden
        self.share = share
        self.device = device
        self.dtype = dtype
        self.gate_up: Weight | None = None
        self.down: Weight | None = None
        self.matrices = {f"experts.{at}.{name}": self.matrix(name, form)
                         for at in range(share.first, share.first + share.held) if not spec.stacked
                         for name, form in spec.formats}  # fmt: skip
        if spec.stacked:
            self.matrices = {f"experts.{name}": self.matrix(name, form) for name, form in spec.formats}

        self.left = len(self.matrices)  # to be found

    @property
    def weights(self) -> tuple[Weight, Weight]:
        """`[held, 2 * width, hidden]`, gates first if there are any, and `[held, hidden, width]`."""
        assert self.gate_up is not None, "loaded"
        assert self.down is not None, "loaded"
        return self.gate_up, self.down

    @property
    def quantized_bytes(self) -> int:
        """Memory of the weights."""
        held = [weight for weight in (self.gate_up, self.down) if weight is not None]
        return sum(weight.nbytes if isinstance(weight, Tensor | PlaneWeight) else held_bytes(weight) for weight in held)

    def matrix(self, name: str, form: WeightFormat) -> QuantizedMatrix:
        """This rank's share of one of the checkpoint's matrices."""
        spec, (first, held, start, width) = self.spec, self.share
        counts: Counts = "inputs" if name == "down_proj" else "outputs"
        runs = [slice(start, start + width)]
        if spec.stacked and held < spec.count:
            counts, runs = "experts", [slice(first, first + held)]
        elif name == "gate_up_proj" and spec.interleaved:
            runs = [slice(2 * start, 2 * (start + width))]
        elif name == "gate_up_proj":
            runs.append(slice(spec.width + start, spec.width + start + width))
        turned = spec.transposed and form.packing == "dense"
        return QuantizedMatrix(form, self.shape(name), counts, runs, self.device, self, transposed=turned)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a matrix in the checkpoint, `[outputs, inputs]`, of all experts if they are stacked."""
        width = 2 * self.spec.width if name == "gate_up_proj" else self.spec.width
        shape = (self.hidden, width) if name == "down_proj" else (width, self.hidden)
        return (self.spec.count, *shape) if self.spec.stacked else shape

    def gather(self) -> None:
        """Stack what the matrices have found, once all of them have."""
        self.left -= 1
        if self.left:
            return
        found = {name: matrix.found for name, matrix in self.matrices.items() if matrix.found is not None}
        for matrix in self.matrices.values():
            matrix.found = None
        if self.spec.stacked:
            gate_up, self.down = found["experts.gate_up_proj"], found["experts.down_proj"]
            if self.spec.interleaved:
                rows = torch.arange(gate_up.shape[-2], device=self.device)
                gate_up = take_outputs(gate_up, torch.cat((rows[0::2], rows[1::2])))
            self.gate_up = gate_up
            return
        held = range(self.share.first, self.share.first + self.share.held)
        *parts, self.down = (
            stack_experts([found[f"experts.{at}.{name}"] for at in held]) for name in (*self.spec.parts, "down_proj")
        )
        self.gate_up = stack_outputs(alike(*parts)) if self.spec.gated else parts[0]

    def pack(self) -> None:
        """Lay the experts out as kernels read them quickest."""
        self.gate_up, self.down = (prepared(weight, self.dtype) for weight in self.weights)

    def reopen(self) -> None:
        """Wait for all matrices once more."""
        self.left, self.gate_up, self.down = len(self.matrices), None, None

    @property
    def made(self) -> tuple[object, ...]:
        return self.gate_up, self.down

    def remake(self, made: tuple[object, ...]) -> None:
        self.gate_up, self.down = cast("tuple[Weight, Weight]", made)

    def destinations(self) -> Destinations:
        """By names within the MLP."""
        for name, form in self.spec.formats:
            shape = self.shape(name)
            for at in range(self.spec.count) if not self.spec.stacked else (0,):
                full = f"experts.{name}" if self.spec.stacked else f"experts.{at}.{name}"
                yield from quantized(full, self.matrices[full]) if full in self.matrices else others(full, form, shape)
