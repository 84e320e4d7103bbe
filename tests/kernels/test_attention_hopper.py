"""The kernel of Hopper's instructions: compiled anywhere, and on a GPU held to double precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from penstock.kernels.attention_device import chunk_attention
from tests.kernels.scene import Rows, Scene
from tests.kernels.test_attention_device import error

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

BORDERS: Rows = [(90, 300), (33, 33), (1, 1), (2, 2), (64, 128), (65, 129), (1, 4000), (128, 128), (200, 1025)]


def test_it_compiles_for_the_chip() -> None:
    """Without a GPU too: the program fits, and is made of the chip's own instructions."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.chunk_compilation", "128", "16"]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shared"] <= 227 << 10
    assert found["instructions"] == ["wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "dtype"),
    [
        (32, 8, 128, 16, torch.bfloat16),
        (4, 1, 64, 32, torch.float16),
        (6, 2, 128, 64, torch.bfloat16),  # three heads in a group: a line of each half stays idle
        (2, 2, 128, 256, torch.bfloat16),  # blocks larger than a turn
        (128, 2, 64, 8, torch.float16),
    ],
)
def test_chunks_of_any_length(heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
    """The same bits at each repetition: nothing reads what another has not finished."""
    scene = Scene(BORDERS, heads, kv_heads, dim, block_size, dtype).on("cuda")
    attend = chunk_attention(scene.q, scene.k_pages, scene.options())
    if attend is None:
        pytest.skip("this is no GPU of Hopper's generation")
    found = [torch.empty(scene.q.shape, dtype=dtype, device="cuda") for _ in range(3)]
    for out in found:
        attend(scene.q, scene.k_pages, scene.v_pages, out, scene.batch, scene.options(), 1)
    assert all(torch.equal(out, found[0]) for out in found)
    for row in range(len(BORDERS)):
        assert error(scene, found[0], row, 0) < 5e-3, row


@pytest.mark.gpu
@pytest.mark.parametrize("context", [*range(1, 140, 9), *range(1000, 1300, 37)])
def test_every_end_of_a_row_in_its_last_block(context: int) -> None:
    """What stands behind the end is not a number there, and never reaches a result."""
    scene = Scene([(min(context, 100), context), (1, 500)], 8, 2, 128, 16, torch.bfloat16).on("cuda")
    attend = chunk_attention(scene.q, scene.k_pages, scene.options())
    if attend is None:
        pytest.skip("this is no GPU of Hopper's generation")
    out = torch.empty(scene.q.shape, dtype=torch.bfloat16, device="cuda")
    attend(scene.q, scene.k_pages, scene.v_pages, out, scene.batch, scene.options(), 1)
    assert error(scene, out, 0, 0) < 5e-3


@pytest.mark.gpu
def test_many_chunks_of_few_queries() -> None:
    scene = Scene([(5 + row % 3, 30 + 17 * row) for row in range(60)], 32, 8, 128, 16, torch.bfloat16).on("cuda")
    attend = chunk_attention(scene.q, scene.k_pages, scene.options())
    if attend is None:
        pytest.skip("this is no GPU of Hopper's generation")
    found = [torch.empty(scene.q.shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    for out in found:
        attend(scene.q, scene.k_pages, scene.v_pages, out, scene.batch, scene.options(), 5)
    assert all(torch.equal(out, found[0]) for out in found)
    for row in range(0, 60, 7):
        assert error(scene, found[0], row, 0) < 5e-3, row


@pytest.mark.gpu
def test_queries_may_be_a_view_and_tables_of_many_slots() -> None:
    scene = Scene([(150, 400), (70, 70)], 8, 2, 128, 16, torch.bfloat16).on("cuda")
    wide = torch.full((len(scene.q), 12, 128), 9.0, dtype=torch.bfloat16, device="cuda")
    wide[:, :8] = scene.q
    scene.q = wide[:, :8]
    tables = torch.cat((torch.zeros_like(scene.batch.block_tables), scene.batch.block_tables))
    scene.batch = replace(scene.batch, block_tables=tables, slots=scene.batch.slots + 2)
    attend = chunk_attention(scene.q, scene.k_pages, scene.options())
    if attend is None:
        pytest.skip("this is no GPU of Hopper's generation")
    out = torch.empty(scene.q.shape, dtype=torch.bfloat16, device="cuda")
    attend(scene.q, scene.k_pages, scene.v_pages, out, scene.batch, scene.options(), 1)
    for row in range(2):
        assert error(scene, out, row, 0) < 5e-3, row


@pytest.mark.gpu
def test_shorter_rows_are_left_alone() -> None:
    scene = Scene(BORDERS, 32, 8, 128, 16, torch.bfloat16).on("cuda")
    attend = chunk_attention(scene.q, scene.k_pages, scene.options())
    if attend is None:
        pytest.skip("this is no GPU of Hopper's generation")
    out = torch.empty(scene.q.shape, dtype=torch.bfloat16, device="cuda")
    attend(scene.q, scene.k_pages, scene.v_pages, out, scene.batch, scene.options(), 65)
    counts = torch.tensor([n for n, _ in BORDERS], device="cuda")
    served = torch.repeat_interleave(counts >= 65, counts)
    assert out[~served].isnan().all()
    assert not out[served].isnan().any()


@pytest.mark.gpu
def test_sizes_that_it_lacks_are_for_the_general_kernel() -> None:
    def served(dim: int, dtype: torch.dtype, block_size: int = 16, window: int = 0) -> bool:
        scene = Scene([(20, 20)], 4, 2, dim, block_size, dtype).on("cuda")
        return chunk_attention(scene.q, scene.k_pages, scene.options(window)) is not None

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this is no GPU of Hopper's generation")
    assert served(128, torch.bfloat16)
    assert served(64, torch.float16)
    assert not served(128, torch.float32)
    assert not served(256, torch.bfloat16)
    assert not served(96, torch.bfloat16)
    assert not served(128, torch.bfloat16, block_size=12)
    assert not served(128, torch.bfloat16, block_size=4)
    assert not served(128, torch.bfloat16, window=100)
