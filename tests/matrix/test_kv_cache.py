"""Keys and values in e4m3 in the cells of the matrix: the same tokens from pieces of prompts, cached prefixes, a pool
that preempts, each kind of drafts, two ranks and two stages. fp32 on a CPU, the embedded model, its draft and its head.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.structured_engine import Cell, Engine
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from penstock.protocol.engine_config import KV_FP8
from tests.engine_core.grammar.vocabulary import tokens
from tests.matrix.test_speculation import Outputs, asks, outputs
from tests.ranks import Ranks, Size

FOLDERS = {"draft_model": draft_folder, "eagle": eagle_folder}
PLAIN = Cell(depth=1, drafts=False, max_num_seqs=1, kv_cache_dtype=KV_FP8)
CELLS = {
    "pieces": Cell(depth=1, max_num_seqs=16, budget=32, prefix_caching=False, kv_cache_dtype=KV_FP8),
    "prefixes": Cell(depth=2, max_num_seqs=16, block_size=8, kv_cache_dtype=KV_FP8),
    "preemption": Cell(depth=2, max_num_seqs=16, blocks=28, block_size=8, expected_share=0.0, kv_cache_dtype=KV_FP8),
    "draft model": Cell(depth=2, max_num_seqs=16, method="draft_model", kv_cache_dtype=KV_FP8),
    "EAGLE head": Cell(depth=2, max_num_seqs=16, method="eagle", kv_cache_dtype=KV_FP8),
}
SIZES: tuple[Size, ...] = (2, (1, 2))


def answers(group: Group, cell: Cell) -> Outputs:
    draft = FOLDERS[cell.method]() if cell.method in FOLDERS else None
    return outputs(Engine(demo_folder(), tokens(), cell, draft=draft, group=group), asks())


@pytest.fixture(scope="module")
def plain() -> Outputs:
    torch.set_num_threads(1)
    return answers(ALONE, PLAIN)


def test_it_is_another_cache(plain: Outputs, expected: Outputs) -> None:
    """The model says much the same, and not all."""
    same = sum(plain[key] == expected[key] for key in plain)
    assert 0 < same < len(plain)


@pytest.mark.parametrize("cell", CELLS)
def test_the_same_tokens(cell: str, plain: Outputs) -> None:
    assert answers(ALONE, CELLS[cell]) == plain


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(SIZES, tmp_path_factory.mktemp("kv"))
    yield found
    found.close()


@pytest.mark.parametrize("size", SIZES, ids=["2 ranks", "2 stages"])
def test_the_same_tokens_in_a_group(size: Size, groups: Ranks, plain: Outputs) -> None:
    for found in filter(None, groups.run(size, answers, CELLS["EAGLE head"])):
        assert found == plain
