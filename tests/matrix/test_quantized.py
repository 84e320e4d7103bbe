"""Quantized weights in the cells of the matrix: the same tokens from pieces of prompts, cached prefixes, a pool that
preempts, each kind of drafts, two stages. fp32 on a CPU, the embedded model, its draft and its head.

Scales of rounded rows depend on the row alone. On a CPU the last bit of a sum depends on what shares the product, and
where a row's number lies halfway between two integers it may become the other: one answer of many may differ by that.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.structured_engine import Cell, Engine
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from tests.engine_core.grammar.vocabulary import tokens
from tests.matrix.test_speculation import Outputs, asks, outputs
from tests.ranks import Ranks

FOLDERS = {"draft_model": draft_folder, "eagle": eagle_folder}
FORMATS = (pytest.param("fp8", marks=pytest.mark.long), "int8", "int4")
ROUNDED = ("fp8", "int8")  # rows, too
COUNT = 10  # of the requests


def cells(quantization: str) -> dict[str, Cell]:
    common = {"max_num_seqs": 16, "quantization": quantization}
    return {
        "pieces": Cell(depth=1, budget=32, prefix_caching=False, **common),
        "prefixes": Cell(block_size=8, **common),
        "preemption": Cell(blocks=28, block_size=8, expected_share=0.0, **common),
        "draft model": Cell(method="draft_model", **common),
        "EAGLE head": Cell(method="eagle", **common),
    }


def answers(group: Group, cell: Cell) -> Outputs:
    draft = FOLDERS[cell.method]() if cell.method in FOLDERS else None
    return outputs(Engine(demo_folder(), tokens(), cell, draft=draft, group=group), asks()[:COUNT])


def check(quantization: str, found: Outputs, expected: Outputs) -> None:
    assert found.keys() == expected.keys()
    others = sum(found[key] != expected[key] for key in found)
    assert others <= (quantization in ROUNDED)


@pytest.fixture(scope="module", params=FORMATS)
def plain(request: pytest.FixtureRequest) -> tuple[str, Outputs]:
    cell = Cell(depth=1, drafts=False, max_num_seqs=1, quantization=request.param)
    return request.param, answers(ALONE, cell)


def test_it_is_another_model(plain: tuple[str, Outputs], expected: Outputs) -> None:
    _, found = plain
    assert found != {key: expected[key] for key in found}


@pytest.mark.parametrize("name", cells(""))
def test_the_same_tokens(name: str, plain: tuple[str, Outputs]) -> None:
    quantization, found = plain
    check(quantization, answers(ALONE, cells(quantization)[name]), found)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(((1, 2),), tmp_path_factory.mktemp("quantized"))
    yield found
    found.close()


def test_the_same_tokens_from_two_stages(stages: Ranks, plain: tuple[str, Outputs]) -> None:
    quantization, expected = plain
    for found in filter(None, stages.run((1, 2), answers, cells(quantization)["EAGLE head"])):
        check(quantization, found, expected)
