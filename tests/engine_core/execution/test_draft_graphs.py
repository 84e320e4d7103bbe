"""Which graphs there are for drafting; what they give on a GPU is tested in test_gpu.py and in the matrix."""

from __future__ import annotations

import pytest

from penstock.engine_core.execution.cuda_graphs import MIXED_MOST, decode_sizes, entry_lengths, graph_sizes
from penstock.engine_core.execution.draft_graphs import LACKED, draft_sizes, turn_lengths, turn_shape

EIGHT = graph_sizes(32, 8_000_000_000, 256, 8192, 4096)
LAYER = 218_000_000  # weights of one of its layers


@pytest.mark.parametrize("weights", [LAYER, 10 * LAYER, 100 * LAYER])
def test_every_row_may_lack_what_rows_lack_as_a_rule(weights: int) -> None:
    sizes = draft_sizes(1, weights, EIGHT)
    assert sizes.mixed[-1] >= LACKED * 256
    assert sizes.decode == sizes.entries == decode_sizes(256)
    assert (sizes.rows, sizes.max_context) == (256, 4096)


def test_prompts_have_graphs_as_far_as_the_host_would_be_the_limit() -> None:
    assert draft_sizes(24, 100_000_000, EIGHT).mixed[-1] == MIXED_MOST
    assert draft_sizes(1, LAYER, EIGHT).mixed[-1] < 2 * graph_sizes(1, LAYER, 256, 8192, 4096).mixed[-1]


@pytest.mark.parametrize("seqs", [1, 5, 8, 100])
def test_few_rows(seqs: int) -> None:
    sizes = draft_sizes(1, 100 * LAYER, graph_sizes(32, 8_000_000_000, seqs, 8192, 4096))
    assert sizes.mixed[-1] >= LACKED * seqs
    assert sizes.entries[-1] == seqs


def test_a_turn_has_the_columns_of_its_inputs_and_entries() -> None:
    assert turn_shape(4).plain
    assert turn_lengths(4) == (*turn_shape(4).lengths(), *entry_lengths(4))
    assert len(turn_lengths(8)) == 11
