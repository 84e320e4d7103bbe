"""What a step gives back: tokens, log-probabilities of outputs and prompts, failed rows, totals.

The two halves, forward.py and sampler.py, with prompts.py and pages.py, are tested through the runner here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.engine_core.execution import step_output as prompts
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.models.decoder import Decoder
from penstock.kernels.records import AttentionBatch
from penstock.protocol.messages import Sampling
from penstock.protocol.outputs import Logprobs
from penstock.protocol.steps import StepPlan
from tests.engine_core.execution.harness import (
    GREEDY,
    LENGTH,
    VOCABULARY,
    Life,
    block_tables,
    column,
    decode,
    prefill,
    tiny_model,
    tiny_runner,
    tiny_spec,
    tokens_of,
)

PROMPT = [5, 17, 2, 88, 40, 40, 61, 3, 9, 33, 21]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


class Poisoned:
    """The tiny model with chosen logits put in place of its own, by the index of the row among all sampled so far."""

    def __init__(self, model: Decoder, rows: dict[int, float]) -> None:
        self.model = model
        self.rows = rows
        self.seen = 0

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch,
        cache: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:  # fmt: skip
        return self.model.forward(input_ids, positions, attention, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.logits(hidden)
        for row in range(len(logits)):
            if self.seen in self.rows:
                logits[row, 7] = self.rows[self.seen]
            self.seen += 1
        return logits


def reference_logits(model: Decoder, ids: Sequence[int]) -> torch.Tensor:
    """Logits at every position of a sequence, run in one piece."""
    spec, count = tiny_spec(), len(ids)
    batch = AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context=torch.tensor([count], dtype=torch.int32),
        slots=torch.zeros(1, dtype=torch.int32),
        block_tables=torch.tensor([[0]], dtype=torch.int32),
        slot_mapping=torch.arange(count),
        max_query=count,
        max_context=count,
    )
    page = torch.zeros(1, LENGTH, spec.attention.kv_heads, spec.attention.head_dim)
    cache = [(page.clone(), page.clone()) for _ in range(spec.layers)]
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(ids, dtype=torch.int32), torch.arange(count), batch, cache))


def columns(logprobs: Logprobs) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    width = logprobs.width
    return (
        np.frombuffer(logprobs.token_ids, "<i4").reshape(-1, width),
        np.frombuffer(logprobs.values, "<f4").reshape(-1, width),
        np.frombuffer(logprobs.ranks, "<i4"),
    )


def check_logprobs(found: Logprobs, logits: torch.Tensor, chosen: Sequence[int], width: int) -> None:
    """Against the raw distribution, position by position."""
    expected = torch.log_softmax(logits.double(), -1)
    ids, values, ranks = columns(found)
    assert ids.shape == (len(chosen), 1 + width)
    assert ids[:, 0].tolist() == list(chosen)
    assert ids[:, 1:].tolist() == logits.topk(width).indices.tolist()
    at = torch.from_numpy(ids.astype(np.int64))
    assert np.allclose(values, expected.gather(1, at).numpy(), atol=1e-4)
    assert ranks.tolist() == [1 + int((row > row[token]).sum()) for row, token in zip(logits, chosen, strict=True)]


def test_sampled_logprobs_are_raw_and_only_of_rows_that_ask(model: Decoder) -> None:
    tables = block_tables(4, 16)
    ways = [
        GREEDY,
        Sampling(temperature=0.5, logprobs=2, logit_bias=((4, 50.0),)),
        Sampling(temperature=0.0, logprobs=0, allowed_token_ids=(11,)),
        Sampling(temperature=1.0, logprobs=2, repetition_penalty=2.0),
    ]
    lives = [Life(PROMPT[: 3 + at], way, slot=at, blocks=tables[at]) for at, way in enumerate(ways)]
    chunks = column(*(number for life in lives for number in (life.slot, 0, len(life.prompt), 1)))
    runner = tiny_runner(model)
    result = runner.collect(
        runner.launch(StepPlan(step=4, epoch=2, starts=tuple(life.start() for life in lives), chunks=chunks))
    )
    assert (result.step, result.epoch) == (4, 2)
    tokens = tokens_of(result)
    assert tokens[1:3] == [4, 11]
    assert sorted(row.row for row in result.logprobs) == [1, 2, 3]
    for row in result.logprobs:
        logits = reference_logits(model, lives[row.row].prompt)[-1:]
        check_logprobs(row.logprobs, logits, [tokens[row.row]], ways[row.row].logprobs)
    assert result.prompt_logprobs == ()


def test_processed_logprobs_are_of_what_tokens_are_drawn_from(model: Decoder) -> None:
    """Beside a row of the same step that wants raw ones."""
    tables = block_tables(4, 16)
    ways = [
        Sampling(temperature=0.5, logprobs=3, logit_bias=((4, 50.0),), processed_logprobs=True),
        Sampling(temperature=0.0, logprobs=3, allowed_token_ids=(11, 12), processed_logprobs=True),
        Sampling(temperature=0.5, logprobs=3, logit_bias=((4, 50.0),)),
    ]
    lives = [Life(PROMPT[:5], way, slot=at, blocks=tables[at]) for at, way in enumerate(ways)]
    chunks = column(*(number for life in lives for number in (life.slot, 0, len(life.prompt), 1)))
    runner = tiny_runner(model)
    result = runner.collect(
        runner.launch(StepPlan(step=4, epoch=2, starts=tuple(life.start() for life in lives), chunks=chunks))
    )
    logits = reference_logits(model, PROMPT[:5])[-1]
    biased = logits.clone()
    biased[4] += 50.0
    narrow = torch.full_like(logits, -torch.inf)
    narrow[[11, 12]] = logits[[11, 12]]
    for row, expected in zip(result.logprobs, (biased / 0.5, narrow, logits), strict=True):
        (ids,), (values,), (rank,) = columns(row.logprobs)
        scores = torch.log_softmax(expected.double(), -1)
        assert ids[0] == tokens_of(result)[row.row]
        assert rank == 1 + int((scores > scores[ids[0]]).sum())
        assert np.allclose(values[1:], scores.topk(3).values, atol=1e-4)
        assert np.isclose(values[0], scores[ids[0]], atol=1e-4)


@pytest.mark.parametrize("budget", [3, 4, 100])
def test_prompt_logprobs_over_chunks(model: Decoder, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(prompts, "CHUNK_BYTES", 2 * 4 * VOCABULARY)  # two positions at a time
    life = Life(PROMPT, Sampling(temperature=0.0, prompt_logprobs=3), slot=1, blocks=block_tables(1, 16)[0])
    other = Life(PROMPT[::-1], GREEDY, slot=2, blocks=range(17, 33))
    runner, logits = tiny_runner(model), reference_logits(model, PROMPT)
    starts, covered = (life.start(), other.start()), []
    for first in range(0, len(PROMPT), budget):
        count = min(budget, len(PROMPT) - first)
        sample = int(first + count == len(PROMPT))
        chunks = column(2, first, count, sample, 1, first, count, sample)
        result = runner.collect(runner.launch(StepPlan(step=0, epoch=0, starts=starts, chunks=chunks)))
        starts = ()
        for row in result.prompt_logprobs:
            assert row.row == 1
            positions = list(range(first + 1, min(first + count + 1, len(PROMPT))))
            check_logprobs(row.logprobs, logits[[at - 1 for at in positions]], [PROMPT[at] for at in positions], 3)
            covered += positions
    assert covered == list(range(1, len(PROMPT)))


def test_prompt_logprobs_end_with_the_prompt(model: Decoder) -> None:
    """What is recomputed of the output has none."""
    life = Life(PROMPT, Sampling(temperature=0.0, prompt_logprobs=0), slot=0, blocks=range(1, 17), output=[1, 2, 3])
    runner = tiny_runner(model)
    plan = StepPlan(step=0, epoch=0, starts=(life.start(),), chunks=column(0, 0, 9, 0))
    (row,) = runner.collect(runner.launch(plan)).prompt_logprobs
    assert len(columns(row.logprobs)[2]) == 9
    (row,) = runner.collect(runner.launch(StepPlan(step=0, epoch=0, chunks=column(0, 9, 5, 1)))).prompt_logprobs
    assert len(columns(row.logprobs)[2]) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_failed_row_leaves_its_neighbours_alone(model: Decoder, bad: float) -> None:
    ways = [GREEDY, Sampling(temperature=0.9, logprobs=1, presence_penalty=0.3), Sampling(temperature=0.8)]

    def run(poison: dict[int, float]) -> tuple[list[Life], Runner]:
        tables = block_tables(3, 16)
        lives = [Life(PROMPT, way, slot=at, seed=at, blocks=tables[at]) for at, way in enumerate(ways)]
        options = RunnerOptions(
            device=torch.device("cpu"), dtype=torch.float32, blocks=48, block_size=8, max_model_len=LENGTH,
            max_num_seqs=3,
        )  # fmt: skip
        runner = Runner(Poisoned(model, poison), tiny_spec(), options)
        prefill(runner, lives)
        decode(runner, lives, 6)  # the failed row's surplus steps included
        return lives, runner

    good, _ = run({})
    failed, runner = run({3 + 1: bad})  # row 1 of the first decode step
    assert failed[1].output[:2] == [good[1].output[0], -1]
    assert all(0 <= token < VOCABULARY for token in failed[1].output[2:])
    assert [failed[0].output, failed[2].output] == [good[0].output, good[2].output]
    assert runner.statistics().failed == 1


def test_a_failed_row_has_no_logprobs(model: Decoder) -> None:
    life = Life(PROMPT, Sampling(temperature=0.0, logprobs=1), blocks=range(1, 17))
    options = RunnerOptions(torch.device("cpu"), torch.float32, 16, 8, LENGTH, 1)
    runner = Runner(Poisoned(model, {0: float("nan")}), tiny_spec(), options)
    chunks = column(0, 0, len(PROMPT), 1)
    result = runner.collect(runner.launch(StepPlan(step=0, epoch=0, starts=(life.start(),), chunks=chunks)))
    assert tokens_of(result) == [-1]
    assert result.logprobs == ()


def test_what_a_failed_request_left_in_the_pages_reaches_nobody(model: Decoder) -> None:
    """Its blocks, full of NaN, go to the next request, whose rows are padded beside a longer one."""

    def run(poison: bool) -> list[list[int]]:
        runner = tiny_runner(model)
        if poison:
            for pages in runner._forward._cache:
                for tensor in pages:
                    tensor.fill_(float("nan"))
        lives = [Life(PROMPT * 3, GREEDY, slot=0, blocks=range(1, 17)), Life([4], GREEDY, slot=1, blocks=range(17, 33))]
        prefill(runner, lives, 16)
        decode(runner, lives, 10)
        return [life.output for life in lives]

    assert run(True) == run(False)


def test_tokens_until_the_full_length_and_one_surplus_step(model: Decoder) -> None:
    life = Life([1] * (LENGTH - 2), GREEDY, blocks=range(1, 17))
    runner = tiny_runner(model)
    prefill(runner, [life])  # samples position LENGTH - 2
    decode(runner, [life], 2)  # position LENGTH - 1, and the surplus one beyond the end
    assert len(life.output) == 3


def test_blocks_come_as_they_are_needed(model: Decoder) -> None:
    whole = Life(PROMPT, GREEDY, slot=2, blocks=range(1, 17))
    runner = tiny_runner(model)
    prefill(runner, [whole])
    decode(runner, [whole], 20)
    runner = tiny_runner(model)
    lives = [Life(PROMPT, GREEDY, slot=2, blocks=[40, 30]), Life(PROMPT, GREEDY, slot=5, blocks=[41, 31])]
    prefill(runner, lives)
    more = {16: (2, 20, 5, 21), 24: (5, 11, 2, 10, 2, 12, 5, 13)}  # several of a slot at once, slots in any order
    on = column(2, 5)
    for step in range(20):
        blocks = column(*more.get(len(PROMPT) + step, ()))
        result = runner.collect(runner.launch(StepPlan(step=step, epoch=0, blocks=blocks, decode_on=on)))
        on = b""
        for life, token in zip(lives, tokens_of(result), strict=True):
            life.output.append(token)
    assert [life.output for life in lives] == [whole.output, whole.output]


def test_empty_plans_and_plans_that_sample_nothing(model: Decoder) -> None:
    runner = tiny_runner(model)
    assert tokens_of(runner.collect(runner.launch(StepPlan(step=1, epoch=0)))) == []
    life = Life(PROMPT, GREEDY, blocks=range(1, 17))
    plan = StepPlan(step=2, epoch=0, starts=(life.start(),), chunks=column(0, 0, 4, 0))
    assert tokens_of(runner.collect(runner.launch(plan))) == []
    statistics = runner.statistics()
    assert (statistics.steps, statistics.tokens, statistics.sampled, statistics.rejected) == (2, 4, 0, 0)


def test_reset_forgets_who_decodes(model: Decoder) -> None:
    runner = tiny_runner(model)
    life = Life(PROMPT, GREEDY, blocks=range(1, 17))
    prefill(runner, [life])
    runner.launch(StepPlan(step=0, epoch=0, decode_on=column(0)))
    runner.reset()
    assert tokens_of(runner.collect(runner.launch(StepPlan(step=1, epoch=1)))) == []


def test_a_slot_that_starts_again_forgets_what_it_held(model: Decoder) -> None:
    """Its decoding, its sampling and its blocks, though its neighbours stay the same."""
    runner = tiny_runner(model)
    first = [
        Life(PROMPT, Sampling(temperature=0.0, allowed_token_ids=(1,), logprobs=1), slot=0, blocks=range(1, 17)),
        Life(PROMPT, GREEDY, slot=1, blocks=range(17, 33)),
    ]
    prefill(runner, first)
    runner.collect(runner.launch(StepPlan(step=0, epoch=0, decode_on=column(0, 1))))
    again = Life(PROMPT, GREEDY, slot=0, blocks=[50, 51])
    chunks = column(0, 0, len(PROMPT), 1)
    plan = StepPlan(step=1, epoch=0, starts=(again.start(),), chunks=chunks)
    result = runner.collect(runner.launch(plan))
    assert result.logprobs == ()
    assert tokens_of(result)[1] == first[1].output[0]
    assert runner._slots.block_tables[0].tolist() == [50, 51] + [0] * 14
