"""Kernels run on the GPU, or where there is none by Triton's interpreter, see tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import quicken

quicken()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaN or of absurd numbers, so that an element which nobody writes is found."""
    plain = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        made = plain(*shape, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", empty)
