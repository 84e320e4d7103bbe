"""Launches of adapters' kernels for `benchmarks.chip_launches`, which has replaced `chip_of` when it imports this."""

from __future__ import annotations

import itertools

import torch

from benchmarks.meta_tensors import memory, numbers
from penstock.kernels.experts import expert_mlp, route
from penstock.kernels.linear import gated_linear, linear
from penstock.kernels.low_rank import adapter_rows, output_tiles
from penstock.kernels.records import ExpertAdapters, LowRankExperts, LowRankInputs, LowRankWeight, Routing

PLACES = 8
STEPS = (8, 16, 64, 256, 8192)  # rows


def low_rank(hidden: int, width: int, pairs: int) -> None:
    """Products of a layer with adapters, at a small rank and a large one. pairs: outputs of keys."""
    matrices = (hidden, (hidden, pairs, pairs), False), (hidden, (width, width), True), (width, (hidden,), False)
    for (inputs, outputs, gated), rank, rows in itertools.product(matrices, (16, 256), (4, *STEPS)):
        ends = list(itertools.accumulate(outputs, initial=0))
        parts = tuple(map(slice, ends, ends[1:]))
        weight = LowRankWeight(
            memory(PLACES, len(parts) * rank, inputs), memory(PLACES, ends[-1], rank), parts,
            output_tiles(parts, rank, torch.device("meta")),
        )  # fmt: skip
        x = memory(rows, inputs)
        added = LowRankInputs(x, adapter_rows(numbers(rows), PLACES), weight)
        (gated_linear if gated else linear)(x, memory(ends[-1], inputs), addition=added)


def low_rank_experts(hidden: int, width: int, held: int, chosen: int) -> None:
    """Additions to the products of experts, whose tiles of pairs grow with the rows."""
    gate_up, down = memory(held, 2 * width, hidden), memory(held, hidden, width)
    for rank, rows in itertools.product((16, 256), STEPS):
        added = ExpertAdapters(
            numbers(rows),
            LowRankExperts(memory(PLACES, held, 2 * rank, hidden), memory(PLACES, held, 2 * width, rank)),
            LowRankExperts(memory(PLACES, held, rank, width), memory(PLACES, held, hidden, rank)),
        )
        routes = route(memory(rows, held), Routing(chosen, normalised=True))
        expert_mlp(memory(rows, hidden), routes, gate_up, down, adapters=added)
