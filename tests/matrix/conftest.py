"""What several files of the matrix share: one thread, processes, and what is to be said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.structured_engine import Cell, Engine
from penstock.engine_core.embedded import demo_folder
from tests.engine_core.grammar.vocabulary import tokens
from tests.matrix.test_speculation import Outputs, asks, outputs
from tests.ranks import Ranks


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, or four."""
    found = Ranks((2, 4), tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def expected() -> Outputs:
    """What is said to `asks` without drafts, one request after the other, one step at a time."""
    return outputs(Engine(demo_folder(), tokens(), Cell(depth=1, drafts=False, max_num_seqs=1)), asks())
