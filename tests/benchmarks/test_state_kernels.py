"""Single tokens of recurrent layers against double precision."""

from __future__ import annotations

import pytest
import torch

from benchmarks.state_kernels import Scene, Shape, bytes_of, off
from penstock.kernels import recurrence_triton
from tests.kernels import conftest as kernels

pytestmark = pytest.mark.usefixtures("one_thread")
one_thread = kernels.one_thread

SHAPES = (Shape("delta", 4, 2, 16, 40, True), Shape("odd", 6, 2, 24, 16, True), Shape("space", 4, 1, 32, 24, False))


@pytest.mark.parametrize("few", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_results_and_entries(shape: Shape, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """few: programs have few columns."""
    monkeypatch.setattr(recurrence_triton, "RESIDENT", 999 if few else 0)
    torch.manual_seed(1)
    assert off(Scene(shape, 9, "cpu", torch.float32), 6) < 1e-5


def test_bytes() -> None:
    scene = Scene(Shape("delta", 4, 2, 16, 8, True), 4, "cpu")
    states, every = bytes_of(scene, scene.batch(1, 0))
    assert states == 4 * 16 * 8 * 4
    assert every == states + (2 * 2 * 16 + 2 * 4 * 8) * 2 + (2 * 16 + 4 * 8) * 2 + 4 * 4 + 4 * 8 * 2 + 4 * 8
