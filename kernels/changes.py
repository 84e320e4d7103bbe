"""Changes of the slots between two steps: one packed upload, one launch.

The upload is words of 32 bits: `COUNTS`, a head for each request that enters a slot, then `PAIR` words for each block
that is appended to a slot's table, then the tokens and blocks that the heads point at. A head is packed by `HEAD`. All
numbers are in the upload, so a CUDA graph of the launch applies whatever is written there.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.records import COUNT_WORDS, HEAD_WORDS, PAIR, SEED_WORDS, SlotMemory


def change_slots(packed: Tensor, memory: SlotMemory) -> bool:
    """Apply changes. The table of a slot with a head points at block 0 after its own blocks.

    packed: int32 [words]. No slot has two heads, no place of a table two pairs, and no slot with a head has pairs. One
    launch on a GPU, which waits for nothing; False where a prewarm only collected it.
    """
    if chip_of(memory.tokens.device).runs_triton:
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
