"""Launches of adapters' kernels for `benchmarks.chip_launches`, which has replaced `chip_of` when it imports this."""

from __future__ import annotations

import itertools

import torch

from benchmarks.meta_tensors import memory, numbers
from penstock.kernels.low_rank import adapter_rows, expand, output_tiles, shrink
from penstock.kernels.records import LowRankWeight

PLACES = 8
STEPS = (64, 8192)  # rows


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
