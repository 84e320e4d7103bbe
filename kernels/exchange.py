"""Ranks' partial sums added up, joined with the residual addition and the norm behind it, through inboxes that every
rank can write to: a small all-reduce in one launch.

An inbox is one rank's memory, which the others' devices can reach. A rank leaves its rows in every other's inbox and
then waits for theirs in its own, so a row travels once and nobody asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.norm import add_rms_norm

TURNS = 2  # halves of an inbox, which a row uses by turns


@dataclass(frozen=True)
class Inboxes:
    """Where ranks leave rows for one another, and whose turn it is. Rows wider or of another type have no place."""

    addresses: Tensor  # int64 [ranks], of what each rank has as words `[TURNS, ranks, rows, width]`, full of `empty`
    turns: Tensor  # int32 [rows], zeros at first: the half that a row uses next, the same on every rank
    rank: int
    width: int
    dtype: torch.dtype

    @property
    def ranks(self) -> int:
        return len(self.addresses)

    @property
    def rows(self) -> int:
        """The most that one exchange can have."""
        return len(self.turns)

    @property
    def size(self) -> int:
        """Bytes of an inbox."""
        return inbox_bytes(self.ranks, self.rows, self.width, self.dtype)


def inbox_bytes(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
    return TURNS * ranks * rows * width * dtype.itemsize


def empty_word(dtype: torch.dtype) -> int:
    """What stands where nothing has arrived: the bits of minus zero, which no sum needs, as a signed number."""
    return -1 << 8 * dtype.itemsize - 1


def add_parts(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The reference: the ranks' parts added up in their order and rounded, then `kernels.norm.add_rms_norm` of it.

    Parts and residual are `[tokens, width]`. Returns the norm and the next residual.
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return add_rms_norm(total.to(residual.dtype), residual, weight, eps)
