"""Processes that several files of the matrix share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, or four."""
    found = Ranks((2, 4), tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()
