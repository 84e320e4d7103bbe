"""Which units a step's rows have of their own, and which they share: the kernel against lists on the host."""

from __future__ import annotations

from random import Random

import pytest
import torch

from penstock.kernels.attention_schedule import FEW_ROWS, HEADER, SHORT, most_tiles, schedule_units, tiles_of
from penstock.kernels.records import AttentionBatch

KEYS = 64


def batch_of(tables: list[list[int]], contexts: list[int], counts: list[int], device: str) -> AttentionBatch:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)

    def ints(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = list(range(len(contexts)))[::-1]
    lines = ints(tables[::-1])
    return AttentionBatch(ints(starts), ints(contexts), ints(slots), lines, ints([0]).long(), 1, 1 << 12)


def expected(
    tables: list[list[int]], contexts: list[int], counts: list[int], size: int, together: int
) -> tuple[int, int, int, list[int]]:
    """Shared units, groups, the first row, and the rows' own units before each and after the last."""
    served = [row for row, (context, count) in enumerate(zip(contexts, counts, strict=True)) if count == 1 and context]
    shared = 0
    if len(served) >= FEW_ROWS:
        most = min((contexts[row] - 1) // KEYS for row in served) * KEYS // size
        same = 0
        while same < most and len({tables[row][same] for row in served}) == 1:
            same += 1
        shared = same * size // KEYS
        shared = shared if shared >= SHORT else 0
    before = [0]
    for row, context in enumerate(contexts):
        before.append(before[-1] + (-(-(context - shared * KEYS) // KEYS) if row in served else 0))
    return shared, max(served, default=-1) // together + 1, served[0] if served else len(contexts), before


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [8, 16, 64])
def test_random_steps(seed: int, size: int, device: str) -> None:
    random = Random(seed)
    rows, wide = random.randint(1, 12), 1024 // size
    common = random.choice((0, 0, 1, 300, 512, 640))
    contexts = [0 if random.random() < 0.15 else common + random.randint(1, 200) for _ in range(rows)]
    counts = [int(context > 0) for context in contexts]
    blocks = iter(random.sample(range(1, 1 << 14), rows * wide + wide))
    model = [next(blocks) for _ in range(wide)]
    tables = [[model[at] if at < common // size else next(blocks) for at in range(wide)] for _ in range(rows)]
    together = random.choice((1, 4, 16))
    batch = batch_of(tables, contexts, counts, device)
    shared, groups, first, before = expected(tables, contexts, counts, size, together)
    found = schedule_units(batch, size, KEYS, together).tolist()
    assert found[HEADER:] == before
    assert found[0] == shared
    if shared:
        assert found[1:3] == [groups, first]


def test_every_row_keeps_a_key_of_its_own(device: str) -> None:
    """Rows over the very same blocks, as choices of one request after their prompt."""
    tables = [list(range(1, 33))] * 6
    found = schedule_units(batch_of(tables, [512] * 6, [1] * 6, device), 16, KEYS, 16).tolist()
    assert found == [7, 1, 0, 0, 1, 2, 3, 4, 5, 6]


def test_chunks_and_padding_have_no_units(device: str) -> None:
    tables = [list(range(1 + 40 * row, 41 + 40 * row)) for row in range(4)]
    found = schedule_units(batch_of(tables, [65, 100, 0, 64], [1, 20, 0, 1], device), 16, KEYS, 16).tolist()
    assert found[HEADER:] == [0, 2, 2, 2, 3]
    assert found[0] == 0


@pytest.mark.parametrize(
    "counts",
    [
        [128],
        [0, 0, 0],
        [1, 1, 5, 33, 1, 0],
        [4, 64, 65, 32, 31, 0, 0],
        [700, 1, 9],
        [1, 40] * 128 + [33] + [1, 70] * 130,
    ],
)
@pytest.mark.parametrize("shortest", [1, 5, 33])
def test_tiles_of_chunks(counts: list[int], shortest: int, device: str) -> None:
    """Rows in order, the last queries of each first, and no row that is shorter."""
    contexts = [count and count + 7 for count in counts]
    batch = batch_of([[0]] * len(counts), contexts, counts, device)
    tokens = sum(counts) + 3  # padded
    listed = tiles_of(batch, tokens, 32, shortest)
    held = listed.tolist()
    wanted = []
    for row, count in enumerate(counts):
        if count >= shortest:
            wanted += [(row, first) for first in range(0, count, 32)][::-1]
    assert held[0] == len(wanted) <= most_tiles(len(counts), tokens, 32, shortest)
    assert list(zip(held[1:][::2], held[2:][::2], strict=True))[: len(wanted)] == wanted
    assert tiles_of(batch, tokens, 32, shortest) is listed


def test_a_list_has_room_for_any_chunks() -> None:
    """Counts drawn to have as many tiles as can be: chunks one query longer than a tile, or as short as are served."""
    random = Random(5)
    for _ in range(200):
        shortest, queries = random.choice((1, 5, 17, 40)), random.choice((2, 16, 32))
        counts = [random.choice((1, shortest, queries + 1, 3 * queries + 1)) for _ in range(random.randint(1, 60))]
        tiles = sum(-(-count // queries) for count in counts if count >= shortest)
        assert tiles <= most_tiles(len(counts), sum(counts), queries, shortest)
