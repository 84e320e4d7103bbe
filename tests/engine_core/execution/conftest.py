"""What several files share: processes of one machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="package")
def few_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, or three, over gloo."""
    found = Ranks((2, 3), tmp_path_factory.mktemp("few"))
    yield found
    found.close()
