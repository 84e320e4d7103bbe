"""Places for LoRA adapters beside a model's weights: at fixed addresses, so that CUDA graphs find them.

A place is one run of memory with A and B of every matrix that may be adapted, zero where an adapter leaves one alone,
so an adapter is put into its place by one copy. Ranks share the matrices as they share the weights: B lies like the
weight's outputs, A like its inputs, and where inputs are split each rank adds its part of A to the partial sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from penstock.engine_core.models.adapter_folder import RANKS, adaptable_of
from penstock.engine_core.models.decoder import Block, Decoder
from penstock.engine_core.models.layers import Destination, Destinations, Linear, Placement, Source
from penstock.engine_core.models.low_rank import Adapted, StepAdapters
from penstock.engine_core.models.mlp import SeparateMlps, SparseMlp
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.low_rank import adapter_rows, output_tiles
from penstock.kernels.records import LowRankWeight
from penstock.protocol.errors import ModelError


class AdapterPlaces:
    """Places 1..count of a model, or of this rank's share of one of its stages; ranks are padded to `rank`."""

    def __init__(self, model: Decoder, whole: ModelSpec, count: int, max_rank: int) -> None:
        placement = model.placement
        self.whole = whole  # all stages
        self.count = count
        self.max_rank = max_rank
        self.rank = -(-max_rank // RANKS) * RANKS
        self._invariant = placement.invariant
        self._step = StepAdapters()
        self._matrices: dict[str, tuple[Linear, Source, int]] = {}  # by their names in a Llama; each with its part
        self._lacking: set[str] = set()  # of layers that have their own way to multiply by them
        held: list[Linear] = []
        for layer, block in enumerate(model.blocks, model.first):
            shapes = dict(adaptable_of(block.spec, model.spec.hidden))
            for name, linear in linears(block):
                names = [f"{name}.{source.name}" for source in linear.sources]
                if all(one in shapes for one in names):
                    held.append(linear)
                    for part, (one, source) in enumerate(zip(names, linear.sources, strict=True)):
                        self._matrices[f"model.layers.{layer}.{one}"] = linear, source, part
            self._lacking.update(
                one for name in shapes if (one := f"model.layers.{layer}.{name}") not in self._matrices
            )
        sizes = [size for linear in held for size in self._sizes(linear)]
        ends = list(accumulate(sizes, initial=0))
        self._starts = {linear: (ends[2 * at], ends[2 * at + 1]) for at, linear in enumerate(held)}
        self.memory = torch.zeros(count, ends[-1], dtype=placement.dtype, device=placement.device)
        for linear in held:
            linear.adapted = Adapted(self._weight(linear, self.memory, placement), self._step)

    @contextmanager
    def over(self, places: Tensor) -> Iterator[None]:
        """Within it products are adapted. places: int32 [tokens], of each row of them, 0 without an adapter."""
        self._step.rows = adapter_rows(places, self.count, invariant=self._invariant)
        try:
            yield
        finally:
            self._step.rows = None

    def host_memory(self) -> Tensor:
        """Room for one adapter on the host, as it lies in its place: zeros, pinned for a GPU."""
        pinned = self.memory.device.type == "cuda"
        return torch.zeros(self.memory.shape[1], dtype=self.memory.dtype, pin_memory=pinned)

    def destinations(self, memory: Tensor, name: str, rank: int) -> Destinations:
        """Where A and B of a matrix go in a place's memory: `A` and `B`; nothing of a matrix of another stage.
        Raises ModelError for one that has no place."""
        if name in self._lacking:
            raise ModelError(f"adapters of {name} are not served: this model does not multiply by it alone")
        if name not in self._matrices:
            return
        linear, source, part = self._matrices[name]
        weight = self._weight(linear, memory[None], None)
        a, b = weight.a[0, part * self.rank : part * self.rank + rank], weight.b[0, source.rows, :rank]
        yield "A", Destination(a, (rank, linear.inputs), 1, linear.rank * linear.share if linear.axis else 0)
        start = source.start if len(source.parts) == 1 else 0
        yield "B", Destination(b if len(b) else None, (source.outputs, rank), 0, start, runs=source.runs)

    def _sizes(self, linear: Linear) -> tuple[int, int]:
        """Numbers of A and of B."""
        return len(linear.sources) * self.rank * linear.share, outputs_of(linear.sources)[-1].stop * self.rank

    def _weight(self, linear: Linear, memory: Tensor, placement: Placement | None) -> LowRankWeight:
        """Views of places' memory `[places, numbers]`; without its tiles where it has no placement."""
        parts = outputs_of(linear.sources)
        a, b = (
            memory[:, start : start + size]
            for start, size in zip(self._starts[linear], self._sizes(linear), strict=True)
        )
        tiles = torch.empty(0) if placement is None else output_tiles(parts, self.rank, placement.device)
        a, b = a.view(len(memory), -1, linear.share), b.view(len(memory), -1, self.rank)
        return LowRankWeight(a, b, parts, tiles)


def outputs_of(sources: Sequence[Source]) -> tuple[slice, ...]:
    """The outputs of each on this rank, padding included."""
    ends = list(accumulate((sum(part.share for part in source.parts) for source in sources), initial=0))
    return tuple(map(slice, ends, ends[1:]))


def linears(block: Block) -> Iterator[tuple[str, Linear]]:
    """The products of a layer that are Linears, each with the name of the part that it belongs to."""
    parts: list[tuple[str, object]] = [("self_attn", block.attention)]
    if block.spec.recurrence is not None:
        parts.append((block.spec.recurrence.place, block.recurrence))
    if isinstance(block.mlp, SparseMlp):
        parts.append((f"mlp.{block.mlp.spec.shared_name}", block.mlp.shared))
    elif isinstance(block.mlp, SeparateMlps):
        parts.append((f"mlp.{block.mlp.spec.shared_name}", block.mlp.dense))
    else:
        parts.append(("mlp", block.mlp))
    for name, part in parts:
        for value in () if part is None else vars(part).values():
            if isinstance(value, Linear):
                yield name, value
