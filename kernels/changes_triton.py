"""Changes of the slots in Triton: programs take tiles of starts, and of the appended blocks, in turn."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.records import COUNT_WORDS, HEAD_WORDS, NUMBERS, PAIR, PLACES, SEED_WORDS, SlotMemory

TILE = 1024  # words of one turn of a program
PROGRAMS = 64  # as many for any changes, so that one graph serves all
COUNTS_WIDTH = tl.constexpr(COUNT_WORDS)
HEAD_WIDTH = tl.constexpr(HEAD_WORDS)
FIRST_NUMBER = tl.constexpr(PLACES)
SEEDS = tl.constexpr(SEED_WORDS)
PAIR_WIDTH = tl.constexpr(PAIR)


def launch_changes(packed: Tensor, memory: SlotMemory) -> bool:
    """`kernels.changes.change_slots` by the kernel, without waiting for the device."""
    tokens, tables, numbers = memory.tokens, memory.block_tables, memory.numbers
    assert tokens.is_contiguous()
    assert tables.is_contiguous()
    assert numbers.is_contiguous()
    launched = change_kernel[(PROGRAMS,)](
        packed, tokens, tables, numbers, tokens.shape[1], tables.shape[1], numbers.shape[1],
        NUMBERS=NUMBERS, LANES=triton.next_power_of_2(NUMBERS), TILE=TILE, num_warps=4,
    )  # fmt: skip
    return launched is not None


@triton.jit
def change_kernel(
    packed, tokens, block_tables, numbers, row_length, table_blocks, line_length,
    NUMBERS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Work is numbered: as many tiles for each start as the longest needs, then tiles of appended blocks."""
    starts = tl.load(packed)
    pairs = tl.load(packed + 1)
    tiles = tl.cdiv(tl.maximum(tl.load(packed + 2), table_blocks), TILE)
    lanes = tl.arange(0, TILE)
    for work in range(tl.program_id(0), starts * tiles + tl.cdiv(pairs, TILE), tl.num_programs(0)):
        if work < starts * tiles:
            place = work % tiles * TILE + lanes
            head = packed + COUNTS_WIDTH + work // tiles * HEAD_WIDTH
            slot = tl.load(head).to(tl.int64)
            given = place < tl.load(head + 2)
            ids = tl.load(packed + tl.load(head + 1) + place, mask=given, other=0)
            tl.store(tokens + slot * row_length + place, ids, mask=given)
            held = place < tl.load(head + 4)
            block = tl.load(packed + tl.load(head + 3) + place, mask=held, other=0)
            tl.store(block_tables + slot * table_blocks + place, block, mask=place < table_blocks)
            if work % tiles == 0:
                number = tl.arange(0, LANES)
                value = tl.load(head + FIRST_NUMBER + number, mask=number < NUMBERS, other=0)
                to = tl.where(number < SEEDS, slot * SEEDS + number, number * line_length + slot)
                tl.store(numbers + to, value, mask=number < NUMBERS)
        else:
            pair = (work - starts * tiles) * TILE + lanes
            there = pair < pairs
            first = packed + COUNTS_WIDTH + starts * HEAD_WIDTH + pair * PAIR_WIDTH
            slots = tl.load(first, mask=there, other=0).to(tl.int64)
            columns = tl.load(first + 1, mask=there, other=0)
            blocks = tl.load(first + 2, mask=there, other=0)
            tl.store(block_tables + slots * table_blocks + columns, blocks, mask=there)
