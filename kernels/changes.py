"""What enters and leaves slots between two steps: one packed upload, one launch.

The upload is words of 32 bits: a head for each request that enters a slot, then `PAIR` words for each block that is
appended to a slot's table, then the tokens and blocks that the heads point at. A head is packed by `HEAD`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from torch import Tensor

# slot; first word and number of its tokens, then of its blocks; its `NUMBERS`: a seed of 64 bits, integers, floats
HEAD = struct.Struct("<5iq7i6f")
HEAD_WORDS = HEAD.size // 4
PLACES = 5  # words of a head before the numbers
SEED_WORDS = 2  # of the numbers; they come first
NUMBERS = HEAD_WORDS - PLACES
PAIR = 3  # slot, column of its table, block


@dataclass(frozen=True)
class SlotMemory:
    """Where the changes go."""

    tokens: Tensor  # int32 [slots, row length]
    block_tables: Tensor  # int32 [slots, blocks]
    numbers: Tensor  # int32 [NUMBERS, slots or more]: the seeds as the first lines' int64, then a line for each number


@dataclass(frozen=True)
class Changes:
    """One upload. No slot has two heads, no place of a table two pairs, and no slot with a head has pairs."""

    packed: Tensor  # int32 [words]
    starts: int  # heads
    pairs: int
    longest: int  # tokens of the start that has most


def change_slots(changes: Changes, memory: SlotMemory) -> None:
    """Carry the changes out. The table of a slot that is entered points at block 0 behind the blocks it is given.

    One launch on a GPU, which waits for nothing.
    """
    if memory.tokens.is_cuda:
        from kernels.changes_triton import launch_changes

        launch_changes(changes, memory)
    else:
        change_lines(changes, memory)


def change_lines(changes: Changes, memory: SlotMemory) -> None:
    """The reference of `change_slots`, one slot after the other, by numpy."""
    packed = changes.packed.numpy()
    tokens, tables, numbers = memory.tokens.numpy(), memory.block_tables.numpy(), memory.numbers.numpy()
    seeds = numbers[:SEED_WORDS].reshape(-1, SEED_WORDS)  # [slots, words]
    heads = packed[: changes.starts * HEAD_WORDS].reshape(-1, HEAD_WORDS)
    for slot, tokens_at, count, blocks_at, held, *given in heads.tolist():
        tokens[slot, :count] = packed[tokens_at : tokens_at + count]
        tables[slot] = 0
        tables[slot, :held] = packed[blocks_at : blocks_at + held]
        seeds[slot] = given[:SEED_WORDS]
        numbers[SEED_WORDS:, slot] = given[SEED_WORDS:]
    slots, columns, blocks = np.split(packed[heads.size : heads.size + changes.pairs * PAIR].reshape(-1, PAIR), PAIR, 1)
    tables[slots, columns] = blocks
