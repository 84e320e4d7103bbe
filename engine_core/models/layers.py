"""The layers that all families share: plain objects over tensors that know where checkpoint tensors belong.

Fused weights (query, key and value; gate and up) are one matrix. A layer's `destinations` maps the names of the tensors
in a checkpoint, relative to the layer, to views of its own memory, so that loading copies each byte once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.sharding import vocabulary_share
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.linear import gated_linear, linear, packed
from penstock.kernels.norm import add_norm, layer_norm, rms_norm


@dataclass(frozen=True)
class Placement:
    """Where a model's tensors live, and this rank's share of the sharded ones: heads, MLP width and vocabulary.

    `invariant` asks for results that do not depend on the rest of the batch, to the last bit. With `expert_parallel`
    each rank has whole experts, else a share of the width of each.
    """

    dtype: torch.dtype
    device: torch.device
    group: Group = ALONE
    invariant: bool = False
    expert_parallel: bool = False

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
        """A weight `[outputs, inputs]`."""
        return torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)

    def vectors(self, count: int, width: int) -> Tensor:
        """Biases of several products."""
        return torch.empty(count, width, dtype=self.dtype, device=self.device)

    def matrices(self, count: int, outputs: int, inputs: int) -> Tensor:
        """Several such weights, `[count, outputs, inputs]`; on a CPU their transposes are contiguous: few rows multiply
        twice as fast."""
        if self.device.type == "cpu":
            return torch.empty(count, inputs, outputs, dtype=self.dtype, device=self.device).transpose(1, 2)
        return torch.empty(count, outputs, inputs, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Destination:
    """Where one checkpoint tensor goes: this rank's slice of it, along `axis` from `start`, fills `tensor`."""

    tensor: Tensor | None  # None: the tensor is another rank's
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    axis: int = 0
    start: int = 0
    fan_in: int = 0  # inputs summed into each output of a matrix; 0: a norm's weight or a bias
    runs: tuple[slice, ...] = ()  # of the axis, one behind the other in `tensor`; empty: one, from `start`
    offset: float = 0.0  # added to what the checkpoint has
    owner: Linear | Embedding | None = None  # packs its weight once that is filled
    first: int = 0  # of experts in one tensor that is cut along another axis, the first that is held


Destinations = Iterator[tuple[str, Destination]]


def held_bytes(destinations: Iterable[Destination]) -> int:
    """Memory of what this rank holds."""
    return sum(found.tensor.nbytes for found in destinations if found.tensor is not None)


def pack(destinations: Mapping[str, Destination]) -> None:
    """Have filled weights laid out as products on a CPU want them. They can be read no more."""
    for owner in dict.fromkeys(found.owner for found in destinations.values()):
        if owner is not None:
            owner.pack()


def prefixed(prefix: str, destinations: Destinations) -> Destinations:
    return ((prefix + name, destination) for name, destination in destinations)


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor's outputs within a fused weight."""

    name: str
    outputs: int  # in the checkpoint
    share: int  # on this rank
    start: int  # first of them
    order: tuple[slice, ...] = ()  # of the outputs of each head, as of `models.rope.head_order`
    head_dim: int = 0

    @property
    def held(self) -> int:
        """How many of the checkpoint's outputs are in this share; the rest is padding."""
        return min(self.share, max(0, self.outputs - self.start))

    @property
    def runs(self) -> tuple[slice, ...]:
        """Of the checkpoint's outputs that are in this share, in the order in which they are held."""
        if len(self.order) < 2:
            return (slice(self.start, self.start + self.held),)
        heads = range(self.start, self.start + self.held, self.head_dim)
        return tuple(slice(head + run.start, head + run.stop, run.step) for head in heads for run in self.order)


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


class Linear:
    """A weight `[outputs, inputs]` and perhaps a bias, stacked by output from the tensors of one or several parts.

    With `split_inputs` the ranks share the inputs instead: each then has a partial sum, and the first adds the bias.
    fused: the name of the parts' one tensor in the checkpoint, empty where each has its own.
    """

    def __init__(
        self, parts: tuple[Part, ...], inputs: int, placement: Placement, *, bias: bool, split_inputs: bool = False,
        fused: str = "",
    ) -> None:  # fmt: skip
        self.parts = parts
        self.fused = fused
        self.inputs = inputs
        self.axis = 1 if split_inputs else 0
        self.rank = placement.rank
        outputs = sum(part.share for part in parts)
        self.weight = placement.matrix(outputs, placement.share(inputs) if split_inputs else inputs)
        self.operand = self.weight  # of products: the weight, or what `pack` made of it
        self.bias = placement.vector(outputs) if bias and not (split_inputs and placement.rank) else None
        self.has_bias = bias
        self.invariant = placement.invariant
        if any(part.held < part.share for part in parts):
            self.weight.zero_()  # padding is read, too

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, inputs] -> [tokens, outputs]`."""
        return linear(x, self.operand, self.bias, invariant=self.invariant)

    def forward_gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up of the two parts' outputs, gate first: `[tokens, inputs] -> [tokens, outputs / 2]`."""
        return gated_linear(x, self.operand, self.bias, invariant=self.invariant)

    def pack(self) -> None:
        """Lay the loaded weight out as products on a CPU want it. Its own memory is given back."""
        if self.operand is self.weight:
            self.operand = packed(self.weight)
            if self.operand is not self.weight:
                self.weight = self.weight.to("meta")

    def destinations(self) -> Destinations:
        """Rows of the fused weight by the parts' names."""
        if self.fused:
            yield from self.placed(self.fused, sum(part.outputs for part in self.parts), slice(None), self.fused_runs())
            return
        row = 0
        for part in self.parts:
            rows = slice(row, row + part.held)
            row += part.share
            runs = part.runs if len(part.order) > 1 else ()
            yield from self.placed(part.name, part.outputs, rows, runs, part.start)

    def fused_runs(self) -> tuple[slice, ...]:
        """Of the outputs of the checkpoint's one tensor."""
        found: list[slice] = []
        first = 0
        for part in self.parts:
            found += (slice(first + run.start, first + run.stop, run.step) for run in part.runs)
            first += part.outputs
        return tuple(found)

    def placed(self, name: str, outputs: int, rows: slice, runs: tuple[slice, ...], start: int = 0) -> Destinations:
        """These rows by the checkpoint's weight and bias."""
        held = self.weight[rows]
        weight, first = held if len(held) else None, self.rank * self.weight.shape[1] if self.axis else start
        shape = (outputs, self.inputs)
        yield f"{name}.weight", Destination(weight, shape, self.axis, first, self.inputs, runs, owner=self)
        if self.has_bias:
            bias = None if self.bias is None or weight is None else self.bias[rows]
            yield f"{name}.bias", Destination(bias, (outputs,), 0, start, runs=runs)


class Norm:
    """Weight of an RMS norm, or weight and bias of a LayerNorm. What the spec adds to the weight is added in fp32."""

    def __init__(self, width: int, spec: NormSpec, placement: Placement, part: Part | None = None) -> None:
        self.part = part or whole("", width)
        dtype = torch.float32 if spec.offset else placement.dtype
        self.weight = torch.empty(self.part.share, dtype=dtype, device=placement.device)
        self.bias = placement.vector(width) if spec.centered else None
        self.eps = spec.eps
        self.offset = spec.offset
        self.group = placement.group

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(
        self, delta: Tensor, residual: Tensor, *, partial: bool = True, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Add a block's output to the residual stream: the norm of residual + scale * delta, and that sum.

        The ranks' `partial` sums, `[tokens, width]`, are added here (and once more where a stage ends), in one launch
        with addition and norm where the group has a custom all-reduce for so many rows.
        """
        exchange = self.group.exchange
        if partial and exchange is not None and self.bias is None and scale == 1.0 and exchange.takes(delta):
            return exchange.add(delta, residual, self.weight, self.eps)
        if partial:
            delta = self.summed(delta)
        return add_norm(delta, residual, self.weight, self.eps, self.bias, scale)

    def summed(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' parts."""
        return partial if self.group.ranks is None else self.group.all_reduce(partial)

    def destinations(self) -> Destinations:
        runs = self.part.runs if len(self.part.order) > 1 else ()
        shape = (self.part.outputs,)
        yield "weight", Destination(self.weight, shape, 0, self.part.start, runs=runs, offset=self.offset)
        if self.bias is not None:
            yield "bias", Destination(self.bias, shape)


class Embedding:
    """Rows of the vocabulary, times the model's scale; tied models read logits off them too, so they lie row by row on
    every device.

    A rank has a share of the rows, and zeros for the others' tokens: the sum over the ranks is exact.
    """

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        self.part = vocabulary("embed_tokens", spec.vocab_size, placement)
        self.group = placement.group
        self.scale = torch.tensor(spec.body.embedding_scale, dtype=placement.dtype).item()  # as it is multiplied with
        self.weight = torch.empty(self.part.share, spec.hidden, dtype=placement.dtype, device=placement.device)
        self.weight[self.part.held :].zero_()
        self.operand = self.weight  # of the products that give logits
        self.read_off = self.group.ends and (spec.tied or spec.headless)

    def forward(self, ids: Tensor) -> Tensor:
        """`[tokens] -> [tokens, hidden]`."""
        found = self.rows(ids)
        return found if self.scale == 1.0 else found * self.scale

    def rows(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return embedding(ids, self.weight)
        local = ids - self.part.start
        others = (local < 0) | (local >= self.part.share)
        found = embedding(local.masked_fill(others, 0), self.weight)
        return self.group.all_reduce(found.masked_fill(others[:, None], 0.0))

    def pack(self) -> None:
        """Add a copy for logits, laid out as products on a CPU want it."""
        if self.operand is self.weight:
            self.operand = packed(self.weight)

    @property
    def copied_bytes(self) -> int:
        return 0 if self.operand is self.weight else self.weight.nbytes

    def destinations(self) -> Destinations:
        held, hidden = self.part.held, self.weight.shape[1]
        weight = self.weight[:held] if held else None
        owner = self if self.read_off else None
        yield "weight", Destination(weight, (self.part.outputs, hidden), 0, self.part.start, hidden, owner=owner)
