"""An encoder's requests: whole prompts in one step, no blocks, nothing kept."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.messages import Pooling, Rejected, Sampling, SubmitTokens
from penstock.protocol.step_columns import chunk_table
from penstock.protocol.steps import RowVector, StepPlan, StepResult

OPTIONS = SchedulingOptions(
    blocks=0, block_size=4, max_model_len=16, max_num_seqs=4, max_num_batched_tokens=16, vocab_size=100, encoder=True,
    prefix_caching=False,
)  # fmt: skip
MEAN = Pooling(kind="mean", param="input[1]")


def submit(scheduler: Scheduler, number: int, length: int, pooling: Pooling | None = MEAN) -> None:
    tokens = np.arange(length, dtype=np.int32).tobytes()
    scheduler.submit(
        SubmitTokens(id=number, token_ids=tokens, sampling=Sampling(max_tokens=1), pooling=pooling), 0, 0.0
    )


def counts(plan: StepPlan | None) -> list[int]:
    """Positions of each chunk, all of which begin at the beginning, sample nothing and have no blocks."""
    assert plan is not None
    table = chunk_table(plan.chunks)
    assert (table[:, 1] == 0).all()
    assert (table[:, 3] == 0).all()
    assert not plan.blocks
    assert not any(start.blocks for start in plan.starts)
    return [int(count) for count in table[:, 2]]


def result(plan: StepPlan) -> StepResult:
    vectors = tuple(RowVector(row, np.ones(2, np.float32).tobytes()) for row in range(len(chunk_table(plan.chunks))))
    return StepResult(step=plan.step, epoch=plan.epoch, token_ids=b"", vectors=vectors)


def test_a_prompt_waits_for_a_step_with_room_for_all_of_it() -> None:
    scheduler = Scheduler(OPTIONS)
    for number, length in enumerate((7, 8, 2, 16, 1)):
        submit(scheduler, number, length)
    first = scheduler.plan(0.0)
    assert counts(first) == [7, 8], "two tokens more would have been cut, and nobody overtakes"
    second = scheduler.plan(0.0)
    assert counts(second) == [2]
    third = scheduler.plan(0.0)
    assert counts(third) == [16]
    assert scheduler.plan(0.0) is None, "every slot is taken"
    for plan in (first, second, third):
        assert plan is not None
        scheduler.apply(result(plan), 1.0)
    last = scheduler.plan(1.0)
    assert counts(last) == [1]
    assert last is not None
    scheduler.apply(result(last), 2.0)
    assert not scheduler.unfinished
    assert scheduler.check(thorough=True).ok


def test_a_group_that_starts_again_computes_them_again() -> None:
    scheduler = Scheduler(OPTIONS)
    submit(scheduler, 1, 16)
    before = scheduler.plan(0.0)
    assert before is not None
    scheduler.restart(5, 1.0, blocks=0)
    again = scheduler.plan(1.0)
    assert counts(again) == [16]
    assert again is not None
    scheduler.apply(result(again), 2.0)
    assert not scheduler.unfinished
    assert not [message for message in scheduler.outputs(0) if isinstance(message, Rejected)]


@pytest.mark.parametrize(("length", "pooling", "words"), [(17, MEAN, "limit"), (3, None, "no text")])
def test_what_is_rejected(length: int, pooling: Pooling | None, words: str) -> None:
    scheduler = Scheduler(OPTIONS)
    submit(scheduler, 1, length, pooling)
    (rejected,) = scheduler.outputs(0)
    assert isinstance(rejected, Rejected)
    assert rejected.status == 400
    assert words in rejected.message
    assert scheduler.plan(0.0) is None


def test_a_step_has_room_for_the_longest_prompt() -> None:
    with pytest.raises(AssertionError, match="fits one step"):
        SchedulingOptions(
            blocks=0, block_size=4, max_model_len=17, max_num_seqs=4, max_num_batched_tokens=16, vocab_size=9,
            encoder=True,
        )  # fmt: skip
