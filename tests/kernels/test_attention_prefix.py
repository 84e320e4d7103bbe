"""Attention of rows that share prefixes, and of rows that might, against double precision."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from penstock.kernels import attention_prefix
from penstock.kernels.attention_device import arrival_counters, attend_pages
from penstock.kernels.attention_prefix import BLOCK_M, schedule_of, serves
from penstock.kernels.records import AttentionBatch
from tests.kernels.scene import Rows, Scene
from tests.kernels.test_attention_device import error

pytestmark = [pytest.mark.usefixtures("one_thread", "poisoned"), pytest.mark.sweep]

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 640, 641, 1000, 4000)
SHAPES = (
    (32, 8, 128, 16, torch.bfloat16),
    (16, 8, 128, 16, torch.bfloat16),
    (4, 1, 64, 32, torch.float16),
    (6, 2, 96, 64, torch.bfloat16),  # three heads in a group
    (8, 8, 64, 8, torch.bfloat16),
    (32, 1, 128, 16, torch.float16),  # two rows fill a tile
)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is shared is shared, however little it saves."""
    monkeypatch.setattr(attention_prefix, "SAVED", 1)


def attend(scene: Scene) -> Tensor:
    return attend_pages(scene.q, scene.k_pages, scene.v_pages, scene.batch, scene.options())


def share(scene: Scene, *families: tuple[Sequence[int], int]) -> None:
    """Let the rows of each family begin with so many blocks of its first row; a family within another comes later."""
    size = scene.k_pages.shape[1]
    for rows, blocks in families:
        for row in rows:
            assert scene.rows[row][1] > blocks * size
            scene.tables[row, :blocks] = scene.tables[rows[0], :blocks]
            for side in (scene.k, scene.v):
                side[row][: blocks * size] = side[rows[0]][: blocks * size]
    scene.batch = replace(scene.batch, block_tables=scene.tables.flip(0))


def pad(scene: Scene, rows: int) -> None:
    """Add rows without tokens, as a CUDA graph of more rows has them."""
    batch = scene.batch
    scene.batch = replace(
        batch,
        query_start=torch.cat([batch.query_start, batch.query_start[-1:].expand(rows)]),
        context=torch.cat([batch.context, batch.context.new_zeros(rows)]),
        slots=torch.cat([batch.slots, batch.slots.new_zeros(rows)]),
    )


def groups_of(scene: Scene) -> int:
    schedule, _ = schedule_of(scene.q, scene.k_pages, scene.batch)
    return int(schedule[0])


def hold(scene: Scene, groups: int) -> None:
    """Every row is right, the same bits come at each call, counters are left zero, and so many groups were found."""
    moved = scene.on("cuda")
    counters = arrival_counters(torch.device("cuda"))
    moved.batch = replace(moved.batch, arrivals=counters)
    assert serves(moved.q, moved.k_pages, moved.batch, moved.options())
    found = [attend(moved) for _ in range(3)]
    assert all(torch.equal(out, found[0]) for out in found)
    assert not counters.any()
    assert groups_of(moved) == groups
    worst = max(error(moved, found[0], row, 0) for row in range(len(scene.rows)))
    assert worst < 5e-3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "prefixes", "fp8"),
    [(4, 2, 16, 16, 1, False), (6, 2, 24, 32, 2, False), (8, 1, 32, 8, 2, False), (6, 2, 24, 32, 2, True)],
)
def test_by_the_interpreter(
    heads: int, kv_heads: int, dim: int, block_size: int, prefixes: int, fp8: bool, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every key of every row exactly once, in fp32, with capped scores and sinks too: which no GPU is needed for."""
    monkeypatch.setattr(attention_prefix, "TYPES", (torch.float32,))
    monkeypatch.setattr(attention_prefix, "CTAS_PER_SM", 7)
    scene = tenants(prefixes, heads, kv_heads, dim, block_size, torch.float32, 256, fp8=fp8)
    if prefixes == 2:
        scene.softcap, scene.sinks = 3.0, torch.randn(heads)
    moved = scene.on(device)
    moved.batch = replace(moved.batch, arrivals=arrival_counters(torch.device(device)))
    assert serves(moved.q, moved.k_pages, moved.batch, moved.options())
    torch.testing.assert_close(attend(moved).cpu().double(), scene.expected(), atol=3e-6, rtol=1e-5)
    assert groups_of(moved) == prefixes


def tenants(
    prefixes: int, heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, longer: int,
    *, fp8: bool = False,
) -> Scene:  # fmt: skip
    """Seven rows of each tenant, whose prefixes get longer, in any order among rows that share nothing; and padding."""
    random = Random(prefixes)
    rows = random.sample(range(7 * prefixes + 5), 7 * prefixes + 5)
    families = [(sorted(rows[at * 7 : at * 7 + 7]), (256 + longer * at) // block_size) for at in range(prefixes)]
    lengths = {row: blocks * block_size for group, blocks in families for row in group}
    loners = iter((1, 63, 64, 300, 17))
    contexts = [lengths[row] + random.randint(1, 100) if row in lengths else next(loners) for row in range(len(rows))]
    scene = Scene([(1, context) for context in contexts], heads, kv_heads, dim, block_size, dtype, fp8=fp8)
    share(scene, *families)
    pad(scene, 9)
    return scene


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "dtype"), SHAPES)
@pytest.mark.parametrize("rows", [16, 70])
def test_rows_of_any_length(
    heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, rows: int
) -> None:
    lengths: Rows = [(1, LENGTHS[(7 * row + rows) % len(LENGTHS)]) for row in range(rows)]
    hold(Scene(lengths, heads, kv_heads, dim, block_size, dtype), 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "dtype"), SHAPES)
@pytest.mark.parametrize(("rows", "keys"), [(16, 256), (17, 704), (33, 1024), (70, 4096)])
def test_a_shared_prefix(
    heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, rows: int, keys: int
) -> None:
    """Rows that have a prefix in common, whatever stands behind it, in as many groups as their tiles need."""
    scene = Scene([(1, keys + 1 + 37 * row % 200) for row in range(rows)], heads, kv_heads, dim, block_size, dtype)
    share(scene, (range(rows), keys // block_size))
    together = BLOCK_M * kv_heads // heads
    even = -(-rows // -(-rows // together))
    hold(scene, -(-rows // even) - (rows % even == 1))  # one row alone is no group


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "dtype"), SHAPES[:5])
@pytest.mark.parametrize("prefixes", [1, 2, 5])
@pytest.mark.parametrize("fp8", [False, True])
def test_prefixes_of_several_tenants(
    heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, prefixes: int, fp8: bool
) -> None:
    together = BLOCK_M * kv_heads // heads
    scene = tenants(prefixes, heads, kv_heads, dim, block_size, dtype, 320, fp8=fp8)
    hold(scene, prefixes * -(-7 // together))


@pytest.mark.gpu
def test_prefixes_within_a_prefix() -> None:
    """Rows that all begin with the same block, or even the same thousand keys, and then part."""
    scene = Scene([(1, 2100 + 31 * row) for row in range(24)], 32, 8, 128, 16, torch.bfloat16)
    share(scene, (range(24), 64), (range(0, 24, 3), 128))
    hold(scene, 2)
    scene = Scene([(1, 700 + 31 * row) for row in range(24)], 32, 8, 128, 16, torch.bfloat16)
    share(scene, (range(24), 1), (range(0, 24, 2), 32), (range(1, 24, 2), 40))
    hold(scene, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "prefix", "own", "kv_heads"),
    [
        (16, 16384, 700, 1),  # many splits of one group
        (16, 256, 1, 1),  # fewer splits than programs
        (200, 256, 40, 8),  # more of them
        (40, 512, 3000, 2),  # rows whose own keys are split, too
    ],
)
def test_results_are_joined_once_and_in_order(rows: int, prefix: int, own: int, kv_heads: int) -> None:
    """`hold` asks for the same bits at each call."""
    lengths = [(1, prefix + 1 + 97 * row % own) for row in range(rows)]
    scene = Scene(lengths, 4 * kv_heads, kv_heads, 128, 16, torch.bfloat16)
    share(scene, (range(rows), prefix // 16))
    hold(scene, -(-rows // 16))


def test_too_few_saved_bytes_are_left_to_the_general_kernel(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """One row's reads of a prefix of 256 keys, in two halves of 64 numbers for each of 8 heads."""
    scene = tenants(1, 8, 8, 64, 16, torch.bfloat16, 0).on(device)
    for saved, groups in ((6 * 256 * 8 * 64 * 2 * 2, 1), (6 * 256 * 8 * 64 * 2 * 2 + 1, 0)):
        monkeypatch.setattr(attention_prefix, "SAVED", saved)
        scene.batch = replace(scene.batch, schedules={})
        assert groups_of(scene) == groups


def test_layers_of_each_kind_have_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of one size, too: what fits a tile, a program and a byte follows from a layer's heads."""
    made: list[tuple[int, ...]] = []

    def schedule_prefixes(batch: AttentionBatch, *grid: int) -> Tensor:
        made.append(grid)
        return torch.tensor(grid)

    monkeypatch.setattr(attention_prefix, "schedule_prefixes", schedule_prefixes)
    batch = Scene([(1, 20)] * 2, 8, 2, 64, 16, torch.bfloat16).batch
    layers = [(8, 2, 64, 16), (16, 2, 64, 16), (8, 2, 128, 16), (8, 4, 64, 16), (8, 2, 64, 32)]
    layers.append(layers[0])
    found = []
    for heads, kv_heads, dim, size in layers:
        q, pages = torch.empty(2, heads, dim), torch.empty(4, size, kv_heads, dim)
        monkeypatch.setattr(attention_prefix, "SAVED", 1 << 20)
        found.append(schedule_of(q.bfloat16(), pages, batch))
    assert len(set(made)) == len(made) == 5
    assert [launched for _, launched in found] == [True] * 5 + [False]
    assert [schedule.tolist() for schedule, _ in found] == [list(grid) for grid in [*made, made[0]]]


@pytest.mark.gpu
def test_layers_of_different_heads_attend_one_step() -> None:
    """Their tiles hold 16 rows and 32, so that the same prefixes are cut into different groups."""
    scene = Scene([(1, 1030 + row) for row in range(40)], 32, 8, 128, 16, torch.bfloat16)
    share(scene, (range(20), 64), (range(20, 40), 60))
    first = scene.on("cuda")
    second = copy(first)
    second.q = first.q[:, ::2].contiguous()
    for layer in (first, second, first):
        found = attend(layer)
        assert max(error(layer, found, row, 0) for row in range(40)) < 5e-3
    assert sorted(int(schedule[0]) for schedule in first.batch.schedules.values()) == [2, 4]
