"""Rows whose keys lie in the shares of many programs, and many rows in the share of one."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.scene import Scene
from tests.kernels.test_attention_stream import hold, share

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "prefix", "own", "kv_heads"),
    [
        (16, 16384, 700, 1),  # every tile is cut, most of them more than once
        (16, 256, 1, 1),  # fewer units than programs
        (200, 256, 40, 8),  # whole tiles of several rows and of one in each share
        (40, 512, 3000, 2),
    ],
)
def test_parts_are_joined_once_and_in_order(rows: int, prefix: int, own: int, kv_heads: int) -> None:
    """`hold` asks for the same bits at each call, and for counters that are zero again."""
    lengths = [(1, prefix + 1 + 97 * row % own) for row in range(rows)]
    scene = Scene(lengths, 4 * kv_heads, kv_heads, 128, 16, torch.bfloat16)
    share(scene, prefix // 16)
    hold(scene)
