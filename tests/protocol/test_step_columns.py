"""Tables of a plan are read as they were written, without a copy."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.protocol.step_columns import (
    adapter_table,
    block_table,
    chunk_positions,
    chunk_table,
    draft_table,
    drafting_table,
    integers,
    keep_table,
)


@pytest.mark.parametrize(
    ("read", "width"),
    [(block_table, 2), (chunk_table, 4), (draft_table, 2), (drafting_table, 5), (keep_table, 4), (adapter_table, 2)],
)
def test_a_table_has_its_columns(read, width):
    rows = np.arange(3 * width, dtype="<i4").reshape(3, width)
    column = rows.tobytes()
    found = read(column)
    assert found.tolist() == rows.tolist()
    assert np.shares_memory(found, np.frombuffer(column, np.uint8))
    assert read(b"").shape == (0, width)


def test_positions_of_chunks_are_added():
    chunks = np.array([(0, 5, 7, 1), (3, 0, 2, 0)], "<i4").tobytes()
    assert chunk_positions(chunks) == 9
    assert chunk_positions(b"") == 0


def test_a_column_that_is_cut_is_no_table():
    assert integers(b"\1\0\0\0").tolist() == [1]
    with pytest.raises(ValueError, match="reshape"):
        chunk_table(bytes(12))
