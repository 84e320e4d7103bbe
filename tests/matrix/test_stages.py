"""Stages of a pipeline in the cells of the matrix: the same tokens from one stage, two and three, greedy and sampled,
free and under a grammar, with drafts of each kind, in micro-batches and with prompts cut into pieces; and stages of
several ranks.

fp32 over gloo on a CPU, the embedded model, its draft and its head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.structured_engine import Ask, Cell, Engine
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.scheduling.statistics import SchedulerStatistics
from tests.engine_core.grammar.vocabulary import tokens
from tests.engine_core.models.eagle_heads import listening_head
from tests.matrix.test_speculation import Outputs, asks, misremembered
from tests.ranks import Ranks, Size

SIZES: tuple[Size, ...] = ((1, 2), (1, 3), (2, 2))
CELLS: list[tuple[Size, Cell]] = [
    ((1, 2), Cell(depth=3, max_num_seqs=16, budget=64, piece=16)),
    ((1, 2), Cell(depth=2, max_num_seqs=16, prefix_caching=False, method="ngram")),
    ((1, 3), Cell(depth=4, max_num_seqs=16, blocks=28, block_size=8, expected_share=0.0, piece=16)),
]
FOLDERS = {"draft_model": draft_folder, "eagle": eagle_folder}
TINY = Cell(max_num_seqs=16, blocks=28, block_size=8, expected_share=0.0)  # too small a pool: some are preempted
DRAFTING: list[tuple[Size, Cell]] = [
    ((1, 2), Cell(depth=3, max_num_seqs=16, method="draft_model", budget=64, piece=16)),
    ((1, 2), Cell(depth=3, max_num_seqs=16, method="eagle", budget=64, piece=16)),
    ((1, 3), replace(TINY, depth=4, method="draft_model")),
    ((1, 3), replace(TINY, depth=4, method="eagle")),
    ((1, 2), Cell(depth=2, max_num_seqs=16, method="draft_model", prefix_caching=False)),
    ((1, 2), Cell(depth=2, max_num_seqs=16, method="eagle", prefix_caching=False)),
    ((2, 2), Cell(depth=3, max_num_seqs=16, method="draft_model", budget=64, piece=16)),
    ((2, 2), replace(TINY, depth=3, method="eagle")),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(SIZES, tmp_path_factory.mktemp("stages"))
    yield found
    found.close()


def answers(
    group: Group, cell: Cell, asked: list[Ask], draft: Path | None = None, draft_format: str = ""
) -> tuple[Outputs, SchedulerStatistics] | None:
    """Of the member that answers."""
    if draft is None and cell.method in FOLDERS:
        draft = FOLDERS[cell.method]()
    engine = Engine(demo_folder(), tokens(), cell, draft=draft, draft_format=draft_format, group=group)
    found = {key: answer.token_ids for key, answer in engine.answer(asked).items()}
    return None if engine.scheduled is None else (found, engine.scheduled)


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return listening_head(tmp_path_factory.mktemp("third"), read_spec(demo_folder()))


def label(value: object) -> str:
    if isinstance(value, Cell):
        return f"{value.method}, depth {value.depth}, budget {value.budget}, {value.blocks} blocks"
    return str(value)


def check(
    ranks: Ranks, expected: Outputs, size: Size, cell: Cell, draft: Path | None = None, draft_format: str = ""
) -> SchedulerStatistics:
    asked = asks()
    if cell.method == "ngram":
        asked = [replace(ask, prediction=misremembered(expected[at, 0])) for at, ask in enumerate(asked)]
    *others, answer = [found for found in ranks.run(size, answers, cell, asked, draft, draft_format) if found]
    assert not others, "one member answers"
    said, scheduled = answer
    assert said == expected
    return scheduled  # type: ignore[no-any-return]


@pytest.mark.parametrize(("size", "cell"), CELLS, ids=label)
def test_stages_change_no_token(ranks: Ranks, expected: Outputs, size: Size, cell: Cell) -> None:
    check(ranks, expected, size, cell)


@pytest.mark.parametrize(
    ("size", "cell"),
    [pytest.param(*drafting, marks=() if at in (3, 6) else pytest.mark.long) for at, drafting in enumerate(DRAFTING)],
    ids=label,
)
def test_drafts_of_the_last_stage_change_no_token(ranks: Ranks, expected: Outputs, size: Size, cell: Cell) -> None:
    found = check(ranks, expected, size, cell)
    assert found.accepted_tokens > (0.5 if cell.method == "draft_model" else 0.15) * found.draft_tokens > 0
    assert found.preemptions > 0 or cell.expected_share > 0.0, "the pool was meant to be too small"


@pytest.mark.long
@pytest.mark.parametrize("size", [(1, 2), (1, 3)], ids=label)
def test_a_head_hears_layers_of_every_stage(ranks: Ranks, expected: Outputs, size: Size, third: Path) -> None:
    found = check(ranks, expected, size, Cell(depth=3, max_num_seqs=16, method="eagle"), third, "dummy")
    assert found.draft_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES, ids=label)
@pytest.mark.parametrize("cell", [cell for _, cell in CELLS], ids=label)
def test_stages_of_several_ranks_change_no_token(ranks: Ranks, expected: Outputs, size: Size, cell: Cell) -> None:
    check(ranks, expected, size, replace(cell, depth=4 if size == (1, 3) else 3))
