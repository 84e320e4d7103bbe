"""Where blocks of keys begin and end, on a GPU of Hopper's generation."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.scene import Scene
from tests.kernels.test_attention_device import error
from tests.kernels.test_attention_hopper import attended

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_what_lies_before_the_window_is_not_read(dim: int) -> None:
    """Blocks that no query sees any more may hold anything, or belong to others."""
    window, block_size = 100, 16
    scene = Scene([(90, 1300), (1, 700), (200, 1025)], 8, 2, dim, block_size, torch.bfloat16).on("cuda")
    wanted = attended(scene, window)
    for line, (queries, context) in enumerate(scene.rows):
        passed = (context - queries - window + 1) // block_size
        scene.batch.block_tables[len(scene.rows) - 1 - line, :passed] = 0  # the scratch block, which is not a number
    assert torch.equal(attended(scene, window), wanted)
    assert not wanted.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("context", [*range(1, 140, 9), *range(1000, 1300, 37)])
def test_every_end_of_a_row_in_its_last_block(context: int) -> None:
    """What stands behind the end is not a number there, and never reaches a result."""
    scene = Scene([(min(context, 100), context), (1, 500)], 8, 2, 128, 16, torch.bfloat16).on("cuda")
    out = attended(scene)
    assert error(scene, out, 0, 0) < 5e-3
