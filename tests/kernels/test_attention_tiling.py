"""Which form is chosen: by sizes alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from penstock.kernels.attention_device import launches
from penstock.kernels.attention_schedule import most_tiles
from penstock.kernels.attention_tiling import (
    INVARIANT_SPLIT_KEYS,
    MAX_INVARIANT_SPLITS,
    MAX_PROGRAMS,
    MIN_SPLIT_KEYS,
    PARTIAL_BYTES,
    Shape,
    Tiling,
    invariant_split_keys,
    invariant_tiling,
    low_tiling,
    partial_bytes,
    power_of_2,
    rows,
    tall_tiling,
    wants_split_k,
)
from penstock.kernels.chip import CHIPS, Chip
from penstock.protocol.errors import ConfigError
from tests.kernels.scene import Rows

BATCHES: tuple[Rows, ...] = (
    *([(queries, 5000)] * count for queries in (1, 4, 16, 64, 500, 5000) for count in (1, 64)),
    [(1, 100), (500, 500)],
)
COUNTS = (1, 8, 32, 33, 256)  # rows of a batch
H200 = CHIPS["sm_90"]


def shape(rows: Rows, window: int = 0, heads: int = 32, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Shape:
    counts, contexts = [n for n, _ in rows], [n for _, n in rows]
    return Shape(len(rows), sum(counts), max(counts), max(contexts), heads, 8, dim, dtype, window)


def low(rows: Rows, window: int = 0, heads: int = 32) -> Tiling:
    return low_tiling(shape(rows, window, heads), max(n for n, _ in rows), H200)


def test_few_long_rows_are_split_and_many_are_not() -> None:
    assert low([(1, 8192)]).programs == 16
    assert low([(1, 1 << 20)]).programs <= MAX_PROGRAMS
    assert low([(1, 8192)] * 256).programs == 1
    assert low([(1, 64)]).programs == 1
    assert low([(1, 8192)], window=MIN_SPLIT_KEYS - 1).programs == 1
    assert tall_tiling(shape([(8192, 8192)]), H200).programs == 1


def test_programs_of_short_chunks_follow_no_bound_of_tiles() -> None:
    """A graph has room for as many rows as tokens, most of which are never there."""
    for batch in ([(16, 32768)], [(16, 8192)] + [(1, 100)] * 47, [(1, 8192)] * 64):
        assert tall_tiling(shape(batch), H200).programs == 33
    assert tall_tiling(shape([(255, 8192)]), H200).programs == 33
    assert tall_tiling(shape([(16, 32768)], heads=64), H200).programs == 33
    assert tall_tiling(shape([(300, 8192)]), H200).programs == 1
    assert tall_tiling(shape([(16, 200)]), H200).programs == 1
    assert tall_tiling(replace(shape([(16, 32768)]), kv_heads=32), replace(H200, num_sms=10)).programs == 1


def test_few_rows_fill_the_device_too() -> None:
    """A graph is cut for its batch size with the longest context that it may meet."""
    for count in (1, 2, 4, 8, 16, 32, 64, 256):
        programs = low([(1, 40960)] * count).programs * count * 8
        assert programs > H200.num_sms * 0.9, count


def small(rows: int, window: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int, int, bool]:
    """Keys of an iteration, warps and stages of a batch of single queries, whether they are one loop."""
    form = low_tiling(shape([(1, 8192)] * rows, window, dim=dim, dtype=dtype), 1, H200)
    return form.block_n, form.warps, form.stages, form.one_loop


def test_windows_of_single_queries_have_tiles_of_their_own() -> None:
    assert small(64, 128, 64) == (64, 2, 5, True)
    assert small(64, 128, 128) == (64, 2, 4, True)
    assert small(64, 128, 256) == (32, 2, 4, True)
    assert small(64, 1024, 256) == (32, 2, 4, True)
    assert small(256, 128, 256) == (32, 2, 4, True)
    assert small(8, 128, 256) == small(1, 128, 256) == (64, 4, 3, True)  # fewer programs than processors
    assert small(8, 1024, 256) == (32, 2, 4, True)
    assert small(1, 128, 128) == (128, 4, 3, True)
    assert small(64, 128, 256, torch.float8_e4m3fn) == (64, 2, 3, True)
    assert small(64, 0, 256) == (64, 4, 3, False)


def test_only_windows_of_few_queries_are_one_loop() -> None:
    """A batch-invariant result has the same loops in any batch."""
    for window, queries, count in product((0, 100, 1000), (1, 4, 8, 500), COUNTS):
        one = shape([(queries, 5000)] * count, window)
        by_row, chunks, _ = launches(one, True, H200)
        assert not any(form.one_loop for form in (by_row, chunks) if form is not None)
        by_row, chunks, _ = launches(one, False, H200)
        assert chunks is None or not chunks.one_loop
        assert by_row is None or by_row.one_loop == (window > 0 and by_row.block_m == 16)


def test_short_chunks_that_see_much_are_cut_and_others_are_not() -> None:
    assert wants_split_k(shape([(32, 4096)]), H200)
    assert wants_split_k(shape([(128, 4224)]), H200)
    assert not wants_split_k(shape([(128, 8192)] * 2), H200)
    assert not wants_split_k(shape([(100, 100)]), H200)
    assert not wants_split_k(shape([(512, 8192)]), H200)


def test_the_queries_of_a_row_are_packed_into_one_tile() -> None:
    assert low([(1, 100)] * 8).block_m == 16
    assert low([(1, 100), (4, 100)]).block_m == 16
    assert low([(8, 100), (1, 100)]).block_m == 64
    assert low([(1, 100)], heads=8 * 71).block_m == 128  # a group must fit
    assert low([(1, 100)]).by_row


def test_tokens_of_a_small_graph_may_be_of_one_row() -> None:
    """So programs are dealt out to the rows that there are, unless each row has many of its own anyway."""
    graph = replace(shape([(1, 8192)] * 16), max_query=16)
    by_row, dealt, shortest = launches(graph, False, H200)
    assert by_row is None
    assert dealt is not None
    assert dealt.dealt
    assert shortest == 1
    for other in (
        replace(graph, max_query=8),  # the rows of a verification
        shape([(8, 8192)] * 8),
        replace(graph, max_context=1000),
        replace(graph, kv_heads=2, heads=8),
    ):
        by_row, dealt, _ = launches(other, False, H200)
        assert by_row is not None
        assert dealt is None


def test_tiles_are_tall_where_rows_have_many_queries() -> None:
    assert tall_tiling(shape([(1, 100), (500, 500)]), H200).block_m == 64
    assert tall_tiling(shape([(1, 100), (5000, 5000)]), H200).block_m == 128
    assert tall_tiling(shape([(30, 100)], heads=8 * 71), H200).block_m == 128


def test_what_orders_the_arithmetic_of_the_invariant_form_follows_from_the_heads_alone() -> None:
    forms = [
        invariant_tiling(shape(rows, window), H200)
        for rows in ([(1, 5)], [(1, 9000)] * 3, [(1, 700)] * 256, [(5000, 9000), (1, 4)], [(16, 300)], [(17, 300)])
        for window in (0, 1000)
    ]
    assert len({(form.block_m, form.block_n, form.split_keys, form.warps, form.stages) for form in forms}) == 1
    assert forms[0].split_keys == INVARIANT_SPLIT_KEYS
    assert INVARIANT_SPLIT_KEYS % forms[0].block_n == 0
    assert {form.programs for form in forms} != {1}
    assert {form.by_row for form in forms} == {True, False}
    wide = invariant_tiling(shape([(1, 9000)], dtype=torch.float32), H200)
    assert wide.split_keys == INVARIANT_SPLIT_KEYS
    assert wide.block_n < forms[0].block_n
    assert INVARIANT_SPLIT_KEYS % max(row.block_n for row in rows()) == 0


def test_partial_results_of_the_invariant_form_are_bounded_whatever_the_longest_sequence() -> None:
    """Of a million keys they were 16.6 GB. Shares follow from the server's longest sequence, never from the batch."""
    assert [invariant_split_keys(longest) for longest in (0, 4096, 65536)] == [INVARIANT_SPLIT_KEYS] * 3
    assert invariant_split_keys(65537) == 2 * INVARIANT_SPLIT_KEYS
    for longest, dim, heads in product((1 << 17, 1_000_000, 10_000_000), (128, 512), (8, 64, 256)):
        batches = [
            [(queries, context)] * count for queries in (1, 8, 500) for count in COUNTS for context in (100, longest)
        ]
        shapes = [replace(shape(batch, heads=heads, dim=dim), longest=longest) for batch in batches]
        forms = [invariant_tiling(one, H200) for one in shapes]
        assert len({(form.block_m, form.block_n, form.split_keys) for form in forms}) == 1
        assert longest / forms[0].split_keys <= MAX_INVARIANT_SPLITS
        assert forms[0].split_keys % forms[0].block_n == 0
        assert max(map(stored, shapes, forms)) <= PARTIAL_BYTES


def stored(shape: Shape, form: Tiling) -> int:
    """Bytes of fp32 parts, by the definition: a line of `dim` numbers and one more for each split of each tile."""
    if form.programs == 1:
        return 0
    queries = form.block_m // shape.group
    tiles = shape.rows if form.by_row else most_tiles(shape.rows, shape.tokens, queries, 1)
    lines = min(queries, shape.max_query) * shape.group if form.by_row else form.block_m
    splits = -(-shape.reach // form.split_keys) + 1 if form.split_keys else form.programs
    tiles = 1 if form.dealt else tiles
    return 4 * tiles * shape.kv_heads * splits * lines * (shape.dim + 1)


def test_partial_results_of_any_form_take_less_than_a_gigabyte_at_a_million_keys() -> None:
    for chip, dim, heads in product(CHIPS.values(), (64, 128, 256, 512), (8, 64)):
        for queries, count in product((1, 4, 700, 5000), COUNTS):
            one = replace(shape([(queries, 1_000_000)] * count, heads=heads, dim=dim), longest=1_000_000)
            for form in (low_tiling(one, queries, chip) if queries < 8 else None, tall_tiling(one, chip)):
                assert form is None or stored(one, form) <= 256 << 20


def test_one_program_to_a_tile_where_partial_results_would_take_too_much() -> None:
    one = replace(shape([(16, 1_000_000)] * 16, dim=512), longest=1_000_000)
    form = invariant_tiling(one, H200)
    assert form.programs == 1
    assert partial_bytes(one, replace(form, programs=2), 16) > PARTIAL_BYTES
    assert invariant_tiling(replace(one, rows=1, tokens=16), H200).programs > 1


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_heads_are_served_within_the_shared_memory(chip: Chip, dtype: torch.dtype, dim: int) -> None:
    """Keys and values of an iteration, the queries, the weights. Only groups of 64 of the widest heads need more."""
    for group, batch, invariant, window in product((1, 3, 4, 5, 7, 12, 16, 64), BATCHES, (False, True), (0, 128)):
        if group == 64 and dim * dtype.itemsize > 512 and chip.shared_memory < 200 << 10:
            continue
        one = shape(batch, window, 8 * group, dim, dtype)
        by_row, chunks, _ = launches(one, invariant, chip)
        for form in filter(None, (by_row, chunks)):
            held = (2 * form.block_n + form.block_m) * power_of_2(dim) * dtype.itemsize
            assert held <= chip.shared_memory, form
            assert form.block_n >= 16
            assert form.block_m >= group


def test_low_tiles_leave_room_for_another() -> None:
    """Wide heads in large tiles are fastest on a chip that has room for two of them, in small ones on others."""
    wide = shape([(1, 8192)] * 64, dim=256)
    assert low_tiling(wide, 1, H200).block_n == 64
    assert low_tiling(wide, 1, CHIPS["sm_89"]).block_n == 16
    assert low_tiling(wide, 1, CHIPS["sm_80"]).block_n == 64


def test_heads_that_no_chip_has_room_for_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"576 is not allowed.*heads may have 512 numbers"):
        low_tiling(shape([(1, 100)], dim=576), 1, H200)
    with pytest.raises(ConfigError, match=r"64 heads.*101376 bytes of shared memory of NVIDIA L4"):
        tall_tiling(shape([(90, 100)], heads=8 * 64, dim=512, dtype=torch.float32), CHIPS["sm_89"])


def test_tiles_of_an_h200_are_those_that_measured_best() -> None:
    def form(tiling: Tiling) -> tuple[int, ...]:
        return tiling.block_m, tiling.block_n, tiling.warps, tiling.stages

    many = [(1, 2048)] * 64
    assert form(low(many)) == (16, 64, 2, 4)
    assert form(low([(1, 2048)])) == (16, 128, 4, 3)
    assert form(low([(8, 2048)] * 64)) == (64, 64, 4, 4)
    assert form(tall_tiling(shape([(500, 500)]), H200)) == (64, 64, 4, 3)
    assert form(tall_tiling(shape([(5000, 5000)]), H200)) == (128, 128, 8, 3)
    assert form(invariant_tiling(shape(many), H200)) == (64, 64, 4, 3)
    assert form(low_tiling(shape(many, dim=512), 1, H200)) == (16, 32, 4, 3)


def test_powers_of_2() -> None:
    assert [power_of_2(n) for n in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]
