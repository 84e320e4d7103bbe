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
from penstock.engine_core.models.sharding import vocabulary_share
from penstock.engine_core.models.spec import ExpertSpec, ModelSpec
from penstock.kernels.experts import expert_mlp, route
from penstock.kernels.linear import gated_linear, linear, packed
from penstock.kernels.norm import add_rms_norm, rms_norm


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
    pieces: int = 1  # of the axis, equal ones: it is this slice of each, where the checkpoint's weight is a fused one
    owner: Linear | Embedding | None = None  # packs its weight once that is filled


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

    @property
    def held(self) -> int:
        """How many of the checkpoint's outputs are in this share; the rest is padding."""
        return min(self.share, max(0, self.outputs - self.start))


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
    """

    def __init__(
        self, parts: tuple[Part, ...], inputs: int, placement: Placement, *, bias: bool, split_inputs: bool = False
    ) -> None:
        self.parts = parts
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
        row = 0
        for part in self.parts:
            rows = slice(row, row + part.held)
            row += part.share
            start = self.rank * self.weight.shape[1] if self.axis else part.start
            shape, weight = (part.outputs, self.inputs), self.weight[rows] if part.held else None
            yield f"{part.name}.weight", Destination(weight, shape, self.axis, start, fan_in=self.inputs, owner=self)
            if self.has_bias:
                bias = None if self.bias is None else self.bias[rows]
                yield f"{part.name}.bias", Destination(bias, (part.outputs,), 0, part.start)


class FusedQKV:
    """Queries, keys and values in one product, of the residual stream or of `inputs` numbers."""

    def __init__(self, spec: ModelSpec, placement: Placement, inputs: int = 0) -> None:
        attention = spec.attention
        self.heads = placement.share(attention.heads)
        self.kv_heads = placement.kv_heads(attention.kv_heads)
        self.head_dim = attention.head_dim
        kv_width = attention.kv_heads * attention.head_dim
        kv_first = placement.rank * attention.kv_heads // placement.size * attention.head_dim
        kv_share = self.kv_heads * attention.head_dim
        parts = (
            spread("q_proj", attention.heads * attention.head_dim, placement),
            Part("k_proj", kv_width, kv_share, kv_first),
            Part("v_proj", kv_width, kv_share, kv_first),
        )
        self.linear = Linear(parts, inputs or spec.hidden, placement, bias=attention.qkv_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[tokens, inputs]` -> q `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`: views of one product."""
        fused = self.linear.forward(x).view(len(x), -1, self.head_dim)
        last = self.heads + self.kv_heads
        return fused[:, : self.heads], fused[:, self.heads : last], fused[:, last:]

    def destinations(self) -> Destinations:
        return self.linear.destinations()


def output_projection(spec: ModelSpec, placement: Placement) -> Linear:
    """From all heads' values back to the hidden size; each rank multiplies its own heads."""
    parts = (whole("o_proj", spec.hidden),)
    attention = spec.attention
    return Linear(parts, attention.heads * attention.head_dim, placement, bias=attention.output_bias, split_inputs=True)


class GatedMlp:
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020), gate and up in one product."""

    name = "mlp"  # in a checkpoint's layer

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        gate_up = tuple(spread(name, spec.mlp.intermediate, placement) for name in ("gate_proj", "up_proj"))
        self.gate_up = Linear(gate_up, spec.hidden, placement, bias=spec.mlp.bias)
        down = (whole("down_proj", spec.hidden),)
        self.down = Linear(down, spec.mlp.intermediate, placement, bias=spec.mlp.bias, split_inputs=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down.forward(self.gate_up.forward_gated(x))

    def destinations(self) -> Destinations:
        yield from self.gate_up.destinations()
        yield from self.down.destinations()


class SparseMlp:
    """A mixture of experts: a router, and gated MLPs of which each token goes to some.

    Every rank routes all tokens. It holds whole experts with `expert_parallel`, else its share of the width of each;
    either way its result is a partial sum."""

    def __init__(self, spec: ModelSpec, experts: ExpertSpec, placement: Placement) -> None:
        self.spec = experts
        self.name = "mlp" if experts.stacked else experts.names.block
        self.hidden = spec.hidden
        self.router = Linear((whole("gate", experts.count),), spec.hidden, placement, bias=False)
        parallel = placement.expert_parallel
        self.held = placement.share(experts.count) if parallel else experts.count
        self.first = placement.rank * self.held if parallel else 0
        self.width = experts.width if parallel else placement.share(experts.width)
        self.start = 0 if parallel else placement.rank * self.width  # in each expert's width
        self.gate_up = placement.matrices(self.held, 2 * self.width, spec.hidden)
        self.down = placement.matrices(self.held, spec.hidden, self.width)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum."""
        routes = route(self.router.forward(x), self.spec.chosen, normalised=self.spec.normalised)
        return expert_mlp(x, routes, self.gate_up, self.down, first=self.first)

    def destinations(self) -> Destinations:
        yield from self.router.destinations()
        yield from self.stacked() if self.spec.stacked else self.single()

    def single(self) -> Destinations:
        """Of tensors of one expert each."""
        names, width = self.spec.names, self.spec.width
        inner, outer = (width, self.hidden), (self.hidden, width)
        for expert in range(self.spec.count):
            at = expert - self.first
            held = 0 <= at < self.held
            gate = self.gate_up[at, : self.width] if held else None
            up = self.gate_up[at, self.width :] if held else None
            down = self.down[at] if held else None
            prefix = f"experts.{expert}."
            yield f"{prefix}{names.gate}.weight", Destination(gate, inner, 0, self.start, fan_in=self.hidden)
            yield f"{prefix}{names.up}.weight", Destination(up, inner, 0, self.start, fan_in=self.hidden)
            yield f"{prefix}{names.down}.weight", Destination(down, outer, 1, self.start, fan_in=width)

    def stacked(self) -> Destinations:
        """Of tensors of all experts."""
        count, width = self.spec.count, self.spec.width
        inner, outer = (count, 2 * width, self.hidden), (count, self.hidden, width)
        if self.held < count:
            gate_up = Destination(self.gate_up, inner, 0, self.first, fan_in=self.hidden)
            down = Destination(self.down, outer, 0, self.first, fan_in=width)
        else:
            gate_up = Destination(self.gate_up, inner, 1, self.start, fan_in=self.hidden, pieces=2)
            down = Destination(self.down, outer, 2, self.start, fan_in=width)
        yield "experts.gate_up_proj", gate_up
        yield "experts.down_proj", down


def layer_mlp(spec: ModelSpec, layer: int, placement: Placement) -> GatedMlp | SparseMlp:
    """A layer's MLP, dense or sparse."""
    experts = spec.experts_of(layer)
    return GatedMlp(spec, placement) if experts is None else SparseMlp(spec, experts, placement)


class Norm:
    """Weight of an RMS norm."""

    def __init__(self, width: int, eps: float, placement: Placement) -> None:
        self.weight = placement.vector(width)
        self.eps = eps
        self.group = placement.group

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add a block's output to the residual stream: the norm of the sum, and that sum.

        The ranks' partial sums, `[tokens, width]`, are added here (and once more where a stage ends), in one launch
        with addition and norm where the group has a custom all-reduce for so many rows.
        """
        exchange = self.group.exchange
        if exchange is not None and exchange.takes(partial):
            return exchange.add(partial, residual, self.weight, self.eps)
        if self.group.ranks is not None:
            partial = self.group.all_reduce(partial)
        return add_rms_norm(partial, residual, self.weight, self.eps)

    def destinations(self) -> Destinations:
        yield "weight", Destination(self.weight, tuple(self.weight.shape))


class Embedding:
    """Rows of the vocabulary; tied models read logits off them too, so they lie row by row on every device.

    A rank has a share of the rows, and zeros for the others' tokens: the sum over the ranks is exact.
    """

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        self.part = vocabulary("embed_tokens", spec.vocab_size, placement)
        self.group = placement.group
        self.weight = torch.empty(self.part.share, spec.hidden, dtype=placement.dtype, device=placement.device)
        self.weight[self.part.held :].zero_()
        self.operand = self.weight  # of the products that give logits
        self.read_off = self.group.ends and (spec.tied or spec.headless)

    def forward(self, ids: Tensor) -> Tensor:
        """`[tokens] -> [tokens, hidden]`."""
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
