"""Changes of the slots in Triton: a program takes a tile of one start, or a tile of the appended blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.changes import HEAD_WORDS, NUMBERS, PAIR, PLACES, SEED_WORDS, Changes, SlotMemory

TILE = 1024  # words of one program
HEAD_WIDTH = tl.constexpr(HEAD_WORDS)
FIRST_NUMBER = tl.constexpr(PLACES)
SEEDS = tl.constexpr(SEED_WORDS)
PAIR_WIDTH = tl.constexpr(PAIR)


def launch_changes(changes: Changes, memory: SlotMemory) -> None:
    """`kernels.changes.change_slots` by the kernel, without waiting for the device."""
    tokens, tables, numbers = memory.tokens, memory.block_tables, memory.numbers
    assert tokens.is_contiguous()
    assert tables.is_contiguous()
    assert numbers.is_contiguous()
    tiles = triton.cdiv(max(changes.longest, tables.shape[1]), TILE)
    change_kernel[(changes.starts * tiles + triton.cdiv(changes.pairs, TILE),)](
        changes.packed, tokens, tables, numbers, changes.starts, changes.pairs, tiles,
        tokens.shape[1], tables.shape[1], numbers.shape[1],
        NUMBERS=NUMBERS, LANES=triton.next_power_of_2(NUMBERS), TILE=TILE, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=("starts", "pairs", "tiles"))
def change_kernel(
    packed, tokens, block_tables, numbers, starts, pairs, tiles, row_length, table_blocks, line_length,
    NUMBERS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The first `starts * tiles` programs take starts, the others blocks."""
    program = tl.program_id(0)
    lanes = tl.arange(0, TILE)
    if program >= starts * tiles:
        pair = (program - starts * tiles) * TILE + lanes
        there = pair < pairs
        first = packed + starts * HEAD_WIDTH + pair * PAIR_WIDTH
        slots = tl.load(first, mask=there, other=0).to(tl.int64)
        columns = tl.load(first + 1, mask=there, other=0)
        blocks = tl.load(first + 2, mask=there, other=0)
        tl.store(block_tables + slots * table_blocks + columns, blocks, mask=there)
        return
    tile = program % tiles
    head = packed + program // tiles * HEAD_WIDTH
    slot = tl.load(head).to(tl.int64)
    place = tile * TILE + lanes
    given = place < tl.load(head + 2)
    ids = tl.load(packed + tl.load(head + 1) + place, mask=given, other=0)
    tl.store(tokens + slot * row_length + place, ids, mask=given)
    held = place < tl.load(head + 4)
    block = tl.load(packed + tl.load(head + 3) + place, mask=held, other=0)
    tl.store(block_tables + slot * table_blocks + place, block, mask=place < table_blocks)
    if tile == 0:
        number = tl.arange(0, LANES)
        value = tl.load(head + FIRST_NUMBER + number, mask=number < NUMBERS, other=0)
        to = tl.where(number < SEEDS, slot * SEEDS + number, number * line_length + slot)
        tl.store(numbers + to, value, mask=number < NUMBERS)
