"""One engine with the embedded model for all tests of the Python API that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock import LLM


@pytest.fixture(scope="package")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=16, tokenizer_processes=1) as llm:
        yield llm
