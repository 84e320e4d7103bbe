"""Launches of adapters' kernels for `benchmarks.chip_launches`, which has replaced `chip_of` when it imports this."""

from __future__ import annotations

import itertools

import torch

from benchmarks.meta_tensors import memory, numbers
from penstock.kernels.experts import expert_mlp, route
from penstock.kernels.low_rank import adapter_rows, expand, output_tiles, shrink
from penstock.kernels.records import ExpertAdapters, LowRankExperts, LowRankWeight, Routing

PLACES = 8
STEPS = (8, 64, 8192)  # rows


def low_rank(hidden: int, width: int, pairs: int) -> None:
    """Additions to a layer's first and last product, at a small rank and a large one. pairs: outputs of keys."""
    matrices = (hidden, (hidden, pairs, pairs)), (width, (hidden,))
    for (inputs, outputs), rank, rows in itertools.product(matrices, (16, 256), STEPS):
        ends = list(itertools.accumulate(outputs, initial=0))
        parts = tuple(map(slice, ends, ends[1:]))
        weight = LowRankWeight(
            memory(PLACES, len(parts) * rank, inputs), memory(PLACES, ends[-1], rank), parts,
            output_tiles(parts, rank, torch.device("meta")),
        )  # fmt: skip
        found = adapter_rows(numbers(rows), PLACES)
        expand(memory(rows, ends[-1]), shrink(memory(rows, inputs), found, weight))


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
