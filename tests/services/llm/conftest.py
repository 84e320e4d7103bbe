"""One engine with the embedded model for all tests of the Python API that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import LLM
from penstock.services.llm import launcher_process
from tests.e2e.chaos.faulty import FAULTS
from tests.e2e.server import FAULTY


@pytest.fixture(scope="package")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=16, tokenizer_processes=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which executors of engines that are made from now on find what faults they have."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher_process, "ENTRY", FAULTY)
        patch.setenv(FAULTS, str(folder))
        yield folder
