"""A step's inputs by gather.py and gather_triton.py against a loop over its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels.gather import gather_inputs
from penstock.kernels.gather_triton import gather_tokens
from penstock.kernels.records import DECODING, InputRows, Inputs
from tests.kernels.sampling_scene import moved

SLOTS, BLOCK, BLOCKS = 6, 4, 5
LENGTH = BLOCK * BLOCKS + 1


def plainly(rows: InputRows, tokens: torch.Tensor, known: torch.Tensor, tables: torch.Tensor) -> Inputs:
    """One token after the other."""
    total, count = len(rows.draft_ids), len(rows.slots)
    ids, positions, places, context = [0] * total, [0] * total, [0] * total, [0] * count
    for row in range(count):
        slot, low, high = int(rows.slots[row]), int(rows.query_start[row]), int(rows.query_start[row + 1])
        first = int(rows.starts[row])
        if first < 0:
            first = max(int(known[slot]) + first, 0)
        for at in range(low, high):
            position, draft = first + at - low, int(rows.draft_ids[at])
            ids[at] = draft if draft >= 0 else int(tokens[slot, position]) if position < LENGTH else 0
            positions[at] = position
            if position < BLOCK * BLOCKS:
                places[at] = int(tables[slot, position // BLOCK]) * BLOCK + position % BLOCK
        context[row] = min(first + high - low, BLOCK * BLOCKS) if high > low else 0
    return Inputs(
        torch.tensor(ids, dtype=torch.int32), torch.tensor(positions), torch.tensor(places),
        torch.tensor(context, dtype=torch.int32),
    )  # fmt: skip


def slot_tables(chance: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(chance.integers(1, 1000, (SLOTS, LENGTH))).int()
    known = torch.from_numpy(chance.integers(1, BLOCK * BLOCKS - 5, SLOTS)).int()
    known[-1] = 0  # scratch
    return tokens, known, torch.from_numpy(chance.integers(1, 99, (SLOTS, BLOCKS))).int()


def step(rows: list[tuple[int, int, tuple[int, ...], int]], padding: tuple[int, int] = (0, 0)) -> InputRows:
    """Rows of slot, start, drafts and tokens beside them; then as many padding rows and tokens."""
    counts = [count + len(drafts) for _, _, drafts, count in rows] + [0] * padding[0]
    ids = [token for _, _, drafts, count in rows for token in (*[-1] * count, *drafts)] + [-1] * padding[1]
    scratch = [(SLOTS - 1, DECODING)] * padding[0]
    columns = np.concatenate(([0], np.cumsum(counts))), *zip(*((r[0], r[1]) for r in rows), *scratch, strict=True), ids
    return InputRows(*(torch.tensor(np.array(column), dtype=torch.int32) for column in columns))


def same(found: Inputs, expected: Inputs) -> None:
    for name in ("input_ids", "positions", "slot_mapping", "context"):
        mine, other = getattr(found, name).cpu(), getattr(expected, name)
        assert mine.dtype == other.dtype
        assert mine.tolist() == other.tolist(), name


def on_device(rows: InputRows, tokens: torch.Tensor, known: torch.Tensor, tables: torch.Tensor, device: str) -> Inputs:
    """By the kernel."""
    return gather_tokens(moved(rows, device), tokens.to(device), known.to(device), tables.to(device), BLOCK)


CASES = [
    [(0, DECODING, (), 1)],
    [(slot, DECODING, (), 1) for slot in range(5)],
    [(1, DECODING, (7, 8), 1), (2, DECODING, (), 1), (4, DECODING, (3,), 1), (3, 2, (), 6)],
    [(3, 0, (), 16), (0, 5, (), 1)],
    [(2, BLOCK * BLOCKS - 2, (), 4)],  # runs past the tables' end
    [(1, -2, (), 2), (2, -5, (), 5), (3, 0, (), 3), (4, -1, (), 1)],  # counted back from the known tokens
]


@pytest.mark.parametrize("padding", [(0, 0), (0, 3), (3, 0), (2, 5)])
@pytest.mark.parametrize("case", CASES)
def test_inputs_of_a_step(
    case: list[tuple[int, int, tuple[int, ...], int]], padding: tuple[int, int], device: str
) -> None:
    tokens, known, tables = slot_tables(np.random.default_rng(3))
    rows = step(case, padding)
    expected = plainly(rows, tokens, known, tables)
    same(gather_inputs(rows, tokens, known, tables, BLOCK), expected)
    same(on_device(rows, tokens, known, tables, device), expected)


@pytest.mark.parametrize("seed", range(8))
def test_random_steps(seed: int, device: str) -> None:
    chance = np.random.default_rng(seed)
    tokens, known, tables = slot_tables(chance)
    rows = []
    for slot in chance.permutation(SLOTS - 1).tolist():
        if chance.random() < 0.5:
            rows.append((slot, DECODING, tuple(chance.integers(0, 99, chance.integers(0, 4)).tolist()), 1))
        else:
            rows.append((slot, int(chance.integers(0, 9)), (), int(chance.integers(1, 9))))
    given = step(rows, (int(chance.integers(0, 3)), int(chance.integers(0, 9))))
    expected = plainly(given, tokens, known, tables)
    same(gather_inputs(given, tokens, known, tables, BLOCK), expected)
    same(on_device(given, tokens, known, tables, device), expected)


def test_many_rows_and_tokens(device: str) -> None:
    """More than one program takes of each."""
    tokens, known, tables = slot_tables(np.random.default_rng(1))
    rows = step([(at % 5, DECODING if at % 3 else at % 7, (), 1 + at % 2) for at in range(300)], (150, 70))
    same(on_device(rows, tokens, known, tables, device), plainly(rows, tokens, known, tables))


@pytest.mark.parametrize("padding", [(0, 0), (2, 5)])
@pytest.mark.parametrize("case", CASES)
def test_rotary_positions_have_the_offsets_of_their_slots(
    case: list[tuple[int, int, tuple[int, ...], int]], padding: tuple[int, int], device: str
) -> None:
    """At least 0, and 0 for what pads the step; keys stand where they would without."""
    tokens, known, tables = slot_tables(np.random.default_rng(3))
    rows, offsets = step(case, padding), torch.tensor([0, -1, -2, -3, -1, -9], dtype=torch.int32)
    expected = plainly(rows, tokens, known, tables)
    of_tokens = torch.repeat_interleave(offsets[rows.slots.long()], rows.query_start.diff())
    turned = torch.zeros(len(rows.draft_ids), dtype=torch.int64)
    turned[: len(of_tokens)] = (expected.positions[: len(of_tokens)] + of_tokens).clamp(min=0)
    moved_tables = tokens.to(device), known.to(device), tables.to(device)
    by_kernel = gather_tokens(moved(rows, device), *moved_tables, BLOCK, offsets.to(device))
    for found in (gather_inputs(rows, tokens, known, tables, BLOCK, offsets), by_kernel):
        same(found, expected)
        assert found.rope_positions is not None
        assert found.rope_positions.dtype == torch.int64
        assert found.rope_positions.tolist() == turned.tolist()
