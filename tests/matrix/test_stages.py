"""Stages of a pipeline in the cells of the matrix: the same tokens from one stage, two and three, greedy and sampled,
free and under a grammar, with drafts, in micro-batches and with prompts cut into pieces; and stages of several ranks.

fp32 over gloo on a CPU, the embedded model.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from benchmarks.structured_engine import Ask, Cell, Engine
from engine_core.embedded import demo_folder
from engine_core.execution.group import Group
from tests.engine_core.grammar.vocabulary import tokens
from tests.matrix.test_speculation import Outputs, asks, misremembered, outputs
from tests.ranks import Ranks, Size

SIZES: tuple[Size, ...] = ((1, 2), (1, 3), (2, 2))
CELLS: list[tuple[Size, Cell]] = [
    ((1, 2), Cell(depth=3, max_num_seqs=16, budget=64, piece=16)),
    ((1, 2), Cell(depth=2, max_num_seqs=16, prefix_caching=False, method="ngram")),
    ((1, 3), Cell(depth=4, max_num_seqs=16, blocks=28, block_size=8, expected_share=0.0, piece=16)),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(SIZES, tmp_path_factory.mktemp("stages"))
    yield found
    found.close()


def answers(group: Group, cell: Cell, asked: list[Ask]) -> Outputs:
    found = Engine(demo_folder(), tokens(), cell, group=group).answer(asked)
    return {key: answer.token_ids for key, answer in found.items()}


@pytest.fixture(scope="module")
def expected() -> Outputs:
    torch.set_num_threads(1)
    return outputs(Engine(demo_folder(), tokens(), Cell(depth=1, drafts=False, max_num_seqs=1)), asks())


def label(value: object) -> str:
    if isinstance(value, Cell):
        return f"{value.method}, depth {value.depth}, budget {value.budget}, {value.blocks} blocks"
    return str(value)


def check(ranks: Ranks, expected: Outputs, size: Size, cell: Cell) -> None:
    asked = asks()
    if cell.method == "ngram":
        asked = [
            msgspec.structs.replace(ask, prediction=misremembered(expected[at, 0])) for at, ask in enumerate(asked)
        ]
    *others, found = [result for result in ranks.run(size, answers, cell, asked) if result]
    assert not others, "one member answers"
    assert found == expected


@pytest.mark.parametrize(("size", "cell"), CELLS, ids=label)
def test_stages_change_no_token(ranks: Ranks, expected: Outputs, size: Size, cell: Cell) -> None:
    check(ranks, expected, size, cell)


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES, ids=label)
@pytest.mark.parametrize("cell", [cell for _, cell in CELLS], ids=label)
def test_stages_of_several_ranks_change_no_token(ranks: Ranks, expected: Outputs, size: Size, cell: Cell) -> None:
    check(ranks, expected, size, msgspec.structs.replace(cell, depth=4 if size == (1, 3) else 3))
