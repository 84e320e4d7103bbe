"""Which blocks a sequence holds: a column for every `block_size` positions, with a block of each KV group. No torch.

A group is some layers that need the same keys. One with a window gives back a column's block once no position that may
still be computed sees into it; the null block 0 stands in its place. All blocks have the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

HOLDS_ALL = 0  # the window of a group that gives nothing back
NO_BLOCK = 0  # stands in a table where a block was given back, or was never needed


def capacity_tokens(blocks: int, block_size: int, windows: tuple[int, ...], length: int) -> int:
    """Tokens of requests of `length` tokens that so many blocks hold while they decode."""
    if windows == (HOLDS_ALL,):
        return blocks * block_size
    return blocks * length // BlockLayout(block_size, windows, ahead=1).steady(length)


def columns_of(positions: int, block_size: int) -> int:
    """Columns of so many positions."""
    return -(-positions // block_size)


def first_column(position: int, window: int, block_size: int) -> int:
    """The first column that computing `position`, or any later one, reads."""
    return max(0, position + 1 - window) // block_size if window else 0


class BlockLayout(msgspec.Struct, frozen=True, dict=True):
    """The groups of a model, and how far its steps run ahead of their results."""

    block_size: int
    windows: tuple[int, ...] = (HOLDS_ALL,)  # of each group
    ahead: int = 0  # most positions that a decoding sequence has in steps that are not applied
    prompts: int = 0  # the same of a sequence whose prompt is computed in chunks

    @cached_property
    def groups(self) -> int:
        return len(self.windows)

    @cached_property
    def full(self) -> int:
        """Groups that give nothing back."""
        return self.windows.count(HOLDS_ALL)

    @cached_property
    def kinds(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Each window, and the groups that have it."""
        found = sorted({window for window in self.windows if window})
        return tuple((window, tuple(at for at, own in enumerate(self.windows) if own == window)) for window in found)

    @cached_property
    def running(self) -> tuple[int, ...]:
        """Most columns of a decoding sequence, of each group with a window."""
        return self._most(self.ahead)

    @cached_property
    def prefilling(self) -> tuple[int, ...]:
        """Most columns while a prompt is computed, of each group with a window."""
        return self._most(max(self.prompts, self.ahead))

    def _most(self, ahead: int) -> tuple[int, ...]:
        # A range of n positions touches at most ceil((n - 1) / size) + 1 blocks.
        spans = [window - 1 + max(1, ahead) for window in self.windows if window]
        return tuple(columns_of(span - 1, self.block_size) + 1 for span in spans)

    def most(self, positions: int) -> int:
        """Most blocks that a sequence of so many positions ever holds."""
        columns = columns_of(positions, self.block_size)
        return columns * self.full + sum([min(columns, held) for held in self.prefilling])

    def overhang(self, prompt: int) -> int:
        """Blocks that chunks of a prompt of so many tokens may hold beyond what it holds while it decodes."""
        return self.most(prompt) - self.steady(prompt)

    def steady(self, positions: int) -> int:
        """Most blocks that it holds while it decodes."""
        columns = columns_of(positions, self.block_size)
        return columns * self.full + sum([min(columns, held) for held in self.running])

    def lasting(self, table: Sequence[int]) -> Iterator[Sequence[int]]:
        """The parts of a table, which is column by column, of the groups that give nothing back."""
        for group, window in enumerate(self.windows):
            if window == HOLDS_ALL:
                yield table[group :: self.groups]
