"""A plan's `drafting` as columns."""

from __future__ import annotations

import numpy as np

from penstock.engine_core.execution.draft_model import draft_rows
from penstock.engine_core.execution.input_batch import input_columns
from penstock.kernels.records import DECODING
from tests.engine_core.execution.harness import column

MIXED = column(
    2, -2, 2, 4, 0,
    5, -1, 1, 1, 1,
    7, -9, 9, 3, 1,
    3, 16, 8, 0, 0,
    1, 0, 6, 4, 0,
)  # fmt: skip


def test_first_run_what_the_draft_model_lacks() -> None:
    rows = draft_rows(MIXED)
    first = rows.first
    assert first.query_start.tolist() == [0, 2, 3, 12, 20, 26]
    assert first.slots.tolist() == [2, 5, 7, 3, 1]
    assert first.starts.tolist() == [-2, -1, -9, 16, 0]
    assert first.last.tolist() == [1, 2, 11, 25], "a chunk that does not sample has no drafts"
    assert (first.draft_ids < 0).all()
    assert (first.tokens, first.rows, first.entries, first.longest, first.plain) == (26, 5, 4, 9, False)


def test_then_each_row_that_has_drafts_runs_one_token_a_turn() -> None:
    rows = draft_rows(MIXED)
    assert rows.turns == 4
    assert rows.turn.slots.tolist() == rows.turn.entry_slots.tolist() == [2, 5, 7, 1]
    assert set(rows.turn.starts.tolist()) == {DECODING}
    assert rows.turn.plain


def test_drafts_of_masked_rows_are_told() -> None:
    rows = draft_rows(MIXED)
    assert (rows.told.tolist(), rows.told_counts.tolist()) == ([5, 7], [1, 3])


def test_to_keep_up_takes_no_turn() -> None:
    rows = draft_rows(column(3, 0, 8, 0, 0))
    assert (rows.turns, rows.turn.rows, rows.first.entries, len(rows.told)) == (0, 0, 0, 0)


def test_columns_can_be_sent() -> None:
    rows = draft_rows(column(2, -2, 2, 4, 1, 5, -1, 1, 1, 0))
    for part in (rows.first, rows.turn):
        assert all(one.dtype == np.int32 and one.flags.c_contiguous for one in input_columns(part))
    assert all(one.flags.writeable for one in input_columns(rows.first))
    assert draft_rows(column(2, -1, 1, 4, 0, 5, -1, 1, 1, 0)).first.plain
