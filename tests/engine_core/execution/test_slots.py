"""Slot tables under a plan's diffs, and a step's rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_core.execution.slots import SlotSizes, SlotTable, offsets
from engine_core.execution.transfer import Upload
from kernels.sampling import Penalties
from protocol.messages import Sampling
from protocol.steps import SlotStart, StepPlan
from tests.engine_core.execution.harness import GREEDY, column

SIZES = SlotSizes(max_num_seqs=4, max_model_len=20, block_size=4, vocabulary=10)
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.2)


@pytest.fixture
def slots() -> SlotTable:
    return SlotTable(SIZES, Upload(torch.device("cpu")))


def start(slot: int, tokens: list[int], prompt: int, blocks: list[int], sampling: Sampling = GREEDY) -> SlotStart:
    return SlotStart(
        slot=slot, token_ids=column(*tokens), prompt_tokens=prompt, computed=0, blocks=column(*blocks),
        sampling=sampling, seed=0,
    )  # fmt: skip


def plan(**columns: bytes | tuple[SlotStart, ...]) -> StepPlan:
    return StepPlan(step=1, epoch=1, **columns)  # type: ignore[arg-type]


def test_offsets_count_within_each() -> None:
    assert offsets(np.array([3, 0, 1, 2])).tolist() == [0, 1, 2, 0, 0, 1]
    assert offsets(np.zeros(0, np.int64)).tolist() == []


def test_starts_fill_tokens_blocks_and_prompts(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(2, [7, 8, 9], 2, [5]), start(0, [1], 1, [6, 3]))))
    assert slots.tokens[2, :3].tolist() == [7, 8, 9]
    assert slots.tokens[0, 0] == 1
    assert slots.block_tables[2].tolist() == [5, 0, 0, 0, 0]
    assert slots.block_tables[0].tolist() == [6, 3, 0, 0, 0]
    assert slots.history.prompts[[2, 0]].tolist() == [2, 1]
    assert slots.version == 1


def test_a_start_leaves_nothing_of_what_was_there(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(1, [1, 2, 3, 4, 5], 3, [9, 8, 7], PENALISED),), decode_on=column(1)))
    slots.apply(plan(starts=(start(1, [6], 1, [4], PENALISED),)))
    assert slots.block_tables[1].tolist() == [4, 0, 0, 0, 0]
    assert slots.counts[1].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert slots.rows(plan()).slots.tolist() == []


def test_blocks_are_appended_in_order_on_both_sides(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(1, [1], 1, [9]), start(3, [1], 1, []))))
    slots.apply(plan(blocks=column(3, 2, 1, 8, 3, 4, 1, 7, 3, 6)))
    slots.apply(plan(blocks=column(1, 5)))
    assert slots.block_tables[1].tolist() == [9, 8, 7, 5, 0]
    assert slots.block_tables[3].tolist() == [2, 4, 6, 0, 0]
    rows = slots.rows(plan(chunks=column(3, 0, 12, 0, 1, 11, 2, 0)))
    assert rows.cache_places.tolist() == [*range(8, 12), *range(16, 20), *range(24, 28), 7 * 4 + 3, 5 * 4]


def test_rows_are_decoding_slots_ascending_then_chunks_in_order(slots: SlotTable) -> None:
    starts = tuple(start(slot, [slot] * 6, 6, [slot + 1, slot + 6]) for slot in range(4))
    slots.apply(plan(starts=starts))
    slots.rows(plan(chunks=column(*(number for slot in (3, 1) for number in (slot, 0, 6, 1)))))
    slots.apply(plan(decode_on=column(3, 1)))
    rows = slots.rows(plan(chunks=column(2, 0, 3, 0, 0, 0, 6, 1)))
    assert rows.slots.tolist() == [1, 3, 2, 0]
    assert rows.decoding == 2
    assert rows.counts.tolist() == [1, 1, 3, 6]
    assert rows.context.tolist() == [7, 7, 3, 6]
    assert rows.sampled.tolist() == [0, 1, 3]
    assert rows.positions.tolist() == [6, 6, 0, 1, 2, *range(6)]
    assert rows.token_places.tolist() == [21 + 6, 63 + 6, 42, 43, 44, *range(6)]
    assert rows.cache_places.tolist()[:5] == [7 * 4 + 2, 9 * 4 + 2, 12, 13, 14]


def test_decoding_slots_advance_by_themselves_until_switched_off(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(0, [1, 2], 2, [1, 2]), start(1, [1, 2, 3], 3, [3, 4]))))
    slots.rows(plan(chunks=column(0, 0, 2, 1, 1, 0, 3, 1)))
    slots.apply(plan(decode_on=column(1, 0)))
    assert slots.rows(plan()).positions.tolist() == [2, 3]
    slots.apply(plan())
    assert slots.rows(plan()).positions.tolist() == [3, 4]
    slots.apply(plan(decode_off=column(0)))
    assert slots.rows(plan()).positions.tolist() == [5]
    slots.apply(plan(decode_on=column(0)))
    assert slots.rows(plan()).positions.tolist() == [4, 6]
    slots.reset()
    assert slots.rows(plan()).positions.tolist() == []


def test_switched_off_started_and_switched_on_in_one_plan(slots: SlotTable) -> None:
    """A slot that one request leaves and another enters with a single position left to compute."""
    slots.apply(plan(starts=(start(0, [1, 2], 2, [1]),), decode_on=column(0)))
    again = SlotStart(
        slot=0, token_ids=column(4, 5, 6), prompt_tokens=3, computed=2, blocks=column(3), sampling=GREEDY, seed=0
    )
    slots.apply(plan(decode_off=column(0), starts=(again,), decode_on=column(0)))
    rows = slots.rows(plan())
    assert (rows.positions.tolist(), rows.cache_places.tolist()) == ([2], [14])


def test_counts_follow_prompt_output_and_sampled_tokens(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(2, [1, 1, 2, 3, 1, 3], 3, [1], PENALISED), start(1, [4], 1, [2]))))
    assert slots.counts[2].tolist() == [0, 3, 1, 4, 0, 0, 0, 0, 0, 0]
    assert slots.counts[1].tolist() == [0] * 10  # nobody asks
    ones = torch.ones(1)
    penalties = Penalties(torch.tensor([1]), torch.tensor([2]), ones, ones, ones)
    slots.write(torch.tensor([21 + 1, 42 + 6]), torch.tensor([7, 3], dtype=torch.int32), penalties)
    assert slots.tokens[1, 1] == 7
    assert slots.tokens[2, 6] == 3
    assert slots.counts[2].tolist() == [0, 3, 1, 6, 0, 0, 0, 0, 0, 0]


def test_a_row_without_a_token_writes_a_harmless_one(slots: SlotTable) -> None:
    slots.write(torch.tensor([3]), torch.tensor([-1], dtype=torch.int32), None)
    assert slots.tokens[0, 3] == 0
