"""The sparse MLP of a mixture of experts: a router, and gated MLPs of which each token goes to some."""

from __future__ import annotations

from torch import Tensor

from penstock.engine_core.models.layers import Destination, Destinations, GatedMlp, Linear, Placement, whole
from penstock.engine_core.models.spec import ExpertSpec, ModelSpec
from penstock.kernels.experts import expert_mlp, route


class SparseMlp:
    """Every rank routes all tokens. It holds whole experts if the placement is `expert_parallel`, else its share of the
    width of each; either way it has a partial sum."""

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
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's part of the sum."""
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
    """The MLP that a layer has."""
    experts = spec.experts_of(layer)
    return GatedMlp(spec, placement) if experts is None else SparseMlp(spec, experts, placement)
