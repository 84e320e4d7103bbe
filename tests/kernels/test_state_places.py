"""Places of paged states by gather.py and gather_triton.py against a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels.gather import gather_inputs, state_places
from penstock.kernels.records import DECODING, AttentionBatch, InputRows, StatePlaces
from tests.kernels.sampling_scene import moved
from tests.kernels.test_gather import BLOCK, BLOCKS, slot_tables, step

ZEROS = 999


def batch_of(rows: InputRows, known: torch.Tensor, tables: torch.Tensor) -> tuple[torch.Tensor, AttentionBatch]:
    """Positions and the batch, as a model is given them."""
    inputs = gather_inputs(rows, torch.zeros(len(known), BLOCK * BLOCKS + 1, dtype=torch.int32), known, tables, BLOCK)
    batch = AttentionBatch(
        query_start=rows.query_start, context=inputs.context, slots=rows.slots, block_tables=tables,
        slot_mapping=inputs.slot_mapping, max_query=16, max_context=BLOCK * BLOCKS,
    )  # fmt: skip
    return inputs.positions, batch


def plainly(positions: torch.Tensor, batch: AttentionBatch, known: torch.Tensor) -> StatePlaces:
    """One token after the other."""
    before, own = [ZEROS] * len(positions), [0] * len(positions)
    for row, slot in enumerate(batch.slots.tolist()):
        for token in range(int(batch.query_start[row]), int(batch.query_start[row + 1])):
            position = int(positions[token])
            if position > 0:
                block = min((position - 1) // BLOCK, BLOCKS - 1)
                before[token] = int(batch.block_tables[slot, block]) * BLOCK + (position - 1) % BLOCK
            if position >= int(known[slot]) - 1:
                own[token] = int(batch.slot_mapping[token])
    return StatePlaces(torch.tensor(before), torch.tensor(own))


def check(rows: InputRows, known: torch.Tensor, tables: torch.Tensor, device: str) -> StatePlaces:
    from penstock.kernels.gather_triton import places_of

    positions, batch = batch_of(rows, known, tables)
    expected = plainly(positions, batch, known)
    fields = ("query_start", "context", "slots", "block_tables", "slot_mapping")
    there = AttentionBatch(
        **{name: getattr(batch, name).to(device) for name in fields}, max_query=16, max_context=BLOCK * BLOCKS
    )
    kernel = places_of(positions.to(device), there, known.to(device), BLOCK, ZEROS)
    for found in (state_places(positions, batch, known, BLOCK, ZEROS), moved(kernel, "cpu")):
        assert found.before.tolist() == expected.before.tolist()
        assert found.own.tolist() == expected.own.tolist()
    return expected


@pytest.mark.parametrize("padding", [(0, 0), (0, 3), (3, 0), (2, 5)])
@pytest.mark.parametrize(
    "case",
    [
        [(0, DECODING, (), 1)],
        [(slot, DECODING, (), 1) for slot in range(5)],
        [(3, 0, (), 16), (0, 5, (), 1), (1, 1, (), 3)],  # from the first token on, and within a block
        [(2, BLOCK * BLOCKS - 2, (), 4)],  # past the tables' end
        [(1, -2, (), 2), (2, -5, (), 5), (4, 4, (), 4)],  # back from the known tokens; a whole block
    ],
)
def test_places_of_a_step(
    case: list[tuple[int, int, tuple[int, ...], int]], padding: tuple[int, int], device: str
) -> None:
    _, known, tables = slot_tables(np.random.default_rng(3))
    check(step(case, padding), known, tables, device)


def test_only_the_last_known_token_and_those_behind_it_have_a_place_of_their_own(device: str) -> None:
    known = torch.full((6,), 9, dtype=torch.int32)
    _, _, tables = slot_tables(np.random.default_rng(4))
    found = check(step([(0, 5, (), 6), (1, 0, (), 6)]), known, tables, device)
    assert (found.own > 0).tolist() == [False] * 3 + [True] * 3 + [False] * 6
    assert (found.before == ZEROS).tolist() == [False] * 6 + [True] + [False] * 5


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int, device: str) -> None:
    chance = np.random.default_rng(seed)
    _, known, tables = slot_tables(chance)
    rows = [
        (slot, int(chance.integers(-3, 9)) or 1, (), int(chance.integers(1, 9)))
        for slot in chance.permutation(5).tolist()
    ]
    check(step(rows, (int(chance.integers(0, 3)), int(chance.integers(0, 200)))), known, tables, device)  # type: ignore[arg-type]
