"""Attention of rows that share a prefix, and of rows that might: on a GPU held to double precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import attention_stream
from penstock.kernels.attention_device import arrival_counters, attend_pages, shared_attention
from penstock.kernels.records import AttentionBatch
from tests.kernels.scene import Rows, Scene
from tests.kernels.test_attention_device import error

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 640, 641, 1000, 4000)
SHAPES = (
    (32, 8, 128, 16, torch.bfloat16),
    (16, 8, 128, 16, torch.bfloat16),
    (4, 1, 64, 32, torch.float16),
    (6, 2, 128, 64, torch.bfloat16),  # three heads in a group
    (8, 8, 64, 8, torch.bfloat16),
    (64, 1, 128, 16, torch.float16),  # one row fills a tile
)


def attend(scene: Scene) -> Tensor:
    """By both kernels, one of which does nothing."""
    return attend_pages(scene.q, scene.k_pages, scene.v_pages, scene.batch, scene.options())


def share(scene: Scene, blocks: int) -> None:
    """Let all rows begin with the first row's leading blocks."""
    model = scene.tables[0, :blocks]
    size = scene.k_pages.shape[1]
    for row, (_, context) in enumerate(scene.rows):
        assert context > blocks * size
        scene.tables[row, :blocks] = model
        scene.k[row][: blocks * size] = scene.k[0][: blocks * size]
        scene.v[row][: blocks * size] = scene.v[0][: blocks * size]
    scene.batch = replace(scene.batch, block_tables=scene.tables.flip(0))


def on_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def hold(scene: Scene) -> None:
    """Every row is right, the same bits come at each call, and counters are left zero."""
    moved = scene.on("cuda")
    counters = arrival_counters(torch.device("cuda"))
    moved.batch = replace(moved.batch, arrivals=counters)
    assert (shared_attention(moved.q, moved.k_pages, moved.batch, moved.options()) is not None) == on_hopper()
    found = [attend(moved) for _ in range(3)]
    assert all(torch.equal(out, found[0]) for out in found)
    assert not counters.any()
    worst = max(error(moved, found[0], row, 0) for row in range(len(scene.rows)))
    assert worst < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "dtype"), SHAPES)
@pytest.mark.parametrize("rows", [16, 70])
def test_rows_of_any_length(
    heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, rows: int
) -> None:
    lengths: Rows = [(1, LENGTHS[(7 * row + rows) % len(LENGTHS)]) for row in range(rows)]
    hold(Scene(lengths, heads, kv_heads, dim, block_size, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "dtype"), SHAPES)
@pytest.mark.parametrize(("rows", "keys"), [(16, 256), (17, 704), (33, 1024), (70, 4096)])
def test_a_shared_prefix(
    heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, rows: int, keys: int
) -> None:
    """Rows that have a prefix in common, whatever stands behind it."""
    scene = Scene([(1, keys + 1 + 37 * row % 200) for row in range(rows)], heads, kv_heads, dim, block_size, dtype)
    share(scene, keys // block_size)
    hold(scene)


def test_layers_that_group_heads_differently_have_schedules_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of one size: the rows of a tile follow from the heads that share keys."""
    made = []

    def schedule_units(batch: AttentionBatch, size: int, keys: int, together: int) -> Tensor:
        made.append((size, together))
        return torch.tensor([size, together])

    monkeypatch.setattr(attention_stream, "schedule_units", schedule_units)
    batch = Scene([(1, 20)] * 2, 8, 2, 64, 16, torch.float32).batch
    asked = [(16, 4), (16, 8), (32, 4), (16, 4), (16, 8)]
    found = [attention_stream.schedule_of(batch, size, group) for size, group in asked]
    assert made == [(16, 16), (16, 8), (32, 16)]
    assert found[0] is found[3]
    assert found[1] is found[4]
    assert found[0] is not found[1]
