"""Drafts of an EAGLE head in the cells of the matrix: the same tokens as without any, greedy and sampled, free and
under a grammar, beside forced runs and predictions. fp32 on a CPU, the embedded model and its head.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.structured_engine import Cell, Engine
from penstock.engine_core.embedded import demo_folder, eagle_folder
from penstock.engine_core.models.spec import read_spec
from tests.engine_core.grammar.vocabulary import tokens
from tests.engine_core.models import eagle_heads
from tests.matrix.test_speculation import (
    COMPANY,
    FEW,
    TINY,
    Outputs,
    asks,
    crowd,
    label,
    misremembered,
    outputs,
)


def engine(cell: Cell, head: Path | None = None, **fields: object) -> Engine:
    cell = msgspec.structs.replace(cell, method="eagle", **fields)
    return Engine(demo_folder(), tokens(), cell, draft=head or eagle_folder())


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head of the third version: it guesses nothing right."""
    spec = read_spec(demo_folder())
    assert spec.hidden != eagle_heads.HIDDEN
    return eagle_heads.listening_head(tmp_path_factory.mktemp("third"), spec)


@pytest.mark.parametrize("cell", FEW, ids=label)
def test_a_head_changes_no_token(cell: Cell, expected: Outputs) -> None:
    found = engine(cell)
    assert outputs(found, asks()) == expected
    assert found.scheduled is not None
    assert found.scheduled.accepted_tokens > 0.15 * found.scheduled.draft_tokens > 0


@pytest.mark.parametrize("tokens_each", [1, pytest.param(2, marks=pytest.mark.long), 7])
def test_nor_do_fewer_or_more_drafts(tokens_each: int, expected: Outputs) -> None:
    found = engine(Cell(max_num_seqs=16), draft_tokens=tokens_each)
    assert outputs(found, asks()) == expected
    assert found.scheduled is not None
    assert found.scheduled.accepted_tokens > 0


@pytest.mark.parametrize("cell", [pytest.param(TINY[0], marks=pytest.mark.long), TINY[1]], ids=label)
def test_preemption_changes_no_token(cell: Cell, expected: Outputs) -> None:
    """Predictions are asked first; where they are lost the head goes on, from states that were computed again."""
    predicting = [
        msgspec.structs.replace(ask, prediction=misremembered(expected[number, 0]) if number % 2 else ())
        for number, ask in enumerate(asks())
    ]
    found = engine(cell)
    assert outputs(found, predicting) == expected
    assert found.scheduled is not None
    assert found.scheduled.preemptions > 0, "the pool was meant to be too small"
    assert found.scheduled.accepted_tokens > 0


@pytest.mark.parametrize("cell", [pytest.param(COMPANY[0], marks=pytest.mark.long), COMPANY[-1], TINY[-1]], ids=label)
def test_a_head_that_hears_three_depths_changes_no_token(cell: Cell, expected: Outputs, third: Path) -> None:
    cell = msgspec.structs.replace(cell, method="eagle")
    found = Engine(demo_folder(), tokens(), cell, draft=third, load_format="auto", draft_format="dummy")
    assert outputs(found, asks()) == expected
    assert found.scheduled is not None
    assert found.scheduled.draft_tokens > 0


def test_a_crowd_of_rows() -> None:
    """Greedy, sampled and several choices side by side in each step."""
    cell = Cell(max_num_seqs=64)
    many = crowd()
    plain = outputs(Engine(demo_folder(), tokens(), msgspec.structs.replace(cell, drafts=False)), many)
    drafted = engine(cell)
    assert outputs(drafted, many) == plain
    assert drafted.scheduled is not None
    assert drafted.scheduled.accepted_tokens > 0.15 * drafted.scheduled.draft_tokens > 0


def test_what_the_embedded_model_says_takes_far_fewer_steps(expected: Outputs) -> None:
    steps = {}
    for method in ("none", "eagle"):
        cell = Cell(max_num_seqs=1, method=method)
        found = Engine(demo_folder(), tokens(), cell, draft=eagle_folder() if method != "none" else None)
        assert outputs(found, asks()[6:8]) == {(at, 0): expected[6 + at, 0] for at in range(2)}
        assert found.scheduled is not None
        steps[method] = found.scheduled.step
    assert steps["eagle"] < 0.7 * steps["none"]
