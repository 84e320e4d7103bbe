"""MLPs and mixtures of experts, on one rank's share of their width."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.engine_core.models.layer_spec import APART_NORMS, ExpertSpec, LayerSpec, MlpSpec, NormSpec
from penstock.engine_core.models.layers import Destination, Destinations, Linear, Norm, named
from penstock.engine_core.models.low_rank import AdaptedExperts
from penstock.engine_core.models.parts import Part, Placement, spread, whole
from penstock.engine_core.models.quantized_experts import ExpertShare, QuantizedExperts
from penstock.kernels.activation import SILU, activate
from penstock.kernels.experts import expert_mlp, route
from penstock.kernels.quantized import Rows
from penstock.kernels.records import Activation, AttentionBatch, ExpertBiases, Routes, Routing

GATE_OUTPUTS = 8  # of a router behind those of experts, where the first is a shared expert's gate: 16 bytes


class Mlp:
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020), gate and up in one product; or without a gate."""

    def __init__(self, spec: MlpSpec, hidden: int, placement: Placement) -> None:
        names = ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
        gate_up = tuple(spread(name, spec.width, placement) for name in names)
        fused = "gate_up_proj" if spec.fused else ""
        self.spec = spec
        self.activation = Activation(spec.activation, spec.slope)
        self.gate_up = Linear(
            gate_up, hidden, placement, bias=spec.bias, fused=fused, backwards=spec.up_first, formats=spec.formats
        )
        self.reader = self.gate_up
        down, bias = (whole("down_proj", hidden),), spec.bias or spec.down_bias
        self.down = Linear(down, spec.width, placement, bias=bias, split_inputs=True, formats=spec.formats)

    def forward(self, x: Rows, batch: AttentionBatch | None = None) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum. batch: of which a mixture asks something."""
        if self.spec.gated and self.activation == SILU:
            return self.down.forward(self.gate_up.forward_gated(x, self.down.rows))
        return self.down.forward(activate(self.gate_up.forward(x), self.activation, gated=self.spec.gated))

    def destinations(self) -> Destinations:
        """By names within the MLP."""
        return named(("", self.gate_up), ("", self.down))


class SparseMlp:
    """A mixture of experts: a router, and MLPs of which each token goes to some, perhaps beside one to which all
    go.

    Every rank routes all tokens. It holds whole experts with `expert_parallel`, else its share of the width of each;
    either way its result is a partial sum. Where it can, and no adapter adds to its products, the MLP to which all go
    is one more expert behind the others, and its gate one more output of the router: six products and passes less."""

    def __init__(self, spec: ExpertSpec, hidden: int, placement: Placement) -> None:
        self.spec = spec
        self.hidden = hidden
        self.invariant = placement.invariant
        self.activation = Activation(spec.gate.kind, spec.gate.slope, spec.gate.limit, spec.gate.shift)
        self.joined = spec.joins and not (placement.expert_parallel or placement.adapters)
        router: tuple[Part, ...] = (whole("gate", spec.count),)
        gate = f"{spec.shared_name}_gate"
        if self.joined and spec.shared_gate:
            router += (Part(gate, 1, GATE_OUTPUTS, 0),)
        self.router = Linear(router, hidden, placement, bias=spec.router_bias)
        self.reader: Linear | None = None  # the router reads x as it is
        bias = torch.empty(spec.count, dtype=torch.float32, device=placement.device) if spec.routing.bias else None
        own = spec.routing
        self.routing = Routing(
            own.chosen, own.normalised, own.scores == "sigmoid", own.scale, bias, own.groups, own.top_groups,
            own.group_best, self.joined,
        )  # fmt: skip
        parallel = placement.expert_parallel
        self.held = placement.share(spec.count) if parallel else spec.count
        self.first = placement.rank * self.held if parallel else 0
        self.width = spec.width if parallel else placement.share(spec.width)
        self.start = 0 if parallel else placement.rank * self.width  # in each expert's width
        self.quantized: QuantizedExperts | None = None
        if spec.formats:
            share = ExpertShare(self.first, self.held, self.start, self.width)
            self.quantized = QuantizedExperts(
                spec, hidden, share, placement.device, placement.dtype, joined=self.joined
            )
        held = 0 if spec.formats else self.held + self.joined
        inner = len(spec.parts) * self.width
        self.gate_up = placement.matrices(held, inner, hidden)
        self.down = placement.matrices(held, hidden, self.width)
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if spec.bias:  # that of the downs is in one rank's partial sum
            down = placement.matrix(self.held, hidden) if parallel or not placement.rank else None
            biases = placement.matrix(self.held, inner), down
        self.biases = ExpertBiases(*biases)
        self.adapted: AdaptedExperts | None = None  # what adapters add to the experts' products
        self.shared = Mlp(spec.shared, hidden, placement) if spec.shared is not None and not self.joined else None
        gated = spec.shared_gate and not self.joined
        self.shared_gate = Linear((whole(gate, 1),), hidden, placement, bias=False) if gated else None

    def forward(self, x: Rows, batch: AttentionBatch | None = None) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum. batch: whose rows may have fewer tokens,
        since a CUDA graph's step is padded; no expert takes the others."""
        assert isinstance(x, Tensor)
        real = None if batch is None else batch.query_start[-1:]
        logits, read = self.router.forward(x), x
        gates = logits[:, self.spec.count] if self.joined and self.spec.shared_gate else None
        routes = route(logits[:, : self.spec.count], self.routing, gates, real)
        if self.spec.routing.scales_inputs:
            read = (x * routes.shares).to(x.dtype)
            routes = routes._replace(shares=torch.ones_like(routes.shares))
        found = self.multiply(read, routes)
        if self.shared is None:
            return found
        shared = self.shared.forward(x)
        if self.shared_gate is not None:
            shared *= self.shared_gate.forward(x).sigmoid_()
        return found.add_(shared)

    def multiply(self, x: Tensor, routes: Routes) -> Tensor:
        """The held experts' part of the sum for each token: `[tokens, hidden]`, as x."""
        gate_up, down = (self.gate_up, self.down) if self.quantized is None else self.quantized.weights
        return expert_mlp(
            x, routes, gate_up, down, first=self.first, biases=self.biases, activation=self.activation,
            gated=self.spec.gated, adapters=None if self.adapted is None else self.adapted.active,
            invariant=self.invariant,
        )  # fmt: skip

    def destinations(self) -> Destinations:
        """By names within the MLP."""
        yield from self.router.destinations()
        if self.routing.bias is not None:
            shape = (1,) * (self.spec.routing.bias_dims - 1) + (self.spec.count,)
            yield self.spec.routing.bias, Destination(self.routing.bias.view(shape), shape)
        shared = f"{self.spec.shared_name}."
        yield from named((shared, self.shared), ("", self.shared_gate), ("", self.quantized))
        yield from self.expert(shared, self.held) if self.joined else ()
        yield from self.stacked() if self.spec.stacked else self.single()

    def single(self) -> Destinations:
        """Of tensors of one expert each, weights and biases."""
        for expert in range(self.spec.count):
            at = expert - self.first
            yield from self.expert(f"experts.{expert}.", at if 0 <= at < self.held else None)

    def expert(self, name: str, at: int | None) -> Destinations:
        """Of the tensors of one, whose names begin so. at: among those that are held; None: it is another rank's."""
        hidden, width = self.hidden, self.spec.width
        biases = ExpertBiases(None, None) if at is None else self.biases
        for part, half in zip(self.spec.parts, (slice(0, self.width), slice(self.width, None)), strict=False):
            if self.quantized is None:
                weight = None if at is None else self.gate_up[at, half]
                yield f"{name}{part}.weight", Destination(weight, (width, hidden), 0, self.start, fan_in=hidden)
            if self.spec.bias:
                bias = None if biases.gate_up is None else biases.gate_up[at, half]
                yield f"{name}{part}.bias", Destination(bias, (width,), 0, self.start)
        if self.quantized is None:
            weight = None if at is None else self.down[at]
            yield f"{name}down_proj.weight", Destination(weight, (hidden, width), 1, self.start, fan_in=width)
        if self.spec.bias:
            bias = None if biases.down is None else biases.down[at]
            yield f"{name}down_proj.bias", Destination(bias, (hidden,))

    def stacked(self) -> Destinations:
        """Of tensors of all experts, weights and biases."""
        spec = self.spec
        if self.quantized is None:
            down = (slice(self.start, self.start + self.width),)
            inner, outer = self.gate_up[: self.held], self.down[: self.held]
            yield "experts.gate_up_proj", self.stack(inner, 2 * spec.width, self.hidden, 1, self.pairs())
            yield "experts.down_proj", self.stack(outer, self.hidden, spec.width, 2, down)
        if spec.bias:
            shape = (spec.count, 2 * spec.width)
            gate_up = Destination(self.biases.gate_up, shape, 1, first=self.first, runs=self.pairs())
            yield "experts.gate_up_proj_bias", gate_up
            down_bias = Destination(self.biases.down, (spec.count, self.hidden), 0, self.first)
            yield "experts.down_proj_bias", down_bias

    def pairs(self) -> tuple[slice, slice]:
        """This rank's gates and ups among all of an expert's in one tensor."""
        spec, end = self.spec, self.start + self.width
        if spec.interleaved:
            return slice(2 * self.start, 2 * end, 2), slice(2 * self.start + 1, 2 * end, 2)
        return slice(self.start, end), slice(spec.width + self.start, spec.width + end)

    def stack(self, held: Tensor, outputs: int, inputs: int, axis: int, runs: tuple[slice, ...]) -> Destination:
        """A rank's `[held, outputs, inputs]`: of each expert these runs of an axis."""
        shape = self.spec.count, outputs, inputs
        if self.spec.transposed:
            held, axis, shape = held.transpose(1, 2), 3 - axis, (self.spec.count, inputs, outputs)
        return Destination(held, shape, axis, first=self.first, fan_in=inputs, runs=runs)


class SeparateMlps:
    """A dense MLP and a mixture of experts side by side, with norms of their own (Gemma 4: 2026)."""

    def __init__(self, spec: ExpertSpec, norm: NormSpec, hidden: int, placement: Placement) -> None:
        assert spec.shared is not None, "beside experts"
        self.spec = spec
        self.root = hidden**-0.5
        self.dense = Mlp(spec.shared, hidden, placement)
        self.reader = self.dense.reader
        self.sparse = SparseMlp(replace(spec, shared=None), hidden, placement)
        self.norms = {name: Norm(hidden, norm, placement) for name in APART_NORMS}
        self.shares = placement.vector(spec.count)

    def forward(self, x: Rows, stream: Tensor, batch: AttentionBatch | None = None) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, the sum of all ranks. x: what the dense MLP reads, a norm of the
        residual `stream  # [tokens, hidden]`. batch: as of `SparseMlp`."""
        real = None if batch is None else batch.query_start[-1:]
        router, read, dense, sparse = (self.norms[name] for name in APART_NORMS)
        logits = self.sparse.router.forward(router.forward(stream)).mul_(self.root)
        routes = route(logits, self.sparse.routing, None, real)
        routes = routes._replace(shares=routes.shares * self.shares[routes.experts])
        parts = self.dense.forward(x), self.sparse.multiply(read.forward(stream), routes)
        if dense.group.ranks is not None:
            first, second = dense.group.all_reduce(torch.cat(parts)).chunk(2)
            parts = first, second
        return dense.forward(parts[0]).add_(sparse.forward(parts[1]))

    def destinations(self) -> Destinations:
        """By names within the MLP."""
        norms = ((f"{name}.", norm) for name, norm in self.norms.items())
        yield from named((f"{self.spec.shared_name}.", self.dense), ("", self.sparse), *norms)
        yield "share", Destination(self.shares, (self.spec.count,))


def layer_mlp(spec: MlpSpec | ExpertSpec, hidden: int, placement: Placement) -> Mlp | SparseMlp:
    """A layer's MLP, dense or sparse."""
    return SparseMlp(spec, hidden, placement) if isinstance(spec, ExpertSpec) else Mlp(spec, hidden, placement)


def block_mlp(layer: LayerSpec, hidden: int, placement: Placement) -> Mlp | SparseMlp | SeparateMlps | None:
    """The same, of a layer that may have both or none."""
    if layer.experts is not None and layer.experts.apart:
        return SeparateMlps(layer.experts, layer.norm, hidden, placement)
    return None if layer.mlp is None else layer_mlp(layer.mlp, hidden, placement)
