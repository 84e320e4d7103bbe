"""Tensor parallelism in the cells of the matrix: the same tokens from one rank, two and four, greedy and sampled, free
and under a grammar, with each kind of drafts. fp32 over gloo on a CPU, the embedded model, its draft and its head.

The embedded model has eight heads over four of keys and values: four ranks have one of those each.
"""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.structured_engine import Ask, Cell, Engine
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from tests.engine_core.grammar.vocabulary import tokens
from tests.matrix.test_speculation import Outputs, asks, misremembered, outputs
from tests.ranks import Ranks

FOLDERS = {"draft_model": draft_folder, "eagle": eagle_folder}
CELLS = [
    Cell(depth=2, max_num_seqs=16, budget=32),
    Cell(depth=1, max_num_seqs=16, prefix_caching=False, method="ngram"),
    Cell(depth=2, max_num_seqs=16, method="draft_model"),
    Cell(depth=2, max_num_seqs=16, method="eagle"),
    Cell(depth=2, max_num_seqs=16, blocks=28, block_size=8, expected_share=0.0),
]


def answers(group: Group, cell: Cell, asked: list[Ask]) -> Outputs:
    draft = FOLDERS[cell.method]() if cell.method in FOLDERS else None
    return outputs(Engine(demo_folder(), tokens(), cell, draft=draft, group=group), asked)


def label(cell: Cell) -> str:
    return f"{cell.method}, depth {cell.depth}, budget {cell.budget}, {cell.blocks} blocks"


@pytest.mark.parametrize(
    ("size", "cell"),
    [
        *(pytest.param(2, cell, id=f"2 ranks, {label(cell)}") for cell in CELLS),
        pytest.param(4, CELLS[0], id=f"4 ranks, {label(CELLS[0])}"),
        *(pytest.param(4, cell, id=f"4 ranks, {label(cell)}", marks=pytest.mark.long) for cell in CELLS[1:]),
    ],
)
def test_ranks_change_no_token(ranks: Ranks, expected: Outputs, size: int, cell: Cell) -> None:
    asked = asks()
    if cell.method == "ngram":
        asked = [
            msgspec.structs.replace(ask, prediction=misremembered(expected[at, 0])) for at, ask in enumerate(asked)
        ]
    for found in ranks.run(size, answers, cell, asked):
        assert found == expected
