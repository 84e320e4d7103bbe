"""A step's rows as columns, and columns in a packed buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engine_core.execution.input_batch import (
    Column,
    HostRows,
    Packing,
    chunked_rows,
    decode_rows,
    drafted_rows,
    entry_columns,
    entry_padding,
    input_columns,
    input_padding,
    mixed_rows,
    step_inputs,
)
from penstock.kernels.records import DECODING, NO_DRAFT, NO_MASK
from penstock.protocol.steps import NO_STATE, StepPlan
from tests.engine_core.execution.harness import column


def slots(*numbers: int) -> Column:
    return np.array(numbers, np.int32)


def lists(columns: tuple[Column, ...]) -> list[list[int]]:
    return [[int(number) for number in one] for one in columns]


def all_columns(rows: HostRows) -> list[list[int]]:
    return lists((*input_columns(rows), *entry_columns(rows, None)))


def test_decoding_rows_are_one_token_and_one_entry_each() -> None:
    rows = decode_rows(slots(2, 5, 9))
    query_start, row_slots, starts, draft_ids, kept, last = lists(input_columns(rows))
    assert (query_start, row_slots, starts) == ([0, 1, 2, 3], [2, 5, 9], [DECODING] * 3)
    assert (draft_ids, kept, last) == ([NO_DRAFT] * 3, [], [0, 1, 2])
    entry_start, entry_slots, depth, drafts, masks = lists(entry_columns(rows, None))
    assert (entry_start, entry_slots, depth) == ([0, 1, 2, 3], [2, 5, 9], [0, 0, 0])
    assert (drafts, masks) == ([NO_DRAFT] * 3, [NO_MASK] * 3)
    assert (rows.tokens, rows.rows, rows.entries, rows.longest, rows.plain) == (3, 3, 3, 1, True)


def test_mixed_rows_without_chunks_or_drafts_are_decoding_rows() -> None:
    decoding = slots(1, 4)
    assert all_columns(mixed_rows(decoding, StepPlan(step=1, epoch=1))) == all_columns(decode_rows(decoding))


def test_no_rows_at_all() -> None:
    for rows in (decode_rows(slots()), mixed_rows(slots(), StepPlan(step=1, epoch=1))):
        assert (rows.tokens, rows.rows, rows.entries, rows.longest) == (0, 0, 0, 0)


def test_chunks_follow_in_order_and_sample_when_told() -> None:
    plan = StepPlan(step=1, epoch=1, chunks=column(7, 10, 3, 0, 2, 0, 4, 1, 6, 5, 1, 1))
    rows = mixed_rows(slots(1, 3), plan)
    assert rows.query_start.tolist() == [0, 1, 2, 5, 9, 10]
    assert rows.slots.tolist() == [1, 3, 7, 2, 6]
    assert rows.starts.tolist() == [DECODING, DECODING, 10, 0, 5]
    assert rows.last.tolist() == [0, 1, 8, 9]
    assert rows.entry_slots.tolist() == [1, 3, 2, 6]
    assert rows.entry_start.tolist() == [0, 1, 2, 3, 4]
    assert (rows.decoding, rows.longest, rows.plain) == (2, 4, False)


def test_single_tokens_that_all_sample_are_plain_whatever_they_are() -> None:
    chunk = StepPlan(step=1, epoch=1, chunks=column(7, 10, 1, 1))
    assert mixed_rows(slots(1), chunk).plain
    assert not mixed_rows(slots(1), StepPlan(step=1, epoch=1, chunks=column(7, 10, 1, 0))).plain


def test_drafts_are_tokens_of_their_row_and_entries_that_follow_each_other() -> None:
    plan = StepPlan(
        step=1, epoch=1, drafts=column(3, 2, 8, 1), draft_ids=column(50, 51, 60), chunks=column(7, 10, 2, 1)
    )
    rows = mixed_rows(slots(1, 3, 8, 9), plan)
    assert rows.query_start.tolist() == [0, 1, 4, 6, 7, 9]
    assert rows.draft_ids.tolist() == [-1, -1, 50, 51, -1, 60, -1, -1, -1]
    assert rows.last.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert rows.entry_start.tolist() == [0, 1, 4, 6, 7, 8]
    assert rows.entry_slots.tolist() == [1, 3, 3, 3, 8, 8, 9, 7]
    assert rows.depth.tolist() == [0, 0, 1, 2, 0, 1, 0, 0]
    assert rows.drafts.tolist() == [-1, 50, 51, -1, 60, -1, -1, -1]
    assert rows.longest == 3


def test_a_chunk_has_the_places_of_its_states_at_the_tokens_before_them() -> None:
    keep = column(7, 128, 5, NO_STATE, 1, 64, 6, NO_STATE, 2, 64, 8, 0, 7, 192, 9, NO_STATE)
    for drafts, ids, first in ((b"", b"", 2), (column(3, 1), column(50), 3)):
        plan = StepPlan(
            step=1, epoch=1, chunks=column(7, 100, 92, 0, 2, 60, 8, 1), keep=keep, drafts=drafts, draft_ids=ids
        )
        rows = mixed_rows(slots(1, 3), plan)
        assert len(rows.kept) == rows.tokens
        assert {at - first: place for at, place in enumerate(rows.kept.tolist()) if place != NO_STATE} == {
            27: 5, 91: 9, 92 + 3: 8,
        }, "those of a row that decodes are kept behind the step"  # fmt: skip
    assert not len(mixed_rows(slots(1, 3), StepPlan(step=1, epoch=1, keep=column(1, 64, 6, NO_STATE))).kept)


@pytest.mark.parametrize("seed", range(20))
def test_columns_of_any_plan_agree_with_each_other(seed: int) -> None:
    chance = np.random.default_rng(seed)
    order = chance.permutation(16)
    decoding = np.sort(order[: chance.integers(0, 8)]).astype(np.int32)
    drafted = [(int(slot), int(chance.integers(1, 5))) for slot in decoding if chance.random() < 0.5]
    chunks = [(int(slot), 0, int(chance.integers(1, 6)), int(chance.integers(2))) for slot in order[8:12]]
    ids = np.arange(sum(count for _, count in drafted), dtype="<i4") + 100
    plan = StepPlan(
        step=1, epoch=1, drafts=column(*np.ravel(drafted).astype(int)), draft_ids=ids.tobytes(),
        chunks=column(*np.ravel(chunks)),
    )  # fmt: skip
    rows = mixed_rows(decoding, plan)
    assert rows.draft_ids[rows.draft_ids >= 0].tolist() == ids.tolist()
    assert rows.tokens == rows.query_start[-1] == len(decoding) + len(ids) + sum(chunk[2] for chunk in chunks)
    assert rows.entries == rows.entry_start[-1] == len(decoding) + len(ids) + sum(chunk[3] for chunk in chunks)
    for entry, (token, depth, draft) in enumerate(
        zip(rows.last.tolist(), rows.depth.tolist(), rows.drafts.tolist(), strict=True)
    ):
        row = int(np.searchsorted(rows.query_start, token, side="right")) - 1
        assert rows.slots[row] == rows.entry_slots[entry]
        assert (rows.draft_ids[token] >= 0) == (depth > 0)
        follows = entry + 1 < rows.entries and rows.depth[entry + 1] == depth + 1
        assert draft == (rows.draft_ids[token + 1] if follows else NO_DRAFT)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_without_drafts_has_the_rows_of_one_with_none(seed: int) -> None:
    chance = np.random.default_rng(seed)
    order = chance.permutation(16)
    decoding = np.sort(order[: chance.integers(0, 8)]).astype(np.int32)
    ends = chance.integers(1, 6, (chance.integers(0, 5), 3))
    chunks = [(int(slot), *map(int, end[:2]), int(end[2]) % 2) for slot, end in zip(order[8:], ends, strict=False)]
    plan = StepPlan(step=1, epoch=1, chunks=column(*np.ravel(chunks).astype(int)))
    quick, general = chunked_rows(decoding, plan), drafted_rows(decoding, plan)
    assert all_columns(quick) == all_columns(general)
    assert (quick.decoding, quick.longest, quick.plain) == (general.decoding, general.longest, general.plain)
    for given in (*input_columns(quick), *entry_columns(quick, None)):
        assert given.dtype == np.int32
        assert given.flags.c_contiguous, "they go up as they are"
        assert given.flags.writeable


def test_masks_stand_beside_their_entries() -> None:
    rows = decode_rows(slots(2, 5))
    assert entry_columns(rows, slots(7, NO_MASK))[-1].tolist() == [7, -1]


def test_packed_columns_are_padded_with_what_is_harmless() -> None:
    rows = mixed_rows(slots(1), StepPlan(step=1, epoch=1, chunks=column(3, 0, 4, 1)))
    scratch = 99
    packing = Packing((9, 8, 8, 32, 32, 8))
    lengths = (5, 4, 4, 8, 8, 3)
    packed = torch.zeros(packing.size, dtype=torch.int32)
    given = packing.pack(input_columns(rows), lengths, input_padding(rows, scratch))
    packed[: len(given)] = torch.from_numpy(given)
    inputs = step_inputs(packing.views(packed, lengths))
    assert inputs.rows.query_start.tolist() == [0, 1, 5, 5, 5]  # rows without tokens
    assert inputs.rows.slots.tolist() == [1, 3, 99, 99]
    assert inputs.rows.starts.tolist() == [DECODING, 0, 0, 0]
    assert inputs.rows.draft_ids.tolist() == [NO_DRAFT] * 8
    assert inputs.rows.kept is not None
    assert inputs.rows.kept.tolist() == [NO_STATE] * 8
    assert inputs.last.tolist() == [0, 4, 0]
    packing = Packing((4, 3, 3, 3, 3))
    lengths = (4, 3, 3, 3, 3)
    given = packing.pack(entry_columns(rows, None), lengths, entry_padding(rows, scratch))
    assert [view.tolist() for view in packing.views(torch.from_numpy(given), lengths)] == [
        [0, 1, 2, 2], [1, 3, 99], [0, 0, 0], [NO_DRAFT] * 3, [NO_MASK] * 3,
    ]  # fmt: skip


def test_columns_begin_on_lines_of_sixteen_bytes() -> None:
    packing = Packing((5, 1, 7))
    assert packing.size == 8 + 4 + 8
    views = list(packing.views(torch.arange(packing.size, dtype=torch.int32), (5, 1, 7)))
    assert [int(view[0]) for view in views] == [0, 8, 12]
