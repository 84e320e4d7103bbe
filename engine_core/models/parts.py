"""What a rank has of a model's matrices: where they live, and which of a checkpoint's outputs are its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.engine_core.models.sharding import vocabulary_share
from penstock.kernels.quantized import QuantizedWeight, pad_outputs, take_outputs


@dataclass(frozen=True)
class Placement:
    """Where a model's tensors live, and this rank's share of the sharded ones: heads, MLP width and vocabulary.

    `invariant` asks for results that do not depend on the rest of the batch, to the last bit. With `expert_parallel`
    each rank has whole experts, else a share of the width of each. With `adapters` some may add to products.
    """

    dtype: torch.dtype
    device: torch.device
    group: Group = ALONE
    invariant: bool = False
    expert_parallel: bool = False
    adapters: bool = False

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def alone(self) -> Placement:
        """The same for layers that every rank holds whole and computes by itself."""
        return replace(self, group=ALONE)

    def share(self, count: int) -> int:
        """Elements per rank of an axis that is split evenly."""
        assert count % self.size == 0, f"{count} is not divisible by {self.size} ranks"
        return count // self.size

    def kv_heads(self, count: int) -> int:
        """Key-value heads per rank: split, or one that several ranks repeat when there are fewer heads than ranks."""
        return self.share(count) if count >= self.size else 1

    def vector(self, width: int) -> Tensor:
        return torch.empty(width, dtype=self.dtype, device=self.device)

    def matrix(self, outputs: int, inputs: int) -> Tensor:
        """A weight `[outputs, inputs]`, or the biases of several products."""
        return torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)

    def matrices(self, count: int, outputs: int, inputs: int) -> Tensor:
        """Several weights, `[count, outputs, inputs]`; on a CPU transposed: few rows multiply twice as fast."""
        if self.device.type == "cpu":
            return torch.empty(count, inputs, outputs, dtype=self.dtype, device=self.device).transpose(1, 2)
        return torch.empty(count, outputs, inputs, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor's outputs within a fused weight."""

    name: str
    outputs: int  # in the checkpoint
    share: int  # on this rank
    start: int  # first of them
    order: tuple[slice, ...] = ()  # of the outputs of each head, as of `models.rope.head_order`
    head_dim: int = 0
    stride: int = 0  # outputs from head to head in a tensor in which parts take turns by head; 0: it has a run
    offset: int = 0  # of a head within that

    @property
    def held(self) -> int:
        """How many of the checkpoint's outputs are in this share; the rest is padding."""
        return min(self.share, max(0, self.outputs - self.start))

    @property
    def runs(self) -> tuple[slice, ...]:
        """Of the checkpoint's outputs that are in this share, in the order in which they are held."""
        if len(self.order) < 2 and not self.stride:
            return (slice(self.start, self.start + self.held),)
        first, count = self.start // self.head_dim, self.held // self.head_dim
        heads = [head * (self.stride or self.head_dim) + self.offset for head in range(first, first + count)]
        order = self.order or (slice(0, self.head_dim),)
        return tuple(slice(head + run.start, head + run.stop, run.step) for head in heads for run in order)


def spread(name: str, outputs: int, placement: Placement) -> Part:
    """A part whose outputs are spread evenly over the ranks."""
    share = placement.share(outputs)
    return Part(name, outputs, share, placement.rank * share)


def whole(name: str, outputs: int) -> Part:
    """A part that every rank holds."""
    return Part(name, outputs, outputs, 0)


def vocabulary(name: str, rows: int, placement: Placement) -> Part:
    """A part with a row for each token: shares are equal, those of the last ranks padded."""
    share = vocabulary_share(rows, placement.size)
    return Part(name, rows, share, placement.rank * share)


@dataclass(frozen=True, eq=False)
class Source:
    """One checkpoint tensor of a Linear: of one of its parts, or of all of them."""

    name: str
    parts: tuple[Part, ...]
    first: int  # of its rows among this rank's outputs
    form: WeightFormat | None  # None: it is not quantized
    backwards: bool = False  # it has the last part first

    @property
    def outputs(self) -> int:
        """In the checkpoint."""
        return sum(part.outputs for part in self.parts)

    @property
    def share(self) -> int:
        """This rank's outputs, with what pads them."""
        return sum(part.share for part in self.parts)

    @property
    def rows(self) -> slice:
        """Of this rank's outputs, without what pads them."""
        return slice(self.first, self.first + sum(part.held for part in self.parts))

    @property
    def start(self) -> int:
        return self.parts[0].start

    @property
    def ordered(self) -> bool:
        return self.backwards or any(len(part.order) > 1 or part.stride for part in self.parts)

    @property
    def firsts(self) -> tuple[int, ...]:
        """Of the tensor's outputs, the first of each part."""
        sizes = [0 if part.stride else part.outputs for part in self.parts]
        if self.backwards:
            return tuple(sum(sizes[at + 1 :]) for at in range(len(sizes)))
        return tuple(accumulate(sizes[:-1], initial=0))

    @property
    def runs(self) -> tuple[slice, ...]:
        """Of the tensor's outputs, where they are more than one run from `start`."""
        found: list[slice] = []
        for part, first in zip(self.parts, self.firsts, strict=True):
            found += (slice(first + run.start, first + run.stop, run.step) for run in part.runs)
        return tuple(found) if len(self.parts) > 1 or self.ordered else ()

    @property
    def shares(self) -> tuple[slice, ...]:
        """The same in the checkpoint's order."""
        one = self.parts[0]
        if one.stride:
            heads = (one.start // one.head_dim, (one.start + one.held) // one.head_dim)
            return (slice(*(head * one.stride for head in heads)),)
        found = [(first + part.start, part.held) for part, first in zip(self.parts, self.firsts, strict=True)]
        return tuple(slice(first, first + held) for first, held in sorted(found))

    def arranged(self, weight: QuantizedWeight) -> QuantizedWeight:
        """This rank's outputs, which `shares` are, in the order in which they are held, padded."""
        if self.ordered:
            held = (row for run in self.shares for row in range(run.start, run.stop))
            places = {row: at for at, row in enumerate(held)}
            rows = [places[row] for run in self.runs for row in range(run.start, run.stop, run.step or 1)]
            weight = take_outputs(weight, torch.tensor(rows, device=weight.values.device))
        return pad_outputs(weight, self.share)
