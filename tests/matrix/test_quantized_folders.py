"""Folders with quantized weights in the cells of the matrix: each says from pieces of prompts, cached prefixes, a pool
that preempts, drafts, two ranks and two stages what it says alone. fp32 on a CPU, the embedded model and its draft.

Products with dequantized weights depend on nothing else. Rows that are rounded, too, may differ in one answer, as
test_quantized.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import format_folders
from benchmarks.structured_engine import Cell, Engine
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.embedded import demo_folder, draft_folder
from penstock.engine_core.models.sharding import check_ranks
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.errors import ConfigError
from tests.engine_core.grammar.vocabulary import tokens
from tests.matrix.test_speculation import Outputs, asks, outputs
from tests.ranks import Ranks, Size

COUNT = 6  # of the requests
RANKS, STAGES = 2, (1, 2)
CROWDED = Cell(budget=32, blocks=28, block_size=8, expected_share=0.0, max_num_seqs=16, method="ngram")
DRAFTED = Cell(max_num_seqs=16, method="draft_model")
# The groups of processes that a folder is served by: blocks of 128 and orders of activations are split by layers alone.
SIZES: dict[str, Size] = {"w4a16": RANKS, "gptq": STAGES, "fp8-blocks": STAGES, "awq": RANKS, "nvfp4": RANKS}
ROUNDED = ("fp8-blocks",)
LONG = ("awq", "nvfp4")  # which differ in what is read alone
FOLDERS = [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in SIZES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("folders")

    def find(name: str) -> Path:
        return place / name if (place / name).exists() else format_folders.write(demo_folder(), place / name, name)

    return find


@pytest.fixture(scope="module")
def alone(folder: Callable[[str], Path]) -> Callable[[str], Outputs]:
    """What each says one request after the other, one step at a time."""
    found: dict[str, Outputs] = {}

    def said(name: str) -> Outputs:
        if name not in found:
            found[name] = answers(ALONE, Cell(depth=1, drafts=False, max_num_seqs=1), folder(name))
        return found[name]

    return said


def answers(group: Group, cell: Cell, model: Path, draft: Path | None = None) -> Outputs:
    draft = draft or (draft_folder() if cell.method == "draft_model" else None)
    return outputs(Engine(model, tokens(), cell, draft=draft, group=group), asks()[:COUNT])


def check(name: str, found: Outputs, expected: Outputs) -> None:
    assert found.keys() == expected.keys()
    assert sum(found[key] != expected[key] for key in found) <= (name in ROUNDED)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_same_tokens_from_pieces_prefixes_and_a_small_pool(
    name: str, folder: Callable[[str], Path], alone: Callable[[str], Outputs]
) -> None:
    check(name, answers(ALONE, CROWDED, folder(name)), alone(name))


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks((RANKS, STAGES), tmp_path_factory.mktemp("groups"))
    yield found
    found.close()


@pytest.mark.parametrize("name", FOLDERS)
def test_the_same_tokens_from_two_ranks_or_stages_with_a_draft_model(
    name: str, groups: Ranks, folder: Callable[[str], Path], alone: Callable[[str], Outputs]
) -> None:
    found = [said for said in groups.run(SIZES[name], answers, DRAFTED, folder(name)) if said]
    assert found
    for said in found:
        check(name, said, alone(name))


@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if size == STAGES])
def test_what_ranks_would_cut_through_is_refused(name: str, folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"is quantized .*: one of 1$"):
        check_ranks(read_spec(folder(name)), 2)


def test_a_quantized_draft_changes_no_token(expected: Outputs, tmp_path: Path) -> None:
    draft = format_folders.write(draft_folder(), tmp_path / "draft", "w4a16")
    found = answers(ALONE, DRAFTED, demo_folder(), draft)
    assert found == {key: expected[key] for key in found}
