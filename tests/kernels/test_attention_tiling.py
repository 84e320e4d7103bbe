"""Which form is chosen: by sizes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.kernels.attention_tiling import (
    INVARIANT_SPLIT_KEYS,
    MAX_INVARIANT_SPLITS,
    MAX_PROGRAMS,
    MIN_SPLIT_KEYS,
    Shape,
    Tiling,
    invariant_split_keys,
    invariant_tiling,
    low_tiling,
    power_of_2,
    tall_tiling,
    wants_split_k,
)
from tests.kernels.scene import Rows

NUM_SMS = 132
SHARED_MEMORY = 227 << 10  # bytes that a program has on Hopper


def shape(rows: Rows, window: int = 0, heads: int = 32, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Shape:
    counts, contexts = [n for n, _ in rows], [n for _, n in rows]
    return Shape(len(rows), sum(counts), max(counts), max(contexts), heads, 8, dim, dtype, window)


def low(rows: Rows, window: int = 0, heads: int = 32) -> Tiling:
    return low_tiling(shape(rows, window, heads), max(n for n, _ in rows), NUM_SMS)


def test_few_long_rows_are_split_and_many_are_not() -> None:
    assert low([(1, 8192)]).programs == 16
    assert low([(1, 1 << 20)]).programs <= MAX_PROGRAMS
    assert low([(1, 8192)] * 256).programs == 1
    assert low([(1, 64)]).programs == 1
    assert low([(1, 8192)], window=MIN_SPLIT_KEYS - 1).programs == 1
    assert tall_tiling(shape([(8192, 8192)]), NUM_SMS).programs == 1
    assert tall_tiling(shape([(16, 32768)]), NUM_SMS).programs > 1


def test_few_rows_fill_the_device_too() -> None:
    """A graph is cut for its batch size with the longest context that it may meet."""
    for rows in (1, 2, 4, 8, 16, 32, 64, 256):
        programs = low([(1, 40960)] * rows).programs * rows * 8
        assert programs > NUM_SMS * 0.9, rows


def test_short_chunks_that_see_much_are_cut_and_others_are_not() -> None:
    assert wants_split_k(shape([(32, 4096)]), NUM_SMS)
    assert wants_split_k(shape([(128, 4224)]), NUM_SMS)
    assert not wants_split_k(shape([(128, 8192)] * 2), NUM_SMS)
    assert not wants_split_k(shape([(100, 100)]), NUM_SMS)
    assert not wants_split_k(shape([(512, 8192)]), NUM_SMS)


def test_the_queries_of_a_row_are_packed_into_one_tile() -> None:
    assert low([(1, 100)] * 8).block_m == 16
    assert low([(1, 100), (4, 100)]).block_m == 16
    assert low([(8, 100), (1, 100)]).block_m == 64
    assert low([(1, 100)], heads=8 * 71).block_m == 128  # a group must fit
    assert low([(1, 100)]).by_row


def test_tiles_are_tall_where_rows_have_many_queries() -> None:
    assert tall_tiling(shape([(1, 100), (500, 500)]), NUM_SMS).block_m == 64
    assert tall_tiling(shape([(1, 100), (5000, 5000)]), NUM_SMS).block_m == 128
    assert tall_tiling(shape([(30, 100)], heads=8 * 71), NUM_SMS).block_m == 128


def test_what_orders_the_arithmetic_of_the_invariant_form_follows_from_the_heads_alone() -> None:
    forms = [
        invariant_tiling(shape(rows, window), NUM_SMS)
        for rows in ([(1, 5)], [(1, 9000)] * 3, [(1, 700)] * 256, [(5000, 9000), (1, 4)], [(16, 300)], [(17, 300)])
        for window in (0, 1000)
    ]
    assert len({(form.block_m, form.block_n, form.split_keys, form.warps, form.stages) for form in forms}) == 1
    assert forms[0].split_keys == INVARIANT_SPLIT_KEYS
    assert INVARIANT_SPLIT_KEYS % forms[0].block_n == 0
    assert {form.programs for form in forms} != {1}
    assert {form.by_row for form in forms} == {True, False}
    wide = invariant_tiling(shape([(1, 9000)], dtype=torch.float32), NUM_SMS)
    assert wide.split_keys == INVARIANT_SPLIT_KEYS
    assert wide.block_n < forms[0].block_n


def test_partial_results_of_the_invariant_form_are_bounded_whatever_the_longest_sequence() -> None:
    """Of a million keys they were 16.6 GB. Shares follow from the server's longest sequence, never from the batch."""
    assert [invariant_split_keys(longest) for longest in (0, 4096, 65536)] == [INVARIANT_SPLIT_KEYS] * 3
    assert invariant_split_keys(65537) == 2 * INVARIANT_SPLIT_KEYS
    for longest in (1 << 17, 1_000_000, 10_000_000):
        batches = [[(1, context)] * rows for rows in (1, 8, 32, 33, 256) for context in (100, longest)]
        forms = [invariant_tiling(replace(shape(rows), longest=longest), NUM_SMS) for rows in batches]
        assert len({form.split_keys for form in forms}) == 1
        assert longest / forms[0].split_keys <= MAX_INVARIANT_SPLITS
        assert forms[0].split_keys % forms[0].block_n == 0
        for rows, form in zip(batches, forms, strict=True):
            places = longest // form.split_keys + 2
            floats = len(rows) * 8 * places * form.block_m * 128 if form.programs > 1 else 0
            assert 4 * floats < 1.2e9, (longest, len(rows))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [[(1, 100)], [(16, 100)], [(500, 500)], [(5000, 5000)]], ids=str)
@pytest.mark.parametrize("choose", [tall_tiling, invariant_tiling, lambda shape, count: low_tiling(shape, 1, count)])
def test_a_tile_fits_the_shared_memory(rows: Rows, dtype: torch.dtype, dim: int, choose: object) -> None:
    """Keys and values of one turn are held at most twice, and the queries once."""
    assert callable(choose)
    for heads in (8, 32, 256):
        tiling = choose(shape(rows, 0, heads, dim, dtype), NUM_SMS)
        held = (4 * tiling.block_n + tiling.block_m) * dim * dtype.itemsize
        assert held <= SHARED_MEMORY, tiling
        assert tiling.block_n >= 16
        assert tiling.block_m >= heads // 8


def test_powers_of_2() -> None:
    assert [power_of_2(n) for n in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]
