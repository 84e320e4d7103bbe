"""Attention as a GPU runs it: by the interpreter, or on a GPU if there is one."""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import attend_spans
from penstock.kernels.attention_device import (
    arrival_counters,
    attend_pages,
    chunk_attention,
    launches,
    shape_of,
)
from penstock.kernels.attention_prefix import CROWD, serves
from penstock.kernels.attention_tiling import WAVES
from penstock.kernels.chip import CHIPS, chip_of
from penstock.kernels.records import AttentionBatch
from tests.cuda import no_synchronization
from tests.kernels.scene import MIXED, Images, Rows, Scene

pytestmark = [pytest.mark.usefixtures("one_thread", "poisoned"), pytest.mark.sweep]

SERVED: Rows = [(1, 3000), (700, 900), (1, 17), (130, 4000), (3, 500), (17, 17)]


def paged(scene: Scene, window: int = 0) -> Tensor:
    return attend_pages(scene.q, scene.k_pages, scene.v_pages, scene.batch, scene.options(window))


def error(scene: Scene, found: Tensor, row: int, window: int) -> float:
    """Relative error of a row's result against double precision, on the scene's device."""
    queries, context = scene.rows[row]
    start = int(scene.batch.query_start[row])
    group = scene.q.shape[1] // scene.k_pages.shape[2]
    own = torch.arange(context - queries, context, device=scene.q.device)[:, None]
    places = torch.arange(context, device=scene.q.device)
    seen = (places <= own) & (places > own - window if window else True)
    q = scene.q[start : start + queries].double().transpose(0, 1)
    sides = (side[row].to(scene.q.device).double() for side in (scene.k, scene.v))
    k, v = (side.transpose(0, 1).repeat_interleave(group, 0) for side in sides)
    scores = q @ k.transpose(1, 2) * scene.q.shape[2] ** -0.5
    if scene.softcap:
        scores = scene.softcap * torch.tanh(scores / scene.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = torch.full(q.shape[:1], -torch.inf) if scene.sinks is None else scene.sinks.double()
    weights = torch.cat((scores, sinks.to(q.device)[:, None, None].expand(-1, queries, 1)), dim=2).softmax(-1)
    expected = (weights[:, :, :-1] @ v).transpose(0, 1)
    return float((found[start : start + queries].double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [MIXED, [(1, 20), (1, 300)], [(40, 60)], [(9, 20), (16, 16)]], ids=str)
@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_row_is_served(rows: Rows, window: int, invariant: bool, device: str) -> None:
    scene = Scene(rows, 4, 2, 16, 16)
    moved = scene.on(device)
    moved.batch = replace(moved.batch, invariant=invariant, arrivals=arrival_counters(torch.device(device)))
    torch.testing.assert_close(paged(moved, window).cpu().double(), scene.expected(window), atol=3e-6, rtol=1e-5)


def mixture(seed: int, most: int, longest: int) -> tuple[Rows, int, int, int, int]:
    """Random rows, then heads, key-value heads, block size and window."""
    random = Random(seed)
    rows = []
    for _ in range(random.randint(1, 6)):
        queries = 1 if random.random() < 0.5 else random.randint(2, most)
        rows.append((queries, queries + random.randint(0, longest)))
    kv_heads = random.choice((1, 2))
    window = random.choice((0, 0, random.randint(1, longest)))
    return rows, kv_heads * random.choice((1, 2, 3, 4)), kv_heads, random.choice((8, 16, 32)), window


def images_of(rows: Rows, seed: int) -> Images:
    """Some of each longer row's new tokens; the first may have tokens in pages already."""
    random, images = Random(seed), []
    for row, (queries, context) in enumerate(rows):
        at = max(0, context - queries - random.randint(0, 5))
        while queries > 1 and at < context:
            end = random.randint(at + 1, context)
            images.append((row, at, end))
            at = end + random.randint(0, 4)
    return images


@pytest.mark.parametrize("seed", range(40, 46))
@pytest.mark.parametrize("invariant", [False, True])
def test_random_images(seed: int, invariant: bool, device: str) -> None:
    rows, heads, kv_heads, block_size, window = mixture(seed, 40, 60)
    scene = Scene(rows, heads, kv_heads, 16, block_size, images=images_of(rows, seed))
    moved = scene.on(device)
    moved.batch = replace(moved.batch, invariant=invariant, arrivals=arrival_counters(torch.device(device)))
    torch.testing.assert_close(paged(moved, window).cpu().double(), scene.expected(window), atol=3e-6, rtol=1e-5)


def test_a_step_with_images_is_the_general_kernels(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Others know nothing of limits: none is asked for chunks, and no row shares a prefix."""
    monkeypatch.setattr("penstock.kernels.attention_device.chunk_attention", refuse)
    rows: Rows = [(40, 60), (1, 30)]
    scene = Scene(rows, 4, 2, 16, 16, images=[(0, 25, 58)])
    torch.testing.assert_close(paged(scene.on(device)).cpu().double(), scene.expected(), atol=3e-6, rtol=1e-5)
    scene = Scene([(1, 300)] * CROWD, 4, 2, 16, 16, torch.float16)
    assert serves(scene.q, scene.k_pages, scene.batch, scene.options())
    scene.batch = replace(scene.batch, limits=scene.batch.context - 1)
    assert not serves(scene.q, scene.k_pages, scene.batch, scene.options())


def refuse(*_: object) -> None:
    pytest.fail("a kernel without limits")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(50, 60))
def test_random_images_of_served_sizes(seed: int) -> None:
    rows, heads, kv_heads, block_size, window = mixture(seed, 700, 2000)
    scene = Scene(rows, heads, kv_heads, 128, block_size, torch.bfloat16, images=images_of(rows, seed))
    found = paged(scene.on("cuda"), window).cpu().double()
    assert (found - scene.expected(window)).norm() < 5e-3 * scene.expected(window).norm()


@pytest.mark.parametrize("seed", range(6))
def test_random_mixtures(seed: int, device: str) -> None:
    rows, heads, kv_heads, block_size, window = mixture(seed, 40, 60)
    scene = Scene(rows, heads, kv_heads, 16, block_size)
    moved = scene.on(device)
    torch.testing.assert_close(paged(moved, window).cpu().double(), scene.expected(window), atol=3e-6, rtol=1e-5)
    moved.batch = replace(moved.batch, invariant=True)
    torch.testing.assert_close(paged(moved, window).cpu().double(), scene.expected(window), atol=3e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10, 30))
def test_random_mixtures_of_served_sizes(seed: int) -> None:
    rows, heads, kv_heads, block_size, window = mixture(seed, 700, 5000)
    scene = Scene(rows, heads, kv_heads, 128, block_size, torch.bfloat16).on("cuda")
    found = paged(scene, window)
    assert torch.equal(paged(scene, window), found)
    for row in range(len(rows)):
        assert error(scene, found, row, window) < 5e-3, (rows, row)


@pytest.mark.gpu
def test_a_graph_of_a_mixture_replays_with_other_rows() -> None:
    """Captured with bounds on rows and tokens, it serves any division of the tokens among the rows."""
    sizes = [(1, 300), (1, 90), (1, 40), (61, 200)]
    scene = Scene(sizes, 8, 2, 128, 16, torch.bfloat16).on("cuda")
    scene.batch = replace(scene.batch, max_context=2048, arrivals=arrival_counters(torch.device("cuda")))
    paged(scene)
    torch.cuda.synchronize()
    scene.batch = replace(scene.batch, spans={}, schedules={}, tiles={})  # as each step has them: found in the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged(scene)
    for rows in (sizes, [(30, 300), (1, 80), (3, 33), (30, 150)], [(1, 299), (0, 0), (20, 30), (43, 190)]):
        counts = torch.tensor([n for n, _ in rows])
        scene.rows = list(rows)
        scene.batch.query_start[1:] = counts.cumsum(0)
        scene.batch.context.copy_(torch.tensor([context for _, context in rows]))
        graph.replay()
        for row, (count, context) in enumerate(rows):
            whole = replace_context(scene, row, context)
            assert count == 0 or error(whole, out, row, 0) < 5e-3, (rows, row)


def replace_context(scene: Scene, row: int, context: int) -> Scene:
    """The scene with as many of a row's keys as its context counts now."""
    cut = copy.copy(scene)
    cut.k, cut.v = list(scene.k), list(scene.v)
    cut.k[row], cut.v[row] = scene.k[row][:context], scene.v[row][:context]
    return cut


def test_a_mixture_takes_two_launches_of_rows_that_complete_each_other() -> None:
    def launched(rows: Rows, invariant: bool = False) -> tuple[bool, bool, int]:
        scene = Scene(rows, 8, 2, 16, 16)
        by_row, chunks, shortest = launches(shape_of(scene.q, scene.k_pages, scene.batch, 0), invariant, CHIPS["sm_90"])
        if by_row is not None and chunks is not None:
            assert by_row.block_m // 4 == shortest - 1
        return by_row is not None, chunks is not None, shortest

    assert launched([(1, 50), (16, 20)]) == (True, False, 1)
    assert launched([(17, 20)]) == (False, True, 1)
    assert launched([(1, 50), (17, 20)]) == (True, True, 5)
    assert launched([(1, 50), (16, 20)], invariant=True) == (True, False, 1)
    assert launched([(1, 50), (17, 20)], invariant=True) == (False, True, 1)


def test_counters_are_enough_wherever_keys_are_cut(device: str) -> None:
    counters = arrival_counters(torch.device(device))
    assert counters.dtype == torch.int32
    assert len(counters) >= WAVES * chip_of(torch.device(device)).num_sms
    assert not counters.any()


def test_other_devices_and_sizes_have_no_kernel_of_hoppers_instructions() -> None:
    scene = Scene(MIXED, 4, 2, 16, 16)
    assert chunk_attention(scene.q, scene.k_pages, scene.options()) is None


@pytest.mark.parametrize("window", [0, 40])
def test_invariant_batches_give_a_query_the_same_bits_in_any_chunk(window: int, device: str) -> None:
    rows: Rows = [(40, 660), (1, 33)]
    scene = Scene(rows, 4, 2, 16, 16).on(device)
    scene.batch = replace(scene.batch, invariant=True)
    whole = paged(scene, window)
    check_pieces(scene, whole, ((0, 1), (1, 7), (8, 31), (39, 1)), window)


def check_pieces(scene: Scene, whole: Tensor, pieces: tuple[tuple[int, int], ...], window: int) -> None:
    """Pieces of the first row, alone and beside the second, have the bits that they have in the whole batch."""
    queries, context = scene.rows[0]
    last = int(scene.batch.query_start[-2])
    for first, count in pieces:
        alone = AttentionBatch(
            query_start=scene.batch.query_start.new_tensor([0, count]),
            context=scene.batch.context.new_tensor([context - queries + first + count]),
            slots=scene.batch.slots[:1],
            block_tables=scene.batch.block_tables,
            slot_mapping=scene.batch.slot_mapping[first : first + count],
            max_query=count,
            max_context=context - queries + first + count,
            invariant=True,
        )
        beside = replace(
            alone,
            query_start=scene.batch.query_start.new_tensor([0, count, count + 1]),
            context=torch.cat((alone.context, scene.batch.context[-1:])),
            slots=torch.cat((alone.slots, scene.batch.slots[-1:])),
        )
        for batch, q in (
            (alone, scene.q[first : first + count]),
            (beside, torch.cat((scene.q[first : first + count], scene.q[last:]))),
        ):
            found = attend_pages(q, scene.k_pages, scene.v_pages, batch, scene.options(window))
            assert torch.equal(found[:count], whole[first : first + count]), (first, count)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 300])
def test_invariant_at_full_size(window: int) -> None:
    scene = Scene([(1200, 3000), (1, 77)], 32, 8, 128, 16, torch.bfloat16).on("cuda")
    scene.batch = replace(scene.batch, invariant=True)
    whole = paged(scene, window)
    assert error(scene, whole, 0, window) < 5e-3
    check_pieces(scene, whole, ((0, 1), (1, 15), (16, 500), (516, 17), (1198, 1), (1199, 1)), window)
    other = replace(scene.batch, max_context=40000, max_query=1200)
    again = attend_pages(scene.q, scene.k_pages, scene.v_pages, other, scene.options(window))
    assert torch.equal(again, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [SERVED, [(1, 5000)] * 3, [(2, 700)] * 5, [(16, 9000), (9, 12)]], ids=str)
@pytest.mark.parametrize("window", [0, 300])
def test_at_full_size(rows: Rows, window: int) -> None:
    """bfloat16 of a served shape against double precision: the error of the rounding alone."""
    scene = Scene(rows, 32, 8, 128, 16, torch.bfloat16).on("cuda")
    found = paged(scene, window)
    for row in range(len(rows)):
        assert error(scene, found, row, window) < 5e-3, row


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
def test_a_graph_replays_with_other_lengths(invariant: bool) -> None:
    """Captured once for the largest context, it serves shorter ones; nothing waits for the device."""
    scene = Scene([(1, 700), (1, 650), (1, 3), (1, 690)], 8, 2, 64, 16)
    moved = scene.on("cuda")
    moved.batch = replace(
        moved.batch, max_context=4096, invariant=invariant, arrivals=arrival_counters(torch.device("cuda"))
    )
    paged(moved)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_synchronization(), torch.cuda.graph(graph):
        out = paged(moved)
    graph.replay()
    torch.testing.assert_close(out.cpu().double(), scene.expected(), atol=3e-6, rtol=1e-5)
    scene.rows = [(1, 64), (1, 1), (1, 2), (1, 300)]
    moved.batch.context.copy_(torch.tensor([context for _, context in scene.rows]))
    graph.replay()
    torch.testing.assert_close(out.cpu().double(), scene.expected(), atol=3e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(4, 256), (64, 128), (2, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [[(1, 300), (1, 40)], [(90, 300), (1, 65)], [(4100, 4200)]], ids=["1", "90", "4100"])
@pytest.mark.parametrize("invariant", [False, True])
def test_unusual_heads_fit_the_chip(rows: Rows, heads: int, dim: int, dtype: torch.dtype, invariant: bool) -> None:
    """Every form compiles within the chip's memory and agrees with the reference on the same numbers."""
    scene = Scene(rows, heads, 2, dim, 16, dtype).on("cuda")
    scene.batch = replace(scene.batch, invariant=invariant)
    expected = attend_spans(scene.q.float(), scene.k_pages.float(), scene.v_pages.float(), scene.batch, scene.options())
    found = paged(scene).float()
    assert (found - expected).norm() / expected.norm() < (5e-3 if dtype == torch.bfloat16 else 1e-5)
