"""Custom all-reduce of small messages, fused with the residual addition and the norm that follow, in one launch.

An inbox is one rank's memory that the other devices can write to. A rank writes its rows to every other rank's inbox
and then waits for theirs in its own, so a row travels once and is never requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.norm import add_norm

TURNS = 2  # halves of an inbox, which a row uses alternately


@dataclass(frozen=True)
class Inboxes:
    """The ranks' inboxes and the half that each row uses next. All rows have the same width and dtype."""

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
        """The most rows of one exchange."""
        return len(self.turns)

    @property
    def size(self) -> int:
        """Bytes of an inbox."""
        return inbox_bytes(self.ranks, self.rows, self.width, self.dtype)


def inbox_bytes(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
    return TURNS * ranks * rows * width * dtype.itemsize


def empty_word(dtype: torch.dtype) -> int:
    """The word of an element that has not arrived: the bits of minus zero, which is never sent, as a signed integer."""
    return -1 << 8 * dtype.itemsize - 1


def add_parts(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The reference: the ranks' parts added up in their order and rounded, then `kernels.norm.add_norm` of it.

    Parts and residual are `[tokens, width]`. Returns the norm and the next residual.
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return add_norm(total.to(residual.dtype), residual, weight, eps)
