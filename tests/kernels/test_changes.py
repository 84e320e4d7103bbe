"""Changes of slots by changes.py and changes_triton.py against plain assignments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from penstock.kernels.changes import change_slots
from penstock.kernels.records import COUNT_WORDS, COUNTS, HEAD, HEAD_WORDS, NUMBERS, PAIR, SEED_WORDS, SlotMemory

SLOTS, LENGTH, BLOCKS, LINES = 7, 2500, 9, 8


@dataclass(frozen=True)
class Start:
    """A request that enters a slot."""

    slot: int
    tokens: list[int]
    blocks: list[int]
    seed: int
    integers: tuple[int, ...]
    floats: tuple[float, ...]


def started(slot: int, tokens: int, blocks: int) -> Start:
    chance = np.random.default_rng(100 * slot + tokens)
    return Start(
        slot, chance.integers(1, 1 << 17, tokens).tolist(), chance.integers(1, 1 << 20, blocks).tolist(),
        int(chance.integers(-(1 << 63), 1 << 63)), tuple(chance.integers(-1, 1 << 31, 7).tolist()),
        tuple(chance.random(6, np.float32).tolist()),
    )  # fmt: skip


def memory() -> SlotMemory:
    """Of slots that held something else."""
    return SlotMemory(*(
        torch.full(shape, -5, dtype=torch.int32) for shape in ((SLOTS, LENGTH), (SLOTS, BLOCKS), (NUMBERS, LINES))
    ))  # fmt: skip


def packed(starts: list[Start], pairs: list[tuple[int, int, int]]) -> torch.Tensor:
    end = COUNT_WORDS + len(starts) * HEAD_WORDS + len(pairs) * PAIR
    heads, contents = [COUNTS.pack(len(starts), len(pairs), max([len(x.tokens) for x in starts], default=0), 0)], []
    for start in starts:
        places = end, len(start.tokens), end + len(start.tokens), len(start.blocks)
        heads.append(HEAD.pack(start.slot, *places, start.seed, *start.integers, *start.floats))
        contents += start.tokens + start.blocks
        end += places[1] + places[3]
    words = np.concatenate((
        np.frombuffer(b"".join(heads), np.int32), np.array(pairs, np.int32).reshape(-1), np.array(contents, np.int32)
    ))  # fmt: skip
    return torch.from_numpy(words)


def plainly(starts: list[Start], pairs: list[tuple[int, int, int]], slots: SlotMemory) -> None:
    """One value after the other."""
    seeds = slots.numbers[:SEED_WORDS].reshape(-1).view(torch.int64)
    for start in starts:
        slots.tokens[start.slot, : len(start.tokens)] = torch.tensor(start.tokens)
        slots.block_tables[start.slot] = torch.tensor(start.blocks + [0] * (BLOCKS - len(start.blocks)))
        seeds[start.slot] = start.seed
        for line, number in enumerate(start.integers):
            slots.numbers[SEED_WORDS + line, start.slot] = number
        for line, real in enumerate(start.floats):
            slots.numbers[SEED_WORDS + 7 + line].view(torch.float32)[start.slot] = real
    for slot, column, block in pairs:
        slots.block_tables[slot, column] = block


def on_device(slots: SlotMemory, device: str) -> SlotMemory:
    return SlotMemory(slots.tokens.to(device), slots.block_tables.to(device), slots.numbers.to(device))


MANY = [(slot, column, 10 * slot + column) for slot in (2, 4, 6) for column in range(BLOCKS)]
CASES = {
    "one": ([started(3, 20, 2)], []),
    "one without blocks": ([started(0, 1, 0)], []),
    "as long as can be": ([started(SLOTS - 1, LENGTH, BLOCKS)], []),
    "short and long": ([started(5, 3, 1), started(1, 1100, 8), started(0, 1024, 4)], []),
    "nothing": ([], []),
    "a crowd": ([started(slot, 30 * slot + 1, slot) for slot in range(SLOTS - 1)], [(SLOTS - 1, 0, 7)]),
    "blocks alone": ([], [(4, 7, 99), (0, 0, 98)]),
    "both": ([started(1, 1025, 5), started(3, 1, 1)], MANY),
}


@pytest.mark.parametrize("case", CASES)
def test_changes_arrive_and_nothing_else_moves(case: str, device: str) -> None:
    from penstock.kernels.changes_triton import launch_changes

    starts, pairs = CASES[case]
    changes, expected = packed(starts, pairs), memory()
    plainly(starts, pairs, expected)
    reference, found = memory(), on_device(memory(), device)
    change_slots(changes, reference)
    launch_changes(changes.to(device), found)
    for name in ("tokens", "block_tables", "numbers"):
        assert torch.equal(getattr(reference, name), getattr(expected, name)), name
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def test_a_head_holds_its_numbers_in_whole_words() -> None:
    """The kernel reads it as words; a gap would shift what follows."""
    assert HEAD.size == 4 * HEAD_WORDS
    words = np.frombuffer(HEAD.pack(*range(1, 6), -2, *range(7), *[0.5] * 6), np.int32)
    assert words[:5].tolist() == [1, 2, 3, 4, 5]
    assert words[5:7].view(np.int64)[0] == -2
    assert words[7:14].tolist() == list(range(7))
    assert words[14:].view(np.float32).tolist() == [0.5] * 6
