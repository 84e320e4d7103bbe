from __future__ import annotations

import numpy as np

from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.state import Drafts, new_state
from tests.sim.idle import is_clean

OPTIONS = SchedulingOptions(
    blocks=7, block_size=4, max_model_len=16, max_num_seqs=3, max_num_batched_tokens=8, vocab_size=9, epoch=5
)


def test_a_new_state_is_empty_and_as_large_as_its_options_say() -> None:
    state = new_state(OPTIONS)
    assert state.epoch == 5
    assert state.kv.pool.available == state.kv.pool.total == 7
    assert state.kv.pool.prefix is state.kv.prefix
    assert state.slots.free == 3
    assert state.microbatches.decoding.shape == (1, 3)
    assert len(state.kv.owners) == 8
    maps = (state.requests, state.outboxes, state.kv.in_flight_prefixes)
    parts = (*maps, state.prefilling, state.steps.in_flight, state.queue, state.kv.fence)
    assert [len(part) for part in parts] == [0] * 7
    assert is_clean(state.stop_tokens)


def test_a_source_has_one_outbox() -> None:
    state = new_state(OPTIONS)
    assert state.outboxes[3] is state.outboxes[3]
    assert state.outboxes[3] is not state.outboxes[4]


def test_a_row_has_an_entry_more_than_it_has_drafts() -> None:
    drafts = Drafts(np.array([1, 3]), np.array([2, 1]), [[5, 6], [7]], np.zeros(2, np.bool_))
    assert drafts.total == 3
    assert drafts.sizes(5).tolist() == [1, 3, 1, 2, 1]
