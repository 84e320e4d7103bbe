"""Drafts of a draft model in every cell of the matrix: the same tokens as without any, greedy and sampled, free and
under a grammar, beside forced runs and predictions. fp32 on a CPU, the embedded model and its draft.
"""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.structured_engine import Cell, Engine
from penstock.engine_core.embedded import demo_folder, draft_folder
from tests.engine_core.grammar.vocabulary import tokens
from tests.matrix.test_speculation import (
    FEW,
    TINY,
    Outputs,
    asks,
    crowd,
    label,
    misremembered,
    outputs,
)

CROWD = [pytest.param(Cell(depth=1, max_num_seqs=64), marks=pytest.mark.long), Cell(depth=2, max_num_seqs=64)]


def engine(cell: Cell, **fields: object) -> Engine:
    cell = msgspec.structs.replace(cell, method="draft_model", **fields)
    return Engine(demo_folder(), tokens(), cell, draft=draft_folder())


@pytest.mark.parametrize("cell", FEW, ids=label)
def test_a_draft_model_changes_no_token(cell: Cell, expected: Outputs) -> None:
    found = engine(cell)
    assert outputs(found, asks()) == expected
    assert found.scheduled is not None
    assert found.scheduled.accepted_tokens > 0.5 * found.scheduled.draft_tokens > 0


@pytest.mark.parametrize("tokens_each", [1, pytest.param(2, marks=pytest.mark.long), 7])
def test_nor_do_fewer_or_more_drafts(tokens_each: int, expected: Outputs) -> None:
    found = engine(Cell(max_num_seqs=16), draft_tokens=tokens_each)
    assert outputs(found, asks()) == expected
    assert found.scheduled is not None
    assert len(found.scheduled.accepted_at) >= tokens_each


@pytest.mark.parametrize("cell", [pytest.param(TINY[0], marks=pytest.mark.long), TINY[1]], ids=label)
def test_preemption_changes_no_token(cell: Cell, expected: Outputs) -> None:
    """Predictions are asked first; where they are lost the draft model goes on."""
    predicting = [
        msgspec.structs.replace(ask, prediction=misremembered(expected[number, 0]) if number % 2 else ())
        for number, ask in enumerate(asks())
    ]
    found = engine(cell)
    assert outputs(found, predicting) == expected
    assert found.scheduled is not None
    assert found.scheduled.preemptions > 0, "the pool was meant to be too small"
    assert found.scheduled.accepted_tokens > 0


@pytest.mark.parametrize("cell", CROWD, ids=label)
def test_a_crowd_of_rows(cell: Cell) -> None:
    """Greedy, sampled and several choices side by side in each step."""
    many = crowd()
    plain = outputs(Engine(demo_folder(), tokens(), msgspec.structs.replace(cell, drafts=False)), many)
    drafted = engine(cell)
    assert outputs(drafted, many) == plain
    assert drafted.scheduled is not None
    assert drafted.scheduled.accepted_tokens > 0.5 * drafted.scheduled.draft_tokens > 0


def test_a_request_may_do_without(expected: Outputs) -> None:
    free = [number for number, ask in enumerate(asks()) if ask.automaton is None and ask.n == 1]
    found = engine(Cell())
    said = outputs(found, [msgspec.structs.replace(asks()[number], speculate=False) for number in free])
    assert [said[place, 0] for place in range(len(free))] == [expected[number, 0] for number in free]
    assert found.scheduled is not None
    assert found.scheduled.draft_tokens == 0


def test_what_the_embedded_model_says_takes_a_third_of_the_steps(expected: Outputs) -> None:
    steps = {}
    for method in ("none", "draft_model"):
        cell = Cell(max_num_seqs=1, method=method)
        found = Engine(demo_folder(), tokens(), cell, draft=draft_folder() if method != "none" else None)
        assert outputs(found, asks()[6:8]) == {(at, 0): expected[6 + at, 0] for at in range(2)}
        assert found.scheduled is not None
        steps[method] = found.scheduled.step
    assert steps["draft_model"] < 0.45 * steps["none"]
