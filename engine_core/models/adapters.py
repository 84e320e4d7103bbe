"""Places for LoRA adapters beside a model's weights: at fixed addresses, so that CUDA graphs find them.

A place is one run of memory with A and B of every matrix that may be adapted, zero where an adapter leaves one alone,
so an adapter is put into its place by one copy. Ranks share the matrices as they share the weights: B lies like the
weight's outputs, A like its inputs, and where inputs are split each rank adds its part of A to the partial sum. What
is added to logits is a stage's that gives them, beside an output embedding of its own or a tied one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.engine_core.models.adapter_folder import EXPERT, HEAD, RANKS, adaptable_of
from penstock.engine_core.models.decoder import Block, Decoder
from penstock.engine_core.models.expert_adapters import ExpertRoom
from penstock.engine_core.models.layers import Destination, Destinations, Linear
from penstock.engine_core.models.low_rank import Adapted, AdaptedExperts, StepAdapters
from penstock.engine_core.models.mlp import SeparateMlps, SparseMlp
from penstock.engine_core.models.parts import Source, vocabulary
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.low_rank import adapter_rows, output_tiles
from penstock.kernels.records import LowRankWeight
from penstock.protocol.errors import ModelError


@dataclass(frozen=True, eq=False)
class Product:
    """A product that adapters may change, as this rank makes it."""

    sources: tuple[Source, ...]
    inputs: int
    share: int  # of the inputs
    first: int  # of that share


class AdapterPlaces:
    """Places 1..count of a model, or of this rank's share of one of its stages; ranks are padded to `rank`."""

    def __init__(self, model: Decoder, whole: ModelSpec, count: int, max_rank: int, *, experts: bool = False) -> None:
        placement = model.placement
        self.experts = experts  # routed ones have room, too
        self.whole = whole  # all stages
        self.count = count
        self.max_rank = max_rank
        self.rank = -(-max_rank // RANKS) * RANKS
        self._invariant = placement.invariant
        self._step = StepAdapters()
        self._matrices: dict[str, tuple[Product, Source, int]] = {}  # by their names in a Llama; each with its part
        self._lacking: set[str] = set()  # of layers that have their own way to multiply by them
        held: dict[Product, Linear | Decoder] = {}
        for layer, block in enumerate(model.blocks, model.first):
            shapes = dict(adaptable_of(block.spec, model.spec.hidden))
            for name, linear in linears(block):
                names = [f"{name}.{source.name}" for source in linear.sources]
                if all(one in shapes for one in names):
                    first = linear.rank * linear.share if linear.axis else 0
                    product = Product(linear.sources, linear.inputs, linear.share, first)
                    held[product] = linear
                    for part, (one, source) in enumerate(zip(names, linear.sources, strict=True)):
                        self._matrices[f"model.layers.{layer}.{one}"] = product, source, part
            self._lacking.update(
                one for name in shapes if (one := f"model.layers.{layer}.{name}") not in self._matrices
            )
        if placement.group.ends and not model.spec.headless:
            rows = Source(HEAD, (vocabulary(HEAD, model.spec.vocab_size, placement),), 0, None)
            logits = Product((rows,), model.spec.hidden, model.spec.hidden, 0)
            held[logits] = model
            self._matrices[HEAD] = logits, rows, 0
        sizes = [size for product in held for size in self._sizes(product)]
        ends = list(accumulate(sizes, initial=0))
        self._starts = {product: (ends[2 * at], ends[2 * at + 1]) for at, product in enumerate(held)}
        self._rooms: dict[str, ExpertRoom] = {}  # by what names of a layer's experts begin with
        for layer, block in enumerate(model.blocks, model.first):
            if experts and (mixture := routed(block)) is not None:
                room = ExpertRoom(mixture, self.rank, ends[-1])
                self._rooms[f"model.layers.{layer}{EXPERT}"] = room
                ends.append(room.end)
        self.memory = torch.zeros(count, ends[-1], dtype=placement.dtype, device=placement.device)
        for product, owner in held.items():
            owner.adapted = Adapted(self._weight(product), self._step)
        for room in self._rooms.values():
            room.mixture.adapted = AdaptedExperts(*room.weights(self.memory), self._step)

    @contextmanager
    def over(self, places: Tensor) -> Iterator[None]:
        """Within it products are adapted. places: int32 [tokens], of each row of them, 0 without an adapter."""
        self._step.rows = adapter_rows(places, self.count, invariant=self._invariant)
        try:
            yield
        finally:
            self._step.rows = None

    def host_memory(self) -> Tensor:
        """Room for one adapter on the host, as it lies in its place: zeros."""
        return torch.zeros(self.memory.shape[1], dtype=self.memory.dtype)

    def destinations(self, memory: Any, name: str, rank: int) -> Destinations:
        """Where A and B of a matrix go in a place's memory, a tensor or an array: `A` and `B`; nothing of a matrix of
        another stage. Raises ModelError for one that has no place."""
        if name in self._lacking:
            raise ModelError(f"adapters of {name} are not served: this model does not multiply by it alone")
        begin, found, rest = name.partition(EXPERT)
        if found and (room := self._rooms.get(begin + found)) is not None:
            yield from room.destinations(memory, rest, rank)
        if name not in self._matrices:
            return
        product, source, part = self._matrices[name]
        (first, second), rows = self._starts[product], source.rows
        first += part * self.rank * product.share
        a = memory[first : first + rank * product.share].reshape(rank, product.share)
        b = memory[second + rows.start * self.rank : second + rows.stop * self.rank].reshape(-1, self.rank)[:, :rank]
        yield "A", Destination(a, (rank, product.inputs), 1, product.first)
        start = source.start if len(source.parts) == 1 else 0
        yield "B", Destination(b if len(b) else None, (source.outputs, rank), 0, start, runs=source.runs)

    def _sizes(self, product: Product) -> tuple[int, int]:
        """Numbers of A and of B."""
        return len(product.sources) * self.rank * product.share, outputs_of(product.sources)[-1].stop * self.rank

    def _weight(self, product: Product) -> LowRankWeight:
        """Views of all places' memory."""
        parts = outputs_of(product.sources)
        a, b = (
            self.memory[:, start : start + size]
            for start, size in zip(self._starts[product], self._sizes(product), strict=True)
        )
        a, b = a.view(self.count, -1, product.share), b.view(self.count, -1, self.rank)
        return LowRankWeight(a, b, parts, output_tiles(parts, self.rank, self.memory.device))


def outputs_of(sources: Sequence[Source]) -> tuple[slice, ...]:
    """The outputs of each on this rank, padding included."""
    ends = list(accumulate((sum(part.share for part in source.parts) for source in sources), initial=0))
    return tuple(map(slice, ends, ends[1:]))


def routed(block: Block) -> SparseMlp | None:
    """The layer's mixture of experts."""
    found = block.mlp.sparse if isinstance(block.mlp, SeparateMlps) else block.mlp
    return found if isinstance(found, SparseMlp) else None


def linears(block: Block) -> Iterator[tuple[str, Linear]]:
    """The products of a layer that are Linears, each once, with the name of the part that it belongs to."""
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
        held = () if part is None else vars(part).values()
        for product in dict.fromkeys(value for value in held if isinstance(value, Linear)):  # `reader` is one of them
            yield name, product
