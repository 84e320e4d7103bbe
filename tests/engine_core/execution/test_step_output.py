"""Vectors of slots that pool: kinds, chunks, what is kept and forgotten, and the message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.engine_core.execution.model_runner import Runner
from penstock.engine_core.execution.step_output import CHUNK, Output, Vectors, vector_rows
from penstock.engine_core.models.decoder import Decoder
from penstock.protocol.messages import Pooling
from penstock.protocol.steps import StepPlan, StepResult
from tests.engine_core.execution.harness import (
    VOCABULARY,
    Life,
    block_tables,
    column,
    prefill,
    tiny_model,
    tiny_runner,
    tokens_of,
)

PROMPT = (5, 17, 2, 88, 40, 40, 61, 3, 9, 33, 21)
KINDS = ("mean", "last", "cls", "logits")
TOKENS = (7, 0, 96)

Vector = NDArray[np.float32]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


def pooling_of(kind: str) -> Pooling:
    return Pooling(kind=kind, tokens=TOKENS if kind == "logits" else ())


def run(
    runner: Runner, lives: Sequence[tuple[Life, Pooling | None]], *, starts: bool, first: int, count: int
) -> StepResult:
    """One chunk of each, which samples where it ends a prompt that generates."""
    ends = [int(first + count == len(life.prompt) and pooling is None) for life, pooling in lives]
    rows = [(life.slot, first, count, end) for (life, _), end in zip(lives, ends, strict=True)]
    begun = tuple(replace(life.start(), pooling=pooling) for life, pooling in lives) if starts else ()
    plan = StepPlan(step=1, epoch=0, starts=begun, chunks=np.array(rows, "<i4").tobytes())
    return runner.collect(runner.launch(plan))


def vectors(result: StepResult) -> dict[int, Vector]:
    return {part.row: np.frombuffer(part.values, np.float32) for part in result.vectors}


def lives_of(kinds: Sequence[str | None], prompt: Sequence[int] = PROMPT) -> list[tuple[Life, Pooling | None]]:
    tables = block_tables(len(kinds), 4)
    return [
        (Life(prompt, slot=slot, blocks=tables[slot]), None if kind is None else pooling_of(kind))
        for slot, kind in enumerate(kinds)
    ]


def reference(model: Decoder, prompt: Sequence[int] = PROMPT) -> torch.Tensor:
    """Hidden states behind the final norm: what a step of the whole prompt gives to each position's `last`."""
    rows = []
    for length in range(1, len(prompt) + 1):
        result = run(tiny_runner(model), lives_of(["last"], prompt[:length]), starts=True, first=0, count=length)
        rows.append(torch.from_numpy(vectors(result)[0].copy()))
    return torch.stack(rows)  # [tokens, hidden]


@pytest.mark.parametrize("cut", [11, 6, 1])
def test_every_kind_for_any_cut_of_the_prompt(model: Decoder, cut: int) -> None:
    runner, lives, result = tiny_runner(model), lives_of(KINDS), None
    for first in range(0, len(PROMPT), cut):
        assert result is None or not result.vectors, "a vector comes with the chunk that ends its prompt"
        result = run(runner, lives, starts=first == 0, first=first, count=min(cut, len(PROMPT) - first))
    assert result is not None
    found, states = vectors(result), reference(model)
    assert result.token_ids == b""
    assert [len(found[row]) for row in range(4)] == [32, 32, 32, 3]
    assert np.allclose(found[0], states.mean(0), rtol=1e-4, atol=1e-5)
    assert np.allclose(found[1], states[-1], rtol=1e-4, atol=1e-5)
    assert np.allclose(found[2], states[0], rtol=1e-4, atol=1e-5)
    assert np.allclose(found[3], model.logits(states[-1:])[0, list(TOKENS)], rtol=1e-4, atol=1e-5)


def test_those_that_generate_are_not_touched(model: Decoder) -> None:
    alone = tiny_runner(model)
    writer = Life(PROMPT, slot=2, blocks=block_tables(3, 4)[2])
    prefill(alone, [writer])
    mixed = lives_of(["mean", "logits", None])
    result = run(tiny_runner(model), mixed, starts=True, first=0, count=len(PROMPT))
    assert tokens_of(result) == writer.output
    assert set(vectors(result)) == {0, 1}


def test_vectors_do_not_depend_on_their_neighbours(model: Decoder) -> None:
    one = vectors(run(tiny_runner(model), lives_of(["mean"]), starts=True, first=0, count=len(PROMPT)))[0]
    many = run(tiny_runner(model), lives_of(["last", "mean", "cls", "mean"]), starts=True, first=0, count=len(PROMPT))
    assert np.allclose(vectors(many)[1], one, rtol=1e-5, atol=1e-6)
    assert np.allclose(vectors(many)[3], one, rtol=1e-5, atol=1e-6)


def test_a_new_request_in_a_slot_finds_nothing_of_the_last(model: Decoder) -> None:
    runner, lives = tiny_runner(model), lives_of(["mean", "cls"])
    run(runner, lives, starts=True, first=0, count=6)
    other = PROMPT[::-1]
    again = lives_of(["mean", "cls"], other)
    found = vectors(run(runner, again, starts=True, first=0, count=len(other)))
    fresh = vectors(run(tiny_runner(model), again, starts=True, first=0, count=len(other)))
    assert all(np.array_equal(found[row], fresh[row]) for row in (0, 1))
    writer = lives_of([None, None], other)
    assert not run(runner, writer, starts=True, first=0, count=len(other)).vectors


def test_a_reset_forgets_everything(model: Decoder) -> None:
    runner, lives = tiny_runner(model), lives_of(["mean"])
    run(runner, lives, starts=True, first=0, count=6)
    runner.reset()
    assert not run(runner, lives, starts=False, first=6, count=5).vectors


def test_logits_in_pieces(model: Decoder) -> None:
    count = CHUNK + 3
    runner = tiny_runner(model, slots=count, blocks=4 * count)
    kinds = ["logits"] * count
    found = vectors(run(runner, lives_of(kinds, PROMPT[:3]), starts=True, first=0, count=3))
    assert len(found) == count
    assert all(np.allclose(found[row], found[0], rtol=1e-5, atol=1e-6) for row in range(count))


def test_slots_may_want_different_tokens(model: Decoder) -> None:
    lives = lives_of(["logits", "logits"])
    other = (lives[1][0], Pooling(kind="logits", tokens=tuple(range(VOCABULARY))))
    found = vectors(run(tiny_runner(model), [lives[0], other], starts=True, first=0, count=len(PROMPT)))
    assert np.allclose(found[1][list(TOKENS)], found[0], rtol=1e-5, atol=1e-6)
    assert len(found[1]) == VOCABULARY


def test_a_prompt_that_needs_all_of_itself_cannot_begin_in_the_middle(model: Decoder) -> None:
    (life, pooling), *_ = lives_of(["mean"])
    start = replace(life.start(computed=8), pooling=pooling)
    with pytest.raises(AssertionError):
        tiny_runner(model).launch(StepPlan(step=1, epoch=0, starts=(start,), chunks=column(0, 8, 3, 0)))


def test_tensors_in_a_row_and_back_and_as_messages() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    output = Output(None, None, (), vectors=Vectors(chunks=(1, 4), widths=(2, 3), values=values))
    assert len(output.tensors()) == 1
    after = output.replaced([values + 1.0])
    first, second = vector_rows(after.vectors)
    assert (first.row, np.frombuffer(first.values, np.float32).tolist()) == (1, [2.0, 3.0])
    assert (second.row, np.frombuffer(second.values, np.float32).tolist()) == (4, [4.0, 5.0, 6.0])
    assert vector_rows(None) == ()
