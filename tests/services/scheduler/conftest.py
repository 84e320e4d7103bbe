from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import pytest

from penstock.services.scheduler.background_jobs import BackgroundJobs


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A loop that begins freezes what it finds and collects by itself from then on; the next test shall have garbage
    collected. What was frozen stays so: to look through all that pytest has collected took two seconds a loop. So the
    descriptors of loops are closed here: there are hundreds of them, and select(2) knows a thousand."""
    made: list[BackgroundJobs[Any, Any]] = []
    begin = BackgroundJobs.__init__

    def begun(jobs: BackgroundJobs[Any, Any], threads: Executor) -> None:
        made.append(jobs)
        begin(jobs, threads)

    monkeypatch.setattr(BackgroundJobs, "__init__", begun)
    yield
    gc.enable()
    for jobs in made:
        jobs.close()
