"""Which units a step's rows have of their own, and which they share: the kernel against lists on the host."""

from __future__ import annotations

from random import Random

import pytest
import torch

from penstock.kernels import attention_schedule
from penstock.kernels.attention_schedule import FEWEST, SHORT, most_tiles, schedule_prefixes, tiles_of
from penstock.kernels.records import AttentionBatch

KEYS, HEADER, LISTS = attention_schedule.UNIT.value, attention_schedule.HEADER.value, attention_schedule.LISTS


def batch_of(tables: list[list[int]], contexts: list[int], counts: list[int], device: str) -> AttentionBatch:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)

    def ints(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = list(range(len(contexts)))[::-1]
    lines = ints(tables[::-1])
    return AttentionBatch(ints(starts), ints(contexts), ints(slots), lines, ints([0]).long(), 1, 1 << 12)


def chosen_prefixes(tables: list[list[int]], most: list[int], size: int, together: int) -> dict[int, tuple[int, int]]:
    """By row the block and the units of the prefix whose sharing spares it most, of rows that have one."""
    chosen: dict[int, tuple[float, int, int]] = {}
    level = SHORT
    while level <= max(most):
        holders: dict[int, list[int]] = {}
        for row, units in enumerate(most):
            if units >= level:
                holders.setdefault(tables[row][level * KEYS // size - 1], []).append(row)
        for block, rows in holders.items():
            spared = level * (1 - -(-len(rows) // together) / len(rows))
            for row in rows:
                if spared > chosen.get(row, (0.0, 0, 0))[0]:
                    chosen[row] = spared, block, level
        level *= 2
    return {row: (block, level) for row, (_, block, level) in chosen.items()}


def expected(
    tables: list[list[int]], contexts: list[int], counts: list[int], size: int, together: int, least: int
) -> dict[tuple[int, ...], int]:
    """The shared units of each group, by its rows."""
    lengths = [context if count == 1 else 0 for context, count in zip(contexts, counts, strict=True)]
    most = [(length - 1) // KEYS if length else 0 for length in lengths]
    chosen = chosen_prefixes(tables, most, size, together)
    classes: dict[int, list[int]] = {}
    for row, (block, _) in chosen.items():
        classes.setdefault(block, []).append(row)
    groups = {}
    for rows in map(sorted, classes.values()):
        wide = -(-len(rows) // -(-len(rows) // together))
        for first in range(0, len(rows), wide):
            group = rows[first : first + wide]
            deepest = min(min(most[row], 2 * chosen[row][1]) for row in group) * KEYS // size
            same = 0
            while same < deepest and len({tables[row][same] for row in group}) == 1:
                same += 1
            if len(group) > 1 and same * size // KEYS >= SHORT:
                groups[tuple(group)] = same * size // KEYS
    saved = sum(units * (len(group) - 1) for group, units in groups.items())
    return groups if saved >= least else {}


def read(found: list[int], rows: int) -> tuple[dict[tuple[int, ...], int], int]:
    """The groups of a schedule with their units, and the units of a split."""
    groups, splits, span = found[:HEADER]
    prefix, place, step, order, first, members, starts = (found[HEADER + at * rows :][:rows] for at in range(LISTS))
    common = {}
    cuts, places = [0], []
    for group in range(groups):
        held = order[first[group] : first[group] + members[group]]
        (units,) = {prefix[row] for row in held}
        assert all(step[row] == members[group] for row in held)
        common[tuple(held)] = units
        cuts.append(cuts[-1] - (-units // span))
        places += [place[row] + split * step[row] for split in range(-(-units // span)) for row in held]
    assert [*starts[:groups], splits] == (cuts if groups else [splits])
    assert sorted(places) == list(range(len(places)))  # a place for each result, and no gaps
    grouped = {row for held in common for row in held}
    assert not any(prefix[row] for row in range(rows) if row not in grouped)
    return common, span


def check(
    tables: list[list[int]], contexts: list[int], counts: list[int], size: int, together: int, least: int, device: str
) -> int:
    """Groups are those expected, and splits about as many as programs; how many groups there are."""
    batch = batch_of(tables, contexts, counts, device)
    kv_heads, programs = 2, 16
    found = schedule_prefixes(batch, size, together, kv_heads, programs, least).tolist()
    wanted = expected(tables, contexts, counts, size, together, least)
    groups, span = read(found, len(contexts))
    assert groups == wanted
    assert not groups or span == max(-(-sum(groups.values()) * kv_heads // programs), FEWEST)
    assert all(units * KEYS < contexts[row] for group, units in groups.items() for row in group)
    return len(groups)


def families(random: Random, rows: int, size: int) -> tuple[list[list[int]], list[int]]:
    """Tables and contexts of shuffled rows of some tenants, whose prefixes are of any length and may be nested."""
    blocks = iter(random.sample(range(1, 1 << 16), 1 << 15))
    wide = 1536 // size
    trunks: list[list[int]] = []
    for _ in range(random.randint(1, 5)):
        trunk = [next(blocks) for _ in range(wide)]
        if trunks and random.random() < 0.4:
            kept = random.randint(1, wide)
            trunk[:kept] = random.choice(trunks)[:kept]
        trunks.append(trunk)
    reaches = [random.choice((1, 200, 256, 300, 512, 700, 1030)) for _ in trunks]
    tables, contexts = [], []
    for _ in range(rows):
        at = random.randrange(len(trunks))
        reach = reaches[at] if random.random() < 0.8 else 0
        contexts.append(0 if random.random() < 0.1 else reach + random.randint(1, 300))
        tables.append(trunks[at][: reach // size] + [next(blocks) for _ in range(wide - reach // size)])
    return tables, contexts


SHARING = {3, 4, 5, 6, 7, 11, 12}  # of the seeds, those whose tenants share enough


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("size", [8, 16, 64])
def test_random_tenants(seed: int, size: int, device: str) -> None:
    random = Random(seed)
    tables, contexts = families(random, random.randint(1, 40), size)
    counts = [int(context > 0) for context in contexts]
    found = check(tables, contexts, counts, size, random.choice((1, 4, 16)), random.choice((1, 1, 60)), device)
    assert (found > 0) == (seed in SHARING)


@pytest.mark.parametrize("rows", [257, 600])
def test_many_rows(rows: int, device: str) -> None:
    """More threads, which compare fewer rows and blocks at a time."""
    tables, contexts = families(Random(1), rows, 64)
    assert check(tables, contexts, [int(context > 0) for context in contexts], 64, 16, 1, device)


def test_rows_of_the_very_same_blocks_keep_a_unit_each(device: str) -> None:
    """As choices of one request do after their prompt."""
    tables = [list(range(1, 33))] * 6
    found = schedule_prefixes(batch_of(tables, [512] * 6, [1] * 6, device), 16, 4, 1, 7, 1).tolist()
    assert read(found, 6) == ({(0, 1, 2): 7, (3, 4, 5): 7}, 2)


def test_chunks_and_padding_share_nothing(device: str) -> None:
    tables = [list(range(1, 41))] * 9
    counts, contexts = [1, 1, 20, 0, 1, 2, 0, 0, 1], [600, 530, 600, 0, 620, 600, 640, 0, 600]
    found = schedule_prefixes(batch_of(tables, contexts, counts, device), 16, 16, 2, 4, 1).tolist()
    assert read(found, 9) == ({(0, 1, 4, 8): 8}, 4)


def test_a_block_in_common_does_not_stand_for_those_before_it(device: str) -> None:
    """Tables are compared from their first block on, whatever the pages' owner promises."""
    tables = [[1000 * row + at for at in range(40)] for row in range(1, 9)]
    for table in tables:
        table[2:] = tables[0][2:]
    found = schedule_prefixes(batch_of(tables, [640] * 8, [1] * 8, device), 16, 16, 2, 4, 1).tolist()
    assert read(found, 8)[0] == {}


@pytest.mark.parametrize(("least", "groups"), [(10, {(0, 4): 5, (1, 2): 5}), (11, {})])
def test_too_little_is_not_shared(least: int, groups: dict[tuple[int, ...], int], device: str) -> None:
    """What all groups of a step save between them counts."""
    tables = [[100 * row + at for at in range(40)] for row in range(1, 6)]
    tables[4][:20], tables[2][:20] = tables[0][:20], tables[1][:20]
    found = schedule_prefixes(batch_of(tables, [9 * KEYS] * 5, [1] * 5, device), 16, 16, 2, 4, least).tolist()
    assert read(found, 5)[0] == groups


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
