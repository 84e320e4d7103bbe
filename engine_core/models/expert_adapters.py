"""Room for LoRA adapters of routed experts: A and B of every expert that a rank holds, or of its share of the width."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

from penstock.engine_core.models.adapted_modules import DOWN
from penstock.engine_core.models.layers import Destination, Destinations
from penstock.engine_core.models.mlp import SparseMlp
from penstock.kernels.records import LowRankExperts


class ExpertRoom:
    """Of one mixture, in each place: numbers from `start` on."""

    def __init__(self, mixture: SparseMlp, rank: int, start: int) -> None:
        self.mixture = mixture
        held, hidden, width, parts = mixture.held, mixture.hidden, mixture.width, len(mixture.spec.parts)
        self._shapes = (
            (held, parts * rank, hidden), (held, parts * width, rank), (held, rank, width), (held, hidden, rank),
        )  # fmt: skip
        self._starts = list(accumulate(map(math.prod, self._shapes), initial=start))

    @property
    def end(self) -> int:
        return self._starts[-1]

    def weights(self, memory: Any) -> tuple[LowRankExperts, LowRankExperts]:
        """Views of places' memory `[places, numbers]`: of the first product, and of the last."""
        found = [
            memory[:, start:end].reshape(len(memory), *shape)
            for (start, end), shape in zip(pairwise(self._starts), self._shapes, strict=True)
        ]
        return LowRankExperts(*found[:2]), LowRankExperts(*found[2:])

    def destinations(self, memory: Any, name: str, rank: int) -> Destinations:
        """Where A and B go in a place's memory `[numbers]`, a tensor or an array, of one expert's matrix by its number
        and name, or of those of all experts, which are `[experts, outputs, inputs]` each."""
        mixture, spec = self.mixture, self.mixture.spec
        gate_up, down = self.weights(memory[None])
        number, _, part = name.rpartition(".")
        weight = down if part == DOWN else gate_up
        a, b = weight.a[0], weight.b[0, :, :, :rank]
        most, width, hidden = weight.b.shape[3], mixture.width, mixture.hidden
        if not number:
            count, first = spec.count, mixture.first
            if part == DOWN:
                yield "A", Destination(a[:, :rank], (count, rank, spec.width), 2, mixture.start, first=first)
                yield "B", Destination(b, (count, hidden, rank), 1, first=first)
                return
            for at in range(weight.parts):
                own = a[:, at * most : at * most + rank]
                yield "A", Destination(own, (count, rank, hidden), 1, first=first)
            runs = mixture.pairs() if spec.gated else (slice(mixture.start, mixture.start + width),)
            yield "B", Destination(b, (count, weight.parts * spec.width, rank), 1, runs=runs, first=first)
            return
        at = int(number) - mixture.first
        held = 0 <= at < mixture.held
        if part == DOWN:
            yield "A", Destination(a[at, :rank] if held else None, (rank, spec.width), 1, mixture.start)
            yield "B", Destination(b[at] if held else None, (hidden, rank))
            return
        turn = spec.parts.index(part)
        yield "A", Destination(a[at, turn * most : turn * most + rank] if held else None, (rank, hidden))
        outputs = b[at, turn * width : (turn + 1) * width] if held else None
        yield "B", Destination(outputs, (spec.width, rank), 0, mixture.start)
