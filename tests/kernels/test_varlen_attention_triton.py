"""The kernel against the definition in double precision: by the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.chip import CHIPS
from penstock.kernels.records import AttentionOptions
from penstock.kernels.varlen_attention_triton import attend_sequences, columns_of, tile_of
from tests.kernels.varlen_scene import LENGTHS, Sequences, exact, sequences

pytestmark = [pytest.mark.usefixtures("one_thread", "poisoned"), pytest.mark.sweep]

ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def run(scene: Sequences, device: str, window: int = 0) -> Tensor:
    there = scene.on(device)
    options = AttentionOptions(scene.scale, window)
    return attend_sequences(*there.tensors, there.query_start, max(scene.lengths), options).cpu()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("window", [0, 1, 9])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 16), (4, 2, 24), (3, 1, 64), (2, 2, 72), (2, 2, 80), (2, 1, 144), (2, 1, 256)]
)
def test_definition(heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies matrices of bfloat16 as if they were integers")
    scene = sequences(LENGTHS, heads, kv_heads, dim, dtype)
    found = run(scene, device, window)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), exact(scene, scene.scale, window), atol=ROUNDING[dtype], rtol=ROUNDING[dtype]
    )


@pytest.mark.parametrize("window", [0, 1, 60, 65, 130])
def test_texts_of_several_tiles(window: int, device: str) -> None:
    """Borders of tiles of 32 queries and 32 keys, and windows that leave blocks of keys without any for some query."""
    scene = sequences((64, 65, 1, 191), 1, 1, 16, torch.float32)
    expected = exact(scene, scene.scale, window)
    torch.testing.assert_close(run(scene, device, window).double(), expected, atol=3e-6, rtol=3e-6)


def test_a_text_has_the_same_bits_beside_others(device: str) -> None:
    scene = sequences((40, 7, 100), 2, 1, 16, torch.float32)
    together, first = run(scene, device, 20), 0
    for length in scene.lengths:
        q, k, v = (part[first : first + length] for part in scene.tensors)
        alone = replace(scene, tensors=(q, k, v), query_start=torch.tensor([0, length]).int(), lengths=(length,))
        assert torch.equal(run(alone, device, 20), together[first : first + length])
        first += length


def test_few_columns_behind_a_power_of_two_are_a_tile_of_their_own() -> None:
    assert [columns_of(dim) for dim in (8, 16, 24, 48, 64)] == [(16, 0), (16, 0), (32, 0), (64, 0), (64, 0)]
    assert [columns_of(dim) for dim in (65, 72, 80, 144)] == [(64, 16), (64, 16), (64, 16), (128, 16)]
    assert [columns_of(dim) for dim in (81, 96, 128, 256)] == [(128, 0), (128, 0), (128, 0), (256, 0)]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("dim", [16, 32, 64, 72, 80, 96, 128, 256])
def test_tiles_fit_every_chip(dim: int, item_bytes: int, chip: str) -> None:
    """A tile of queries, and as many of keys and of values as there are stages."""
    queries, keys, _, stages = tile_of(dim, item_bytes)
    assert dim * item_bytes * (queries + 2 * stages * keys) <= CHIPS[chip].shared_memory
