"""Steps over scratch: they run, have the size they promise, and leave requests alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from penstock.engine_core.execution.cuda_graphs import MIXED_MOST
from penstock.engine_core.execution.dummy_runs import FAR, largest_step, long_context_steps, mixed_steps, warmup_steps
from penstock.engine_core.execution.input_batch import SlotSizes
from penstock.kernels.attention_device import launches
from penstock.kernels.attention_hopper import form_of, forms_of
from penstock.kernels.attention_tiling import Shape
from penstock.kernels.chip import CHIPS
from penstock.protocol.step_columns import integers
from tests.engine_core.execution.harness import (
    GREEDY,
    LENGTH,
    VOCABULARY,
    Life,
    decode,
    prefill,
    tiny_model,
    tiny_runner,
    tokens_of,
)


@pytest.mark.parametrize(("slots", "length", "tokens"), [(8, 128, 100), (8, 128, 300), (4, 16, 1000), (8, 128, 8)])
def test_worst_step_fills_budget_and_slots(slots: int, length: int, tokens: int) -> None:
    plan = largest_step(SlotSizes(slots, length, 8, VOCABULARY), tokens)
    chunks = integers(plan.chunks).reshape(-1, 4)
    assert len(chunks) == min(slots, tokens)
    assert (chunks[:, 0] == slots).all()
    assert chunks[:, 3].all()
    assert chunks[:, 2].sum() == min(tokens, slots * length)
    assert chunks[:, 2].max() <= length
    assert len(integers(plan.starts[0].token_ids)) == chunks[:, 2].max()


@pytest.mark.parametrize(("slots", "length"), [(256, 1 << 20), (8, 128), (1, 16)])
def test_late_steps_reach_the_longest_context_with_keys_cut(slots: int, length: int) -> None:
    """What few rows take at the end of the longest sequence is measured, too: partial results of its shares."""
    plans = long_context_steps(SlotSizes(slots, length, 16, VOCABULARY))
    for plan in plans:
        chunks = integers(plan.chunks).reshape(-1, 4)
        assert (chunks[:, 0] == slots).all()
        assert (chunks[:, 1] == length - 1).all()
        assert (chunks[:, 2] == 1).all()
    rows = [len(integers(plan.chunks)) // 4 for plan in plans]
    assert rows == sorted({min(count, slots) for count in (1, 8, 32)})
    if slots == 256:
        shapes = [Shape(count, count, 1, length, 32, 8, 128, torch.bfloat16, 0, length) for count in rows]
        assert all(launches(shape, True, CHIPS["sm_90"])[0].programs > 1 for shape in shapes)  # type: ignore[union-attr]


@pytest.mark.parametrize(("slots", "length", "tokens"), [(256, 4096, 8192), (8, 128, 100), (1, 16, 8), (4, 2, 4)])
def test_crowded_steps_keep_within_slots_length_and_budget(slots: int, length: int, tokens: int) -> None:
    plans = mixed_steps(SlotSizes(slots, length, 16, VOCABULARY), tokens)
    found = [integers(plan.chunks).reshape(-1, 4)[:, 2] for plan in plans]
    assert all(0 < len(counts) <= slots and counts.sum() <= tokens and counts.max() <= length for counts in found)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (64, 8), (8, 8), (8, 1), (32, 2)])
def test_crowded_steps_take_every_form_that_a_large_step_takes(heads: int, kv_heads: int) -> None:
    """Of a step that no graph holds, on a GPU of 132 processors. Which form is a question of sizes alone."""

    def forms(counts: Sequence[int]) -> set[tuple[object, ...]]:
        shape = Shape(len(counts), sum(counts), max(counts), max(counts), heads, kv_heads, 128, torch.bfloat16)
        by_row, _, _ = launches(shape, False, CHIPS["sm_90"])
        if by_row is None:
            return set()
        return {(by_row.block_m, by_row.block_n, by_row.warps, by_row.programs > 1, max(counts) == 1)}

    plans = mixed_steps(SlotSizes(256, 8192, 16, VOCABULARY), 8192)
    compiled = set().union(*(forms(integers(plan.chunks).reshape(-1, 4)[:, 2].tolist()) for plan in plans))
    chance = random.Random(0)
    for _ in range(3000):
        rows = min(256, round(2 ** chance.uniform(0, 8)))
        if chance.random() < 0.5:
            counts = [max(1, min(8192 // rows, round(2 ** chance.uniform(0, 13))))] * rows
        else:
            counts = [chance.randint(1, 8192 - rows)] + [1] * (rows - 1)
        if sum(counts) > MIXED_MOST:
            assert forms(counts) <= compiled, counts


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (64, 8), (8, 8), (8, 1), (32, 2)])
def test_crowded_steps_have_a_chunk_of_few_tiles(heads: int, kv_heads: int) -> None:
    """It takes another form of the chunk kernel, which no other step compiles where there are no graphs."""
    plans = mixed_steps(SlotSizes(256, 8192, 16, VOCABULARY), 8192)
    chunks = [integers(plan.chunks).reshape(-1, 4)[:, 2].tolist() for plan in plans]
    alone = [counts[0] for counts in chunks if len(counts) == 1]
    forms = {form_of(128, 0, kv_heads * -(-count * heads // kv_heads // 128), 132) for count in alone}
    assert forms_of(128)[1] in forms


@pytest.mark.parametrize("length", [1, 2, 128, 4096])
def test_warm_steps_reach_every_form_within_the_length(length: int) -> None:
    """A chunk beside a token, a long one, one token behind many, one token; no position that does not exist is read."""
    plans = warmup_steps(SlotSizes(8, length, 16, VOCABULARY), 300)
    chunks = [integers(plan.chunks).reshape(-1, 4)[:, 1:3].tolist() for plan in plans]
    assert chunks == [[[0, min(8, length)], [0, 1]], [[0, min(300, length)]], [[min(FAR, length) - 1, 1]], [[0, 1]]]
    assert plans[-1].starts[0].sampling == GREEDY  # what the scratch slot keeps
    for plan, parts in zip(plans, chunks, strict=True):
        assert len(integers(plan.starts[0].token_ids)) == max(first + count for first, count in parts)
        assert len(integers(plan.starts[0].blocks)) * 16 >= max(first + count for first, count in parts)


def test_trials_touch_no_request() -> None:
    model = tiny_model()
    expected = Life([3, 1, 4], GREEDY, blocks=range(1, 17))
    runner = tiny_runner(model)
    prefill(runner, [expected])
    decode(runner, [expected], 4)

    life = Life([3, 1, 4], GREEDY, blocks=range(1, 17))
    runner = tiny_runner(model)
    prefill(runner, [life])
    for plan in (largest_step(runner.sizes, 200), *warmup_steps(runner.sizes, 100)):
        tokens = tokens_of(runner.collect(runner.launch(plan)))
        assert tokens
        assert min(tokens) >= 0
    decode(runner, [life], 4)
    assert life.output == expected.output
    assert runner.sizes.max_model_len == LENGTH
