"""Launches of adapters' kernels for `benchmarks.chip_launches`, which has replaced `chip_of` when it imports this."""

from __future__ import annotations

import itertools

import torch

from benchmarks.meta_tensors import memory, numbers
from penstock.kernels.linear import gated_linear, linear
from penstock.kernels.low_rank import adapter_rows, output_tiles
from penstock.kernels.records import LowRankInputs, LowRankWeight

PLACES = 8
STEPS = (8, 16, 64, 256, 8192)  # rows


def low_rank(hidden: int, width: int, pairs: int) -> None:
    """Products of a layer with adapters, at a small rank and a large one. pairs: outputs of keys."""
    matrices = (hidden, (hidden, pairs, pairs), False), (hidden, (width, width), True), (width, (hidden,), False)
    for (inputs, outputs, gated), rank, rows in itertools.product(matrices, (16, 256), STEPS):
        ends = list(itertools.accumulate(outputs, initial=0))
        parts = tuple(map(slice, ends, ends[1:]))
        weight = LowRankWeight(
            memory(PLACES, len(parts) * rank, inputs), memory(PLACES, ends[-1], rank), parts,
            output_tiles(parts, rank, torch.device("meta")),
        )  # fmt: skip
        x = memory(rows, inputs)
        added = LowRankInputs(x, adapter_rows(numbers(rows), PLACES), weight)
        (gated_linear if gated else linear)(x, memory(ends[-1], inputs), addition=added)
