"""Which products with experts are cut how. Sizes alone decide, never which experts are chosen.

Measured on an H200 by `python -m benchmarks.expert_kernels --sweep`, layers of Qwen3-30B-A3B and Mixtral-8x7B
(`benchmarks/results/expert_kernels_sweep_h200.json`). A product's rows are the same to the last bit in every tiling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.kernels.linear_tilings import SINGLE, Tiling


@dataclass(frozen=True)
class ExpertTiling:
    """How products of the tokens of one expert are cut: both have tiles of as many rows."""

    gate_up: Tiling  # of whose outputs each has its gate
    down: Tiling

    def __post_init__(self) -> None:
        assert self.gate_up.rows == self.down.rows


SINGLES = ExpertTiling(SINGLE, SINGLE)
LOWEST = ExpertTiling(
    Tiling(16, 64, 128, 4, 4, swapped=True),
    Tiling(16, 128, 128, 4, 4, swapped=True),
)
LOW = ExpertTiling(
    Tiling(32, 64, 128, 4, 4, swapped=True),
    Tiling(32, 128, 128, 4, 4, swapped=True),
)
MIDDLE = ExpertTiling(
    Tiling(64, 128, 64, 4, 4, described=True),
    Tiling(64, 256, 64, 4, 4, described=True),
)
HIGH = ExpertTiling(
    Tiling(128, 128, 64, 8, 4, described=True),
    Tiling(128, 256, 64, 8, 4, described=True),
)
BY_MEAN = ((8, LOWEST), (16, LOW), (32, MIDDLE))  # up to so many tokens to an expert


def choose_expert_tiling(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTiling:
    """How to multiply so many pairs of a token and one of all `experts`, on every rank alike."""
    if dtype.itemsize > 2:
        return SINGLES
    mean = pairs / experts
    return next((tiling for most, tiling in BY_MEAN if mean <= most), HIGH)
