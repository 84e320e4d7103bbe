"""The kernel, held to the definition of attention in double precision: by the interpreter, or on a GPU if there is one.

Tiles are small, so that rows of a few keys reach every path and border.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention import AttentionBatch, attend_spans
from kernels.attention_triton import MAX_SPLITS, Tiling, attend_pages, choose_tiling
from tests.kernels.scene import MIXED, Rows, Scene

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

SINGLES: Rows = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 32), (1, 40)]
BORDERS: Rows = [(4, 16), (5, 17), (16, 31), (17, 32), (3, 33), (1, 48)]
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def check(scene: Scene, device: str, window: int = 0, tiling: Tiling | None = None) -> None:
    moved, dtype = scene.on(device), scene.q.dtype
    found = attend_pages(
        moved.q, moved.k_pages, moved.v_pages, moved.batch, moved.q.shape[2] ** -0.5, window, tiling
    )  # fmt: skip
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), scene.expected(window), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "lines", "splits"),
    [
        (2, 2, 32, 8, 16, 1),
        (4, 2, 64, 16, 32, 1),
        (4, 1, 128, 32, 16, 1),
        (8, 1, 32, 16, 32, 3),
        (6, 2, 16, 7, 16, 2),  # three heads in a group: a line of the tile stays idle
        (2, 1, 24, 1, 16, 1),  # lanes past the head stay idle
        (2, 2, 8, 16, 16, 5),  # more splits than blocks of keys
    ],
)
@pytest.mark.parametrize("rows", [MIXED, SINGLES, BORDERS], ids=["mixed", "singles", "borders"])
def test_paged_attention(
    rows: Rows, heads: int, kv_heads: int, dim: int, block_size: int, lines: int, splits: int, device: str
) -> None:
    check(Scene(rows, heads, kv_heads, dim, block_size), device, 0, Tiling(lines, 16, splits, 4, 2))


@pytest.mark.parametrize("window", [1, 6, 16, 17, 100])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rows", [[(7, 7), (1, 33), (20, 50)], [(1, 5), (1, 40), (1, 64)]], ids=["mixed", "singles"])
def test_windows(rows: Rows, window: int, splits: int, device: str) -> None:
    check(Scene(rows, 4, 2, 16, 8), device, window, Tiling(16, 16, splits, 4, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [[(1, 70), (9, 65)], [(1, 200), (1, 3)]], ids=["mixed", "singles"])
@pytest.mark.parametrize("window", [0, 48])
def test_tilings_of_the_product(rows: Rows, window: int, dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies matrices of bfloat16 as if they were integers")
    check(Scene(rows, 4, 2, 64, 16, dtype), device, window)


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_without_queries_or_keys(splits: int, device: str) -> None:
    """Padding: a row without queries costs nothing, one whose context is 0 gives zeros, neighbours are unchanged."""
    scene = Scene(BORDERS[:3], 4, 2, 16, 8)
    padded, last = scene.on(device), int(scene.batch.query_start[-1])
    starts = [*scene.batch.query_start.tolist(), last, last, last + 1]
    starts.insert(2, starts[1])  # and one in the middle
    nothing = torch.zeros_like(scene.tables)
    tables = torch.cat((scene.tables[:1], nothing[:1], scene.tables[1:], nothing[:3]))
    context = [*scene.batch.context.tolist(), 0, 1, 0]
    context.insert(1, 9)
    batch = replace(
        padded.batch,
        slots=torch.arange(len(tables), dtype=torch.int32, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context=torch.tensor(context, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
    )
    q = torch.cat((padded.q, padded.q[:1]))
    found = attend_pages(q, padded.k_pages, padded.v_pages, batch, 0.25, 0, Tiling(16, 16, splits, 4, 2)).cpu()
    torch.testing.assert_close(found[:last].double(), scene.expected(), atol=3e-6, rtol=1e-5)
    assert torch.equal(found[last:], torch.zeros_like(found[last:]))


def test_a_scratch_row_of_single_queries_harms_nobody(device: str) -> None:
    """What a captured graph pads with: context 1 in the scratch block."""
    scene = Scene(SINGLES, 4, 2, 16, 8)
    padded = scene.on(device)
    padded.k_pages[0], padded.v_pages[0] = 1.0, 2.0
    batch = AttentionBatch(
        query_start=torch.arange(len(SINGLES) + 3, dtype=torch.int32, device=device),
        context=torch.cat((padded.batch.context, padded.batch.context.new_ones(2))),
        slots=torch.cat((padded.batch.slots, padded.batch.slots.new_full((2,), len(SINGLES)))),
        block_tables=torch.cat((padded.batch.block_tables, padded.batch.block_tables[:1] * 0)),
        slot_mapping=padded.batch.slot_mapping,
        max_query=1,
        max_context=40,
    )
    q = torch.cat((padded.q, padded.q[:2]))
    found = attend_pages(q, padded.k_pages, padded.v_pages, batch, 0.25, 0, Tiling(16, 16, 2, 4, 2)).cpu()
    torch.testing.assert_close(found[:-2].double(), scene.expected(), atol=3e-6, rtol=1e-5)
    assert torch.equal(found[-2:], torch.full_like(found[-2:], 2.0))


def test_a_row_does_not_depend_on_its_batch(device: str) -> None:
    """The same tiling gives the same bits, whatever else is in the launch."""
    scene = Scene(MIXED, 4, 2, 16, 16).on(device)
    tiling = Tiling(16, 16, 2, 4, 2)
    together = attend_pages(scene.q, scene.k_pages, scene.v_pages, scene.batch, 0.25, 0, tiling)
    for row in (0, 1, 4):
        start, end = scene.batch.query_start[row : row + 2].tolist()
        alone = AttentionBatch(
            query_start=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            context=scene.batch.context[row : row + 1],
            slots=scene.batch.slots[row : row + 1],
            block_tables=scene.batch.block_tables,
            slot_mapping=scene.batch.slot_mapping[start:end],
            max_query=end - start,
            max_context=int(scene.batch.context[row]),
        )
        found = attend_pages(scene.q[start:end], scene.k_pages, scene.v_pages, alone, 0.25, 0, tiling)
        assert torch.equal(found, together[start:end])


def test_queries_and_tables_may_be_views(device: str) -> None:
    scene = Scene(MIXED, 4, 2, 16, 8)
    wide = torch.full((len(scene.q), 8, 16), 9.0)
    wide[:, :4] = scene.q
    scene.q = wide[:, :4]
    tables = scene.batch.block_tables
    tables = torch.cat((tables, tables), 1)[:, : tables.shape[1]]
    scene.batch = replace(scene.batch, block_tables=tables)
    check(scene, device, 0, Tiling(16, 16, 1, 4, 2))


def batch_of(rows: Rows) -> AttentionBatch:
    """Sizes alone: the choice must not read a tensor."""
    nothing = torch.zeros(len(rows), device="meta")
    return AttentionBatch(nothing, nothing, nothing, nothing, nothing, max(n for n, _ in rows), max(n for _, n in rows))


def chosen(rows: Rows, window: int = 0, heads: int = 32, dtype: torch.dtype = torch.bfloat16) -> Tiling:
    return choose_tiling(batch_of(rows), (sum(n for n, _ in rows), heads, 128), 8, dtype, 132, window)


def test_few_long_rows_are_split_and_many_are_not() -> None:
    assert chosen([(1, 8192)]).splits > 16
    assert chosen([(1, 1 << 20)]).splits <= MAX_SPLITS
    assert chosen([(1, 8192)] * 256).splits == 1
    assert chosen([(1, 64)]).splits == 1
    assert chosen([(8192, 8192)]).splits == 1
    assert chosen([(16, 32768)]).splits > 1
    assert chosen([(1, 8192)], window=127).splits == 1


def test_tiles_are_tall_where_rows_have_many_queries() -> None:
    assert chosen([(1, 100)] * 8).lines == 16
    assert chosen([(1, 100), (500, 500)]).lines == 64
    assert chosen([(1, 100), (5000, 5000)]).lines == 128
    assert chosen([(1, 100)], heads=8 * 71).lines == 128  # a group must fit


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [[(1, 100)], [(500, 500)], [(5000, 5000)]], ids=["decode", "chunk", "long chunk"])
def test_a_tile_fits_the_shared_memory(rows: Rows, dtype: torch.dtype, dim: int) -> None:
    """Keys and values of one turn are held at most twice, and the queries once, in Hopper's 227 KiB."""
    tokens = sum(n for n, _ in rows)
    for heads in (8, 32, 256):
        tiling = choose_tiling(batch_of(rows), (tokens, heads, dim), 8, dtype, 132)
        held = (4 * tiling.keys + tiling.lines) * dim * dtype.itemsize
        assert held <= 227 << 10, tiling
        assert tiling.keys >= 16


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[(1, 3000), (700, 900), (1, 17), (130, 4000)], [(1, 5000)] * 3])
@pytest.mark.parametrize("window", [0, 300])
def test_at_full_size(rows: Rows, window: int) -> None:
    """bfloat16 of a served shape against double precision: the error of the rounding alone."""
    scene = Scene(rows, 32, 8, 128, 16, torch.bfloat16)
    moved = scene.on("cuda")
    found = attend_pages(moved.q, moved.k_pages, moved.v_pages, moved.batch, 128**-0.5, window).double()
    for row, (queries, context) in enumerate(rows):
        start = int(scene.batch.query_start[row])
        own = torch.arange(context - queries, context, device="cuda")[:, None]
        places = torch.arange(context, device="cuda")
        seen = (places <= own) & (places > own - window if window else True)
        q = moved.q[start : start + queries].double().transpose(0, 1)
        k, v = (side[row].cuda().double().transpose(0, 1).repeat_interleave(4, 0) for side in (scene.k, scene.v))
        scores = (q @ k.transpose(1, 2) * 128**-0.5).masked_fill(~seen, -torch.inf)
        expected = (scores.softmax(-1) @ v).transpose(0, 1)
        error = (found[start : start + queries] - expected).norm() / expected.norm()
        assert error < 5e-3, (row, float(error))


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths() -> None:
    """Captured once for the largest context, it serves shorter ones and other tables; nothing waits for the device."""
    scene = Scene([(1, 700), (1, 650), (1, 3), (1, 690)], 8, 2, 64, 16)
    moved = scene.on("cuda")
    arguments = moved.q, moved.k_pages, moved.v_pages, moved.batch, 0.125
    attend_pages(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = attend_pages(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    torch.testing.assert_close(out.cpu().double(), scene.expected(), atol=3e-6, rtol=1e-5)
    shorter = [(1, 64), (1, 1), (1, 2), (1, 300)]
    scene.rows = shorter
    moved.batch.context.copy_(torch.tensor([context for _, context in shorter]))
    graph.replay()
    torch.testing.assert_close(out.cpu().double(), scene.expected(), atol=3e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(4, 256), (64, 128), (2, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [[(1, 300), (1, 40)], [(90, 300), (1, 65)], [(4100, 4200)]], ids=["1", "90", "4100"])
def test_unusual_heads_fit_the_chip(rows: Rows, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Every form compiles within the chip's memory and agrees with the reference on the same numbers."""
    scene = Scene(rows, heads, 2, dim, 16, dtype).on("cuda")
    arguments = scene.q, scene.k_pages, scene.v_pages, scene.batch, dim**-0.5
    expected = attend_spans(scene.q.float(), scene.k_pages.float(), scene.v_pages.float(), scene.batch, dim**-0.5, 0)
    found = attend_pages(*arguments).float()
    assert (found - expected).norm() / expected.norm() < (5e-3 if dtype == torch.bfloat16 else 1e-5)
