"""Drafts of a head of multi-token prediction in cells of the matrix: the same tokens as without, greedy and sampled,
free and under a grammar, over ranks and stages. fp32 on a CPU; a tiny GLM 4.5 whose head is right most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.structured_engine import Cell, Engine
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.spec import read_spec
from tests.engine_core.grammar.vocabulary import tokens
from tests.engine_core.models.mtp_heads import write_headed
from tests.matrix.test_speculation import TINY, Outputs, asks, outputs
from tests.ranks import Ranks, Size

CELLS = {
    "pieces": Cell(depth=1, budget=32, prefix_caching=False, max_num_seqs=16),
    "prefixes": Cell(depth=2, block_size=8, max_num_seqs=16),
    "preemption": TINY[-1],
}
LEAST = 0.15  # of drafts that come true
SHARED: tuple[Size, ...] = (2, (1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("glm")
    write_headed(found, guessing=True, vocab_size=read_spec(demo_folder()).vocab_size)
    return found


def said(group: Group, folder: Path, cell: Cell) -> tuple[Outputs, float]:
    """What is said, and the share of drafts that came true."""
    engine = Engine(folder, tokens(), cell, draft=folder if cell.method == "mtp" else None, group=group)
    found = outputs(engine, asks()[::2])
    counts = engine.scheduled
    return found, 0.0 if counts is None or not counts.draft_tokens else counts.accepted_tokens / counts.draft_tokens


@pytest.fixture(scope="module")
def alone(folder: Path) -> Outputs:
    return said(ALONE, folder, Cell(depth=1, drafts=False, max_num_seqs=1))[0]


@pytest.mark.parametrize("name", CELLS)
def test_a_head_changes_no_token(name: str, folder: Path, alone: Outputs) -> None:
    found, accepted = said(ALONE, folder, msgspec.structs.replace(CELLS[name], method="mtp"))
    assert found == alone
    assert accepted > LEAST


def test_nor_does_one_of_latent_attention(tmp_path: Path) -> None:
    write_headed(tmp_path, "glm4_moe_lite", guessing=True, vocab_size=read_spec(demo_folder()).vocab_size)
    expected, _ = said(ALONE, tmp_path, Cell(depth=1, drafts=False, max_num_seqs=1))
    found, accepted = said(ALONE, tmp_path, msgspec.structs.replace(CELLS["prefixes"], method="mtp"))
    assert found == expected
    assert accepted > LEAST


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(SHARED, tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


@pytest.mark.parametrize("size", SHARED, ids=["2 ranks", "2 stages"])
def test_nor_over_ranks_and_stages(size: Size, folder: Path, alone: Outputs, ranks: Ranks) -> None:
    found = ranks.run(size, said, folder, msgspec.structs.replace(CELLS["prefixes"], method="mtp"))
    assert [one for one, _ in found if one][-1] == alone
    assert max(accepted for _, accepted in found) > LEAST
