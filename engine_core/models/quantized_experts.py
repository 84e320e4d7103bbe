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
from penstock.kernels.quantized import (
    alike,
    ending,
    held_bytes,
    join_experts,
    stack_experts,
    stack_outputs,
    take_outputs,
)


class ExpertShare(NamedTuple):
    """What a rank has: experts, and numbers of the width of each."""

    first: int
    held: int
    start: int
    width: int


class QuantizedExperts(Owner):
    """The experts of a layer, and if it has `joined` them the shared one behind the others."""

    def __init__(
        self, spec: ExpertSpec, hidden: int, share: ExpertShare, device: torch.device, dtype: torch.dtype,
        *, joined: bool = False,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.hidden = hidden
        self.share = share
        self.device = device
        self.dtype = dtype
        self.gate_up: Weight | None = None
        self.down: Weight | None = None
        routed = () if spec.stacked else range(share.first, share.first + share.held)
        own = [spec.shared_name] if joined else []
        self.single = [*(f"experts.{at}" for at in routed), *own]  # those whose matrices are tensors of their own
        forms = spec.shared.formats if joined and spec.shared is not None else spec.formats
        self.matrices = {f"{one}.{name}": self.matrix(name, form) for one in self.single for name, form in forms}
        if spec.stacked:
            self.matrices |= {f"experts.{name}": self.matrix(name, form, stacked=True) for name, form in spec.formats}
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

    def matrix(self, name: str, form: WeightFormat, *, stacked: bool = False) -> QuantizedMatrix:
        """This rank's share of one of the checkpoint's matrices."""
        spec, (first, held, start, width) = self.spec, self.share
        counts: Counts = "inputs" if name == "down_proj" else "outputs"
        runs = [slice(start, start + width)]
        if stacked and held < spec.count:
            counts, runs = "experts", [slice(first, first + held)]
        elif name == "gate_up_proj" and spec.interleaved:
            runs = [slice(2 * start, 2 * (start + width))]
        elif name == "gate_up_proj":
            runs.append(slice(spec.width + start, spec.width + start + width))
        turned = stacked and spec.transposed and form.packing == "dense"
        shape = self.shape(name, stacked=stacked)
        return QuantizedMatrix(form, shape, counts, runs, self.device, self, transposed=turned)

    def shape(self, name: str, *, stacked: bool = False) -> tuple[int, ...]:
        """Of a matrix in the checkpoint, `[outputs, inputs]`, of all experts if they are stacked."""
        width = 2 * self.spec.width if name == "gate_up_proj" else self.spec.width
        shape = (self.hidden, width) if name == "down_proj" else (width, self.hidden)
        return (self.spec.count, *shape) if stacked else shape

    def gather(self) -> None:
        """Stack what the matrices have found, once all of them have."""
        self.left -= 1
        if self.left:
            return
        found = {name: matrix.found for name, matrix in self.matrices.items() if matrix.found is not None}
        for matrix in self.matrices.values():
            matrix.found = None
        pairs = []
        if self.spec.stacked:
            gate_up, down = found["experts.gate_up_proj"], found["experts.down_proj"]
            if self.spec.interleaved:
                rows = torch.arange(gate_up.shape[-2], device=self.device)
                gate_up = take_outputs(gate_up, torch.cat((rows[0::2], rows[1::2])))
            pairs.append((ending(gate_up, self.share.width), down))
        if self.single:
            *parts, down = (
                stack_experts([found[f"{one}.{name}"] for one in self.single])
                for name in (*self.spec.parts, "down_proj")
            )
            pairs.append((stack_outputs(alike(*parts)) if self.spec.gated else parts[0], down))
        self.gate_up, self.down = (join_experts(weights) for weights in zip(*pairs, strict=True))

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
        for full, matrix in self.matrices.items():
            yield from quantized(full, matrix)
        for name, form in () if self.spec.stacked else self.spec.formats:
            shape = self.shape(name)
            for full in (f"experts.{at}.{name}" for at in range(self.spec.count)):
                yield from () if full in self.matrices else others(full, form, shape)
