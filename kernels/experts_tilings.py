"""Which products with experts are cut how. Sizes alone decide, never which experts are chosen.

What was measured of products with one weight on an H200 is the guide (`kernels.linear_tilings`); of these products
themselves nothing was, `python -m benchmarks.expert_kernels --sweep` is there to do it. The rows of a product are the
same to the last bit in every tiling but a `PairTiling`, which no invariant product takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear_tilings import SINGLE, Tiling, VectorTiling

FEW_PAIRS = 32  # of a token and an expert, up to which each is a product of its own


@dataclass(frozen=True)
class PairTiling:
    """How products of one token with one expert each are cut."""

    gate_up: VectorTiling
    down: VectorTiling


@dataclass(frozen=True)
class ExpertTiling:
    """How products of the tokens of one expert are cut: both have tiles of as many rows."""

    gate_up: Tiling  # of whose outputs each has its gate
    down: Tiling

    def __post_init__(self) -> None:
        assert self.gate_up.rows == self.down.rows


SINGLES = ExpertTiling(SINGLE, SINGLE)
LOW = ExpertTiling(
    Tiling(16, 64, 64, 4, 6, swapped=True),
    Tiling(16, 128, 64, 4, 6, swapped=True),
)
MIDDLE = ExpertTiling(
    Tiling(64, 64, 64, 4, 4, described=True),
    Tiling(64, 128, 64, 4, 4, described=True),
)
HIGH = ExpertTiling(
    Tiling(128, 128, 64, 8, 4, described=True),
    Tiling(128, 256, 64, 8, 4, described=True),
)


def choose_expert_tiling(
    pairs: int, experts: int, width: int, hidden: int, dtype: torch.dtype, *, invariant: bool
) -> PairTiling | ExpertTiling:
    """How to multiply so many pairs of a token and one of all `experts`, each of such a width, on every rank alike."""
    if dtype.itemsize > 2:
        return SINGLES
    if pairs <= min(FEW_PAIRS, experts) and not invariant:  # few of them have an expert in common
        return PairTiling(pair_tiling(hidden, gated=True), pair_tiling(width, gated=False))
    mean = pairs / experts
    return LOW if mean <= 8 else MIDDLE if mean <= 32 else HIGH


def pair_tiling(inputs: int, *, gated: bool) -> VectorTiling:
    """Of one row, as for a weight of its own: what a program reads of it at once is about 16 KiB."""
    if inputs > 2048:
        return VectorTiling(2 if gated else 4, 2048, 8)
    return VectorTiling(4, 512, 4) if gated else VectorTiling(8, 512, 4)
