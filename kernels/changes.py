"""What enters and leaves slots between two steps: one packed upload, one launch.

The upload is words of 32 bits: `COUNTS`, a head for each request that enters a slot, then `PAIR` words for each block
that is appended to a slot's table, then the tokens and blocks that the heads point at. A head is packed by `HEAD`. All
numbers stand in the upload, so a graph of the launch carries out whatever is written there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch import Tensor

COUNTS = struct.Struct("<4i")  # heads, pairs, tokens of the head that has most, nothing
COUNT_WORDS = COUNTS.size // 4
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


def change_slots(packed: Tensor, memory: SlotMemory) -> bool:
    """Carry changes out. The table of a slot that is entered points at block 0 behind the blocks it is given.

    packed: int32 [words]. No slot has two heads, no place of a table two pairs, and no slot with a head has pairs. One
    launch on a GPU, which waits for nothing; False where it is only noted to be compiled.
    """
    if memory.tokens.is_cuda:
        from penstock.kernels.changes_triton import launch_changes

        return launch_changes(packed, memory)
    change_lines(packed, memory)
    return True


def change_lines(changes: Tensor, memory: SlotMemory) -> None:
    """The reference of `change_slots`, one slot after the other, by numpy."""
    packed = changes.numpy()
    tokens, tables, numbers = memory.tokens.numpy(), memory.block_tables.numpy(), memory.numbers.numpy()
    seeds = numbers[:SEED_WORDS].reshape(-1, SEED_WORDS)  # [slots, words]
    starts, appended = packed[:2].tolist()
    end = COUNT_WORDS + starts * HEAD_WORDS
    heads = packed[COUNT_WORDS:end].reshape(-1, HEAD_WORDS)
    for slot, tokens_at, count, blocks_at, held, *given in heads.tolist():
        tokens[slot, :count] = packed[tokens_at : tokens_at + count]
        tables[slot] = 0
        tables[slot, :held] = packed[blocks_at : blocks_at + held]
        seeds[slot] = given[:SEED_WORDS]
        numbers[SEED_WORDS:, slot] = given[SEED_WORDS:]
    slots, columns, blocks = packed[end : end + appended * PAIR].reshape(-1, PAIR).T
    tables[slots, columns] = blocks
