"""Every form of single tokens of recurrent layers against double precision."""

from __future__ import annotations

import pytest
import torch

from benchmarks.state_kernels import FORMS, Form, Scene, Shape, bytes_of, off, table
from tests.kernels import conftest as kernels

pytestmark = pytest.mark.usefixtures("one_thread")
one_thread = kernels.one_thread

SHAPES = (Shape("delta", 4, 2, 16, 40, True), Shape("odd", 6, 2, 24, 16, True), Shape("space", 4, 1, 32, 24, False))
SMALL = [form._replace(columns=min(form.columns, 16), programs=programs) for form in FORMS for programs in (1, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("form", dict.fromkeys(one._replace(warps=4, stages=2, registers=None) for one in SMALL))
def test_forms(form: Form, shape: Shape) -> None:
    torch.manual_seed(1)
    assert off(form, Scene(shape, 9, "cpu", torch.float32), 6) < 1e-5


def test_bytes_and_table() -> None:
    scene = Scene(Shape("delta", 4, 2, 16, 8, True), 4, "cpu")
    states, every = bytes_of(scene, scene.batch(1, 0))
    assert states == 4 * 16 * 8 * 4
    assert every == states + (2 * 2 * 16 + 2 * 4 * 8) * 2 + (2 * 16 + 4 * 8) * 2 + 4 * 4 + 4 * 8 * 2 + 4 * 8
    told = {"shape": "delta", "form": "now", "rows": 8, "us": 12.5, "share": 0.8}
    assert "12.5   80 %" in table([told, {"shape": "delta", "form": "other", "problem": "no"}], [1, 8])
