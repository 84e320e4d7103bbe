"""Slot tables under a plan's diffs, and a step's rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.engine_core.execution import input_batch as execution_slots
from penstock.engine_core.execution.input_batch import SlotSizes, SlotTable, offsets
from penstock.engine_core.execution.transfer import Upload
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import SlotStart, StepPlan
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


def decoding(slots: SlotTable) -> list[int]:
    return [int(slot) for slot in slots.rows(plan()).slots]


def test_offsets_count_within_each() -> None:
    assert offsets(np.array([3, 0, 1, 2])).tolist() == [0, 1, 2, 0, 0, 1]
    assert offsets(np.zeros(0, np.int64)).tolist() == []


def test_starts_fill_tokens_blocks_and_prompts(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(2, [7, 8, 9], 2, [5]), start(0, [1], 1, [6, 3]))))
    assert slots.history.tokens[2, :3].tolist() == [7, 8, 9]
    assert slots.history.tokens[0, 0] == 1
    assert slots.history.known[[2, 0]].tolist() == [3, 1]
    assert slots.block_tables[2].tolist() == [5, 0, 0, 0, 0]
    assert slots.block_tables[0].tolist() == [6, 3, 0, 0, 0]
    assert slots.parameters.sampling.prompt_tokens[[2, 0]].tolist() == [2, 1]
    assert slots.prompt_tokens[[2, 0]].tolist() == [2, 1]


def test_every_group_has_a_table() -> None:
    """Columns come with a block of each group, 0 where one was given back; a start clears all tables of its slot."""
    slots = SlotTable(replace(SIZES, groups=3), Upload(torch.device("cpu")))
    slots.apply(plan(starts=(start(1, [1, 2, 3, 4, 5], 5, [4, 0, 5, 6, 7, 8]),), blocks=column(1, 9, 10, 11)))
    first, second, third = slots.group_tables
    assert first[1].tolist() == [4, 6, 9, 0, 0]
    assert second[1].tolist() == [0, 7, 10, 0, 0]
    assert third[1].tolist() == [5, 8, 11, 0, 0]
    slots.apply(plan(blocks=column(1, 12, 13, 14, 2, 15, 16, 17)))
    assert [table[1, 3].item() for table in slots.group_tables] == [12, 13, 14]
    assert [table[2, 0].item() for table in slots.group_tables] == [15, 16, 17]
    slots.apply(plan(starts=(start(1, [6], 1, [20, 21, 22]),)))
    assert [table[1].tolist() for table in slots.group_tables] == [[20 + group, 0, 0, 0, 0] for group in range(3)]


def test_a_start_leaves_nothing_of_what_was_there(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(1, [1, 2, 3, 4, 5], 3, [9, 8, 7], PENALISED),), decode_on=column(1)))
    slots.apply(plan(starts=(start(1, [6], 1, [4], PENALISED),)))
    assert slots.block_tables[1].tolist() == [4, 0, 0, 0, 0]
    assert slots.history.counts[1].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert slots.history.known[1] == 1
    assert decoding(slots) == []


def test_blocks_are_appended_in_order(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(1, [1], 1, [9]), start(3, [1], 1, []))))
    slots.apply(plan(blocks=column(3, 2, 1, 8, 3, 4, 1, 7, 3, 6)))
    slots.apply(plan(blocks=column(1, 5)))
    assert slots.block_tables[1].tolist() == [9, 8, 7, 5, 0]
    assert slots.block_tables[3].tolist() == [2, 4, 6, 0, 0]


def test_a_slot_starts_and_grows_in_one_plan(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(1, [1], 1, [9, 8]),)))
    slots.apply(plan(starts=(start(1, [1], 1, [3]),), blocks=column(1, 4)))
    assert slots.block_tables[1].tolist() == [3, 4, 0, 0, 0]


def test_blocks_bound_the_keys_of_a_row(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(1, [1], 1, [9, 8, 7]), start(3, [1], 1, [4])), decode_on=column(3)))
    assert slots.longest(slots.rows(plan())) == 4
    assert slots.longest(slots.rows(plan(chunks=column(1, 0, 1, 1)))) == 12


def test_rows_are_decoding_slots_ascending_then_chunks_in_order(slots: SlotTable) -> None:
    slots.apply(plan(starts=tuple(start(slot, [slot] * 6, 6, [slot + 1, slot + 6]) for slot in range(4))))
    slots.apply(plan(decode_on=column(3, 1)))
    rows = slots.rows(plan(chunks=column(2, 0, 3, 0, 0, 0, 6, 1)))
    assert rows.slots.tolist() == [1, 3, 2, 0]
    assert rows.decoding == 2
    assert rows.query_start.tolist() == [0, 1, 2, 5, 11]
    assert rows.entry_slots.tolist() == [1, 3, 0]


def test_the_decode_set_persists_and_costs_nothing_while_it_does(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(0, [1, 2], 2, [1, 2]), start(1, [1, 2, 3], 3, [3, 4]))))
    slots.apply(plan(decode_on=column(1, 0)))
    before = slots.rows(plan())
    assert before.slots.tolist() == [0, 1]
    slots.apply(plan(blocks=column(0, 7)))
    assert slots.rows(plan()) is before
    slots.apply(plan(decode_off=column(0)))
    assert decoding(slots) == [1]
    slots.apply(plan(decode_on=column(0)))
    assert decoding(slots) == [0, 1]
    slots.reset()
    assert decoding(slots) == []


def test_switched_off_started_and_switched_on_in_one_plan(slots: SlotTable) -> None:
    """A slot that one request leaves and another enters with a single position left to compute."""
    slots.apply(plan(starts=(start(0, [1, 2], 2, [1]),), decode_on=column(0)))
    again = SlotStart(
        slot=0, token_ids=column(4, 5, 6), prompt_tokens=3, computed=2, blocks=column(3), sampling=GREEDY, seed=0
    )
    slots.apply(plan(decode_off=column(0), starts=(again,), decode_on=column(0)))
    assert decoding(slots) == [0]
    assert slots.history.known[0] == 3
    assert slots.block_tables[0].tolist() == [3, 0, 0, 0, 0]


def test_counts_follow_prompt_and_output(slots: SlotTable) -> None:
    slots.apply(plan(starts=(start(2, [1, 1, 2, 3, 1, 3], 3, [1], PENALISED), start(1, [4], 1, [2]))))
    assert slots.history.counts[2].tolist() == [0, 3, 1, 4, 0, 0, 0, 0, 0, 0]
    assert slots.history.counts[1].tolist() == [0] * 10  # nobody asks


@pytest.mark.gpu
def test_a_gpus_tables_are_a_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first changes are launched, the others replay a graph, and one is too large for it."""
    monkeypatch.setattr(execution_slots, "PLACE", 64)
    sampled = Sampling(temperature=0.5, top_k=3, logit_bias=((1, 2.0),), frequency_penalty=0.5)
    plans = [
        plan(starts=(start(0, [1, 2, 3], 3, [5]), start(2, [4], 1, [6]))),
        plan(starts=(start(1, [9, 8], 1, [7], sampled),), blocks=column(0, 11, 2, 12, 0, 13)),
        plan(blocks=column(2, 14)),
        plan(starts=tuple(start(slot, list(range(slot, slot + 8)), 8, [slot + 1, slot + 5]) for slot in range(4))),
        plan(starts=(start(3, [5], 1, [2], sampled),), blocks=column(3, 4)),
    ]
    tables = [SlotTable(SIZES, Upload(torch.device(device))) for device in ("cpu", "cuda")]
    for one in plans:
        for table in tables:
            table.apply(one)
        cpu, gpu = tables
        assert torch.equal(cpu.block_tables, gpu.block_tables.cpu())
        assert torch.equal(cpu.history.tokens, gpu.history.tokens.cpu())
        assert torch.equal(cpu.history.counts, gpu.history.counts.cpu())
        assert torch.equal(cpu.parameters.numbers, gpu.parameters.numbers.cpu())
