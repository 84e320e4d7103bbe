from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """A loop that begins freezes what it finds and collects by itself from then on; the next test shall have garbage
    collected. What was frozen stays so: to look through all that pytest has collected took two seconds a loop."""
    yield
    gc.enable()
