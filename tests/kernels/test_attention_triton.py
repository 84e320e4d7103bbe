"""The kernel, held to the definition of attention in double precision: by the interpreter, or on a GPU if there is one.

Tiles are small, so that rows of a few keys reach every path and border.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.kernels.attention_schedule import tiles_of
from penstock.kernels.attention_tiling import Tiling
from penstock.kernels.attention_triton import attend_tiles
from penstock.kernels.records import AttentionBatch
from tests.kernels.scene import MIXED, Images, Rows, Scene

pytestmark = [pytest.mark.usefixtures("one_thread", "poisoned"), pytest.mark.sweep]

SINGLES: Rows = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 32), (1, 40)]
BORDERS: Rows = [(4, 16), (5, 17), (16, 31), (17, 32), (3, 33), (1, 48)]
FEW: Rows = [(1, 5), (2, 33), (4, 4), (3, 50), (1, 1)]
PICTURES: Rows = [(26, 60), (1, 33), (9, 9), (20, 50)]  # images within tiles, across them, and of earlier tokens
IMAGES: Images = [(0, 30, 39), (0, 41, 60), (2, 0, 9), (3, 31, 37), (3, 37, 49)]
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def form(
    block_m: int = 16,
    programs: int = 1,
    *,
    by_row: bool = False,
    split_keys: int = 0,
    block_n: int = 16,
    warps: int = 4,
    one_loop: bool = False,
) -> Tiling:
    """Splits may be as small as an iteration."""
    return Tiling(block_m, block_n, programs, warps, 2, by_row, split_keys, block_n, one_loop)


def attend(scene: Scene, tiling: Tiling, window: int = 0, shortest: int = 1) -> torch.Tensor:
    """One launch; what nobody writes is no number."""
    out = torch.empty(scene.q.shape, dtype=scene.q.dtype, device=scene.q.device)
    attend_tiles(scene.q, scene.k_pages, scene.v_pages, out, scene.batch, scene.options(window), tiling, shortest)
    return out


def check(scene: Scene, device: str, tiling: Tiling, window: int = 0) -> None:
    dtype = scene.q.dtype
    found = attend(scene.on(device), tiling, window)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), scene.expected(window), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


def alone(scene: Scene, first: int, count: int, context: int, row: int) -> AttentionBatch:
    """Some queries of one row as a batch of their own."""
    return AttentionBatch(
        query_start=scene.batch.query_start.new_tensor([0, count]),
        context=scene.batch.context.new_tensor([context]),
        slots=scene.batch.slots[row : row + 1],
        block_tables=scene.batch.block_tables,
        slot_mapping=scene.batch.slot_mapping[first : first + count],
        max_query=count,
        max_context=context,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "block_m", "programs"),
    [
        (2, 2, 32, 8, 16, 1),
        (4, 2, 64, 16, 32, 1),
        (4, 1, 128, 32, 16, 1),
        (8, 1, 32, 16, 32, 30),
        (6, 2, 16, 7, 16, 20),  # three heads in a group: a line of the tile stays idle
        (2, 1, 24, 1, 16, 1),  # lanes past the head stay idle
        (2, 2, 8, 16, 16, 80),  # more programs than blocks of keys
        (4, 2, 16, 8, 16, 2),  # fewer than tiles
    ],
)
@pytest.mark.parametrize("rows", [MIXED, SINGLES, BORDERS], ids=["mixed", "singles", "borders"])
def test_tiles_of_rows_of_any_length(
    rows: Rows, heads: int, kv_heads: int, dim: int, block_size: int, block_m: int, programs: int, device: str
) -> None:
    check(Scene(rows, heads, kv_heads, dim, block_size), device, form(block_m, programs))


@pytest.mark.parametrize("programs", [1, 2, 4])
@pytest.mark.parametrize("split_keys", [0, 32])
@pytest.mark.parametrize("rows", [SINGLES, FEW], ids=["singles", "few"])
def test_a_tile_for_each_row(rows: Rows, split_keys: int, programs: int, device: str) -> None:
    check(Scene(rows, 8, 2, 32, 8), device, form(16, programs, by_row=True, split_keys=split_keys))


@pytest.mark.parametrize("window", [1, 6, 16, 17, 100])
@pytest.mark.parametrize(("programs", "split_keys"), [(1, 0), (9, 0), (1, 32), (2, 32)])
@pytest.mark.parametrize("rows", [[(7, 7), (1, 33), (20, 50)], [(1, 5), (1, 40), (1, 64)]], ids=["mixed", "singles"])
def test_windows(rows: Rows, programs: int, split_keys: int, window: int, device: str) -> None:
    by_row = rows[0][0] == 1
    check(Scene(rows, 4, 2, 16, 8), device, form(16, programs, by_row=by_row, split_keys=split_keys), window)


@pytest.mark.parametrize(
    ("dim", "softcap", "fp8", "images"),
    [(16, 0.0, False, False), (24, 5.0, False, False), (32, 0.0, True, False), (16, 0.0, False, True)],
    ids=["plain", "cap and sinks", "e4m3", "images"],
)
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 100])
def test_one_loop_over_the_keys_of_windows(
    window: int, programs: int, dim: int, softcap: float, fp8: bool, images: bool, device: str
) -> None:
    """It gives the bits of the three loops: keys come in the same blocks."""
    rows: Rows = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 64), (2, 2), (3, 50), (8, 33)]
    seen = [(6, 44, 50), (7, 27, 31)] if images else None
    scene = Scene(rows, 4, 2, dim, 8, softcap=softcap, sinks=softcap > 0, fp8=fp8, images=seen)
    tiling = form(16, programs, by_row=True, one_loop=True)
    check(scene, device, tiling, window)
    moved = scene.on(device)
    assert torch.equal(attend(moved, tiling, window), attend(moved, replace(tiling, one_loop=False), window))


@pytest.mark.parametrize(("programs", "split_keys"), [(1, 0), (3, 0), (2, 32)])
@pytest.mark.parametrize("window", [1, 20, 33])
@pytest.mark.parametrize("one_loop", [False, True])
def test_keys_before_the_window_are_not_read(
    one_loop: bool, window: int, programs: int, split_keys: int, device: str
) -> None:
    """They are not numbers here, which a weight of zero would keep."""
    scene = Scene([(1, 64), (1, 70), (3, 90), (1, 5)], 4, 2, 16, 8)
    for row, (queries, context) in enumerate(scene.rows):
        gone = torch.arange(max(0, context - queries + 1 - window))
        for pages in (scene.k_pages, scene.v_pages):
            pages[scene.tables[row][gone // 8].long(), gone % 8] = math.nan
    check(scene, device, form(16, programs, by_row=True, split_keys=split_keys, one_loop=one_loop), window)


@pytest.mark.parametrize("split_keys", [0, 32])
@pytest.mark.parametrize(("heads", "max_query"), [(4, 1), (6, 3)])
def test_partial_results_take_no_more_lines_than_hold_something(
    heads: int, max_query: int, split_keys: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def empty(*sizes: int, **options: Any) -> torch.Tensor:
        made.append(sizes)
        return torch.full(sizes, math.nan, **options)

    scene = Scene([(max_query, 60), (1, 90)], heads, 2, 16, 8)
    out = torch.empty(scene.q.shape, device=device)
    monkeypatch.setattr(torch, "empty", empty)
    moved = scene.on(device)
    tiling = form(16, 3, by_row=True, split_keys=split_keys)
    attend_tiles(moved.q, moved.k_pages, moved.v_pages, out, moved.batch, moved.options(), tiling)
    splits = 90 // 32 + 2 if split_keys else 3
    assert made == [(4, splits, heads // 2 * max_query, 16), (4, splits, heads // 2 * max_query)]
    torch.testing.assert_close(out.cpu().double(), scene.expected(), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(("queries", "shares"), [((9,), 7), ((9, 20), 2), ((9, 30, 30), 1)])
def test_programs_are_dealt_out_to_the_tiles_that_there_are(
    queries: tuple[int, ...], shares: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows there may be: those of a captured graph are as many as its tokens. Tiles have 16 queries."""
    made: list[torch.Tensor] = []

    def empty(*sizes: int, **options: Any) -> torch.Tensor:
        made.append(torch.full(sizes, math.nan, **options))
        return made[-1]

    scene = Scene([(count, 100) for count in queries], 2, 2, 16, 8)
    padded, last = scene.on(device), sum(queries)
    padding = padded.batch.context.new_zeros(40)
    padded.batch = replace(
        padded.batch,
        query_start=torch.cat((padded.batch.query_start, padding + last)),
        context=torch.cat((padded.batch.context, padding)),
        slots=torch.cat((padded.batch.slots, padding)),
    )
    out = torch.empty(scene.q.shape, device=device)
    tiles_of(padded.batch, last, 16, 1)  # which takes memory of its own
    monkeypatch.setattr(torch, "empty", empty)
    attend_tiles(padded.q, padded.k_pages, padded.v_pages, out, padded.batch, padded.options(), form(16, 7))
    partials, weights = made
    assert partials.shape == (2, 7, 16, 16)
    tiles = sum(-(-count // 16) for count in queries)
    held = shares * tiles if shares > 1 else 0
    assert (~weights.isnan().all(2)).sum(1).tolist() == [held, held]
    torch.testing.assert_close(out.cpu().double(), scene.expected(), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, False), (0.0, True), (1.5, True)])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("programs", "split_keys"), [(1, 0), (9, 0), (1, 32), (2, 32)])
@pytest.mark.parametrize("rows", [[(7, 7), (1, 33), (20, 50)], [(1, 5), (1, 40), (1, 64)]], ids=["mixed", "singles"])
def test_softcaps_and_sinks(
    rows: Rows, programs: int, split_keys: int, window: int, softcap: float, sinks: bool, device: str
) -> None:
    """A sink counts once, however many splits a tile's keys have."""
    scene = Scene(rows, 6, 2, 16, 8, softcap=softcap, sinks=sinks)
    check(scene, device, form(16, programs, by_row=rows[0][0] == 1, split_keys=split_keys), window)


@pytest.mark.parametrize("window", [0, 1, 6, 17, 100])
@pytest.mark.parametrize(("programs", "split_keys"), [(1, 0), (16, 0), (1, 32), (2, 32)])
@pytest.mark.parametrize(("block_m", "by_row"), [(16, False), (32, False), (64, True)])
def test_tokens_of_an_image_see_one_another(
    block_m: int, by_row: bool, programs: int, split_keys: int, window: int, device: str
) -> None:
    scene = Scene(PICTURES, 4, 2, 16, 8, images=IMAGES)
    check(scene, device, form(block_m, programs, by_row=by_row, split_keys=split_keys), window)


@pytest.mark.parametrize("split_keys", [0, 32])
def test_an_image_of_many_splits_behind_a_short_window(split_keys: int, device: str) -> None:
    """A tile of the first queries sees many more keys than its window and its own have."""
    check(Scene([(110, 120)], 4, 2, 16, 8, images=[(0, 12, 118)]), device, form(16, 40, split_keys=split_keys), 6)


def test_images_with_softcaps_and_sinks(device: str) -> None:
    scene = Scene(PICTURES, 6, 2, 16, 8, softcap=1.5, sinks=True, images=IMAGES)
    scene.batch = replace(scene.batch, limits=scene.batch.limits.long())
    check(scene, device, form(16, 24), 17)


@pytest.mark.parametrize("window", [0, 40])
def test_images_do_not_change_the_bits_of_other_tokens(window: int, device: str) -> None:
    """Nor does it matter to an image where a chunk before it ended, or whether one did within it (a prefix hit)."""
    scene = Scene([(26, 86)], 2, 1, 16, 16, images=[(0, 64, 78)]).on(device)
    whole = attend(scene, form(32, 1, split_keys=32), window)
    piece = scene.on(device)
    for first, count in ((0, 4), (4, 14), (9, 9), (10, 16), (18, 8), (25, 1)):
        piece.q = scene.q[first : first + count]
        piece.batch = alone(scene, first, count, 60 + first + count, 0)
        for limits in (None, scene.batch.limits[first : first + count])[first in (4, 9, 10) :]:
            piece.batch = replace(piece.batch, limits=limits)
            for tiling in (form(32, 1, split_keys=32, by_row=count <= 16), form(32, 2, split_keys=32)):
                assert torch.equal(attend(piece, tiling, window), whole[first : first + count]), (first, tiling)


def test_padding_has_any_limit(device: str) -> None:
    """A row of a captured graph without keys, and one of the scratch block, read nothing behind their context."""
    scene = Scene([(9, 20)], 4, 2, 16, 8, images=[(0, 13, 19)])
    padded, last = scene.on(device), 9
    padded.k_pages[0, 0], padded.v_pages[0, 0] = 1.0, 2.0
    padded.batch = replace(
        padded.batch,
        slots=torch.tensor([0, 1, 1], dtype=torch.int32, device=device),
        query_start=torch.tensor([0, last, last + 1, last + 2], dtype=torch.int32, device=device),
        context=torch.tensor([20, 0, 1], dtype=torch.int32, device=device),
        block_tables=torch.cat((padded.batch.block_tables, padded.batch.block_tables * 0)),
        limits=torch.cat((padded.batch.limits, padded.batch.limits.new_tensor([30, 30]))),
    )
    padded.q = torch.cat((padded.q, padded.q[:2]))
    found = attend(padded, form(16, 12)).cpu()
    torch.testing.assert_close(found[:last].double(), scene.expected(), atol=3e-6, rtol=1e-5)
    assert torch.equal(found[last], torch.zeros_like(found[last]))
    torch.testing.assert_close(found[last + 1], torch.full_like(found[last + 1], 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [[(1, 70), (9, 65)], [(1, 200), (1, 3)]], ids=["mixed", "singles"])
@pytest.mark.parametrize("window", [0, 48])
def test_half_precision(rows: Rows, window: int, dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies matrices of bfloat16 as if they were integers")
    by_row = rows[0][0] == rows[1][0]
    check(Scene(rows, 4, 2, 64, 16, dtype), device, form(16, 2 if by_row else 8, by_row=by_row, block_n=32), window)


def test_launches_leave_each_others_rows_alone(device: str) -> None:
    """Rows that fit a tile by one launch, longer ones by another: between them every row, and none twice."""
    scene = Scene(MIXED, 4, 2, 16, 16)
    few = attend(scene.on(device), form(by_row=True))  # tiles hold 8 queries
    many = attend(scene.on(device), form(32), shortest=9)
    served = torch.repeat_interleave(torch.tensor([n <= 8 for n, _ in MIXED]), torch.tensor([n for n, _ in MIXED]))
    assert few[~served].isnan().all()
    assert many[served].isnan().all()
    found = torch.where(served[:, None, None], few.cpu(), many.cpu())
    torch.testing.assert_close(found.double(), scene.expected(), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(("by_row", "split_keys"), [(True, 0), (True, 32), (False, 0)])
def test_counters_are_left_zero(by_row: bool, split_keys: int, device: str) -> None:
    scene = Scene(SINGLES, 4, 2, 16, 8)
    moved = scene.on(device)
    arrivals = torch.zeros(64, dtype=torch.int32, device=device)
    moved.batch = replace(moved.batch, arrivals=arrivals)
    for _ in range(2):
        found = attend(moved, form(16, 3 if by_row else 20, by_row=by_row, split_keys=split_keys))
        torch.testing.assert_close(found.cpu().double(), scene.expected(), atol=3e-6, rtol=1e-5)
        assert not arrivals.any()


def test_counters_must_be_enough(device: str) -> None:
    moved = Scene(SINGLES, 4, 2, 16, 8).on(device)
    moved.batch = replace(moved.batch, arrivals=torch.zeros(len(SINGLES), dtype=torch.int32, device=device))
    with pytest.raises(AssertionError):
        attend(moved, form(16, 3, by_row=True))


@pytest.mark.parametrize("programs", [1, 3, 12])
@pytest.mark.parametrize("by_row", [False, True])
def test_rows_without_queries_or_keys(programs: int, by_row: bool, device: str) -> None:
    """Padding: a row without queries costs nothing, one whose context is 0 gives zeros, neighbours are unchanged."""
    scene = Scene([(4, 16), (5, 17), (8, 31)], 4, 2, 16, 8)
    padded, last = scene.on(device), int(scene.batch.query_start[-1])
    starts = [*scene.batch.query_start.tolist(), last, last, last + 1]
    starts.insert(2, starts[1])  # and one in the middle
    nothing = torch.zeros_like(scene.tables)
    tables = torch.cat((scene.tables[:1], nothing[:1], scene.tables[1:], nothing[:3]))
    context = [*scene.batch.context.tolist(), 0, 1, 0]
    context.insert(1, 9)
    padded.batch = replace(
        padded.batch,
        slots=torch.arange(len(tables), dtype=torch.int32, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context=torch.tensor(context, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
    )
    padded.q = torch.cat((padded.q, padded.q[:1]))
    found = attend(padded, form(16, programs, by_row=by_row)).cpu()
    torch.testing.assert_close(found[:last].double(), scene.expected(), atol=3e-6, rtol=1e-5)
    assert torch.equal(found[last:], torch.zeros_like(found[last:]))


def test_a_scratch_row_of_single_queries_harms_nobody(device: str) -> None:
    """What a captured graph pads with: context 1 in the scratch block."""
    scene = Scene(SINGLES, 4, 2, 16, 8)
    padded = scene.on(device)
    padded.k_pages[0], padded.v_pages[0] = 1.0, 2.0
    padded.batch = AttentionBatch(
        query_start=torch.arange(len(SINGLES) + 3, dtype=torch.int32, device=device),
        context=torch.cat((padded.batch.context, padded.batch.context.new_ones(2))),
        slots=torch.cat((padded.batch.slots, padded.batch.slots.new_full((2,), len(SINGLES)))),
        block_tables=torch.cat((padded.batch.block_tables, padded.batch.block_tables[:1] * 0)),
        slot_mapping=padded.batch.slot_mapping,
        max_query=1,
        max_context=40,
    )
    padded.q = torch.cat((padded.q, padded.q[:2]))
    found = attend(padded, form(16, 2, by_row=True)).cpu()
    torch.testing.assert_close(found[:-2].double(), scene.expected(), atol=3e-6, rtol=1e-5)
    assert torch.equal(found[-2:], torch.full_like(found[-2:], 2.0))


def test_bounds_may_be_larger_than_what_there_is(device: str) -> None:
    """A captured graph is cut for the longest context it may meet: programs without a split are harmless."""
    scene = Scene(SINGLES, 4, 2, 16, 8)
    moved = scene.on(device)
    moved.batch = replace(moved.batch, max_context=40960, max_query=4)
    for tiling in (form(16, 12, by_row=True), form(16, 5, by_row=True, split_keys=32)):
        found = attend(moved, tiling).cpu()
        torch.testing.assert_close(found.double(), scene.expected(), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("split_keys", [0, 32])
def test_a_row_does_not_depend_on_its_batch(split_keys: int, device: str) -> None:
    """The same tiling gives the same bits, whatever else is in the launch, unless programs are dealt out to tiles."""
    scene = Scene(MIXED, 4, 2, 16, 16).on(device)
    tiling = form(16, 2 if split_keys else 1, split_keys=split_keys)
    together = attend(scene, tiling)
    for row in (0, 1, 4):
        start, end = scene.batch.query_start[row : row + 2].tolist()
        single = scene.on(device)
        single.q = scene.q[start:end]
        single.batch = alone(scene, start, end - start, int(scene.batch.context[row]), row)
        assert torch.equal(attend(single, tiling), together[start:end])


@pytest.mark.parametrize("window", [0, 40])
def test_fixed_shares_give_a_query_the_same_bits_in_any_chunk(window: int, device: str) -> None:
    """One by one by row, in pieces by tiles, with one program or several: the tile's form and the shares are fixed."""
    rows: Rows = [(26, 86), (1, 33)]
    scene = Scene(rows, 2, 1, 16, 16).on(device)
    whole = attend(scene, form(32, 1, split_keys=32), window)
    assert torch.equal(attend(scene, form(32, 3, split_keys=32), window), whole)
    piece = scene.on(device)
    for first, count in ((0, 1), (1, 8), (9, 17)):
        piece.q = scene.q[first : first + count]
        piece.batch = alone(scene, first, count, 60 + first + count, 0)
        for programs in (1, 2):
            by_row = count <= 16
            found = attend(piece, form(32, programs, split_keys=32, by_row=by_row), window)
            assert torch.equal(found, whole[first : first + count]), (first, programs)


def test_queries_and_tables_may_be_views(device: str) -> None:
    scene = Scene(MIXED, 4, 2, 16, 8)
    wide = torch.full((len(scene.q), 8, 16), 9.0)
    wide[:, :4] = scene.q
    scene.q = wide[:, :4]
    tables = scene.batch.block_tables
    tables = torch.cat((tables, tables), 1)[:, : tables.shape[1]]
    scene.batch = replace(scene.batch, block_tables=tables)
    check(scene, device, form())


def test_a_group_larger_than_a_tile_is_a_mistake(device: str) -> None:
    with pytest.raises(AssertionError, match="17 heads share keys"):
        check(Scene([(1, 4)], 17, 1, 16, 8), device, form())
