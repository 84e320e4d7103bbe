"""The kernel of Hopper's instructions: compiled anywhere, and on a GPU held to double precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from penstock.kernels.attention_device import chunk_attention
from penstock.kernels.attention_hopper import FORMS, Form, attend_chunks, form_of, forms_of, serves, shared_bytes
from penstock.kernels.chip import CHIPS, Chip
from penstock.kernels.records import AttentionOptions
from tests.kernels.scene import Rows, Scene
from tests.kernels.test_attention_device import error

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

SPILLED = 128  # bytes of a thread that may stand in memory: what is asked once a tile, not in the loops
BORDERS: Rows = [(90, 300), (33, 33), (1, 1), (2, 2), (64, 128), (65, 129), (1, 4000), (128, 128), (200, 1025)]


@pytest.mark.long  # that it compiles and fits is held by tests/benchmarks/test_chips.py, from its source as it is
@pytest.mark.parametrize(
    "asked",
    [["64,short,window,sinks", "128", "256,window,softcap"],
     ["80,sinks", "128,short,window", "192", "192,alone", "256,alone"]],
    ids=["a few", "others"],
)  # fmt: skip
def test_it_compiles_for_the_chip(asked: list[str]) -> None:
    """Without a GPU too: each form fits, is made of the chip's own instructions, and keeps its sums in registers."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.chunk_compilation", *asked]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, line in zip(asked, done.stdout.splitlines(), strict=True):
        found = json.loads(line)
        dim = int(name.split(",")[0])
        form = forms_of(dim)["short" in name]
        assert found["shared"] <= shared_bytes(dim, form) <= CHIPS["sm_90"].shared_memory, name
        assert found["stack"] <= SPILLED, name
        assert found["instructions"] == ["wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"], name


@pytest.mark.parametrize(
    ("served", "dim", "dtype", "heads", "block_size"),
    [
        (True, 64, torch.float16, 4, 16),
        (True, 80, torch.bfloat16, 4, 16),
        (True, 96, torch.bfloat16, 4, 8),
        (True, 128, torch.bfloat16, 6, 256),
        (True, 192, torch.bfloat16, 128, 16),
        (True, 256, torch.float16, 2, 32),
        (False, 128, torch.float32, 4, 16),
        (False, 32, torch.bfloat16, 4, 16),
        (False, 88, torch.bfloat16, 4, 16),
        (False, 112, torch.bfloat16, 4, 16),
        (False, 512, torch.bfloat16, 4, 16),
        (False, 128, torch.bfloat16, 130, 16),  # more heads to a key than a group of warps has rows
        (False, 128, torch.bfloat16, 4, 12),
        (False, 128, torch.bfloat16, 4, 4),
    ],
)
def test_sizes_that_it_takes(served: bool, dim: int, dtype: torch.dtype, heads: int, block_size: int) -> None:
    q = torch.zeros(1, heads, dim, dtype=dtype)
    pages = torch.zeros(2, block_size, 2, dim, dtype=dtype)
    assert serves(q, pages, AttentionOptions(1.0), CHIPS["sm_90"]) == served


def test_programs_of_a_processor_fit_together() -> None:
    """In its registers, 12 or 8 warps each, and in its shared memory, of which the driver takes 1 KB for each."""
    for most, *forms in FORMS:
        for form in forms:
            programs = max(form.programs, 1)
            threads = 32 * (4 * form.groups + 4)
            assert programs * threads * form.registers <= 65536
            assert programs * (shared_bytes(most, form) + 1024) <= 228 << 10


def test_few_keys_or_few_tiles_have_small_programs() -> None:
    long, short = forms_of(128)
    assert form_of(128, 0, 1000, 132) == form_of(128, 513, 1000, 132) == long
    assert form_of(128, 512, 1000, 132) == form_of(128, 0, 66, 132) == short
    assert form_of(128, 0, 67, 132) == long


@pytest.mark.parametrize(
    ("served", "chip"),
    [
        (True, CHIPS["sm_90"]),
        (False, CHIPS["sm_89"]),
        (False, CHIPS["sm_100"]),
        (False, replace(CHIPS["sm_90"], tma=False)),
        (False, replace(CHIPS["sm_90"], wgmma=False)),
        (False, replace(CHIPS["sm_90"], shared_memory=99 << 10)),
    ],
)
def test_chips_that_it_takes(served: bool, chip: Chip) -> None:
    q = torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    pages = torch.zeros(2, 16, 2, 128, dtype=torch.bfloat16)
    options = AttentionOptions(1.0, window=100, softcap=30.0, sinks=torch.zeros(4))
    assert serves(q, pages, options, chip) == served


def attended(scene: Scene, window: int = 0, shortest: int = 1, form: Form | None = None) -> torch.Tensor:
    """The kernel's result, of three runs that have the same bits: nothing reads what another has not finished."""
    options = scene.options(window)
    if chunk_attention(scene.q, scene.k_pages, options) is None:
        pytest.skip("this is no GPU of Hopper's generation")
    found = [torch.empty(scene.q.shape, dtype=scene.q.dtype, device="cuda") for _ in range(3)]
    for out in found:
        attend_chunks(scene.q, scene.k_pages, scene.v_pages, out, scene.batch, options, shortest, form)
    bits = [out.view(torch.int16) for out in found]
    assert all(torch.equal(out, bits[0]) for out in bits)
    return found[0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "dtype", "softcap", "sinks"),
    [
        (32, 8, 128, 16, torch.bfloat16, 0.0, False),
        (4, 1, 64, 32, torch.float16, 0.0, False),
        (6, 2, 128, 64, torch.bfloat16, 0.0, True),  # three heads in a group: a line of each half stays idle
        (2, 2, 128, 256, torch.bfloat16, 30.0, False),  # blocks larger than a turn
        (128, 2, 64, 8, torch.float16, 0.0, True),
        (5, 1, 80, 16, torch.bfloat16, 0.0, False),
        (14, 2, 80, 8, torch.float16, 50.0, True),
        (8, 8, 96, 128, torch.bfloat16, 0.0, False),
        (16, 2, 96, 16, torch.bfloat16, 0.0, True),
        (8, 2, 160, 16, torch.bfloat16, 0.0, False),
        (12, 4, 192, 64, torch.bfloat16, 0.0, False),
        (7, 1, 192, 256, torch.float16, 30.0, True),
        (16, 8, 256, 16, torch.bfloat16, 50.0, False),
        (4, 1, 256, 32, torch.float16, 0.0, True),
    ],
)
def test_chunks_of_any_length(
    heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, softcap: float, sinks: bool
) -> None:
    """Windows end within a block, at its border and after all keys, and reach over many chunks."""
    scene = Scene(BORDERS, heads, kv_heads, dim, block_size, dtype, softcap=softcap, sinks=sinks).on("cuda")
    for window, form in product((0, 1, 7, 64, 128, 129, 1000, 5000), forms_of(dim)):
        found = attended(scene, window, form=form)
        for row in range(len(BORDERS)):
            assert error(scene, found, row, window) < 5e-3, (window, form, row)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_programs_take_many_tiles_in_turn(dim: int) -> None:
    rows = [(700, 900), (333, 333), (50, 2000), (801, 1300), (640, 640)]
    scene = Scene(rows, 32, 8, dim, 16, torch.bfloat16, sinks=True).on("cuda")
    for window, form in product((0, 100, 1000), forms_of(dim)):
        found = attended(scene, window, form=form)
        for row in range(len(rows)):
            assert error(scene, found, row, window) < 5e-3, (window, form, row)


@pytest.mark.gpu
def test_many_chunks_of_few_queries() -> None:
    scene = Scene([(5 + row % 3, 30 + 17 * row) for row in range(60)], 32, 8, 128, 16, torch.bfloat16).on("cuda")
    found = attended(scene, shortest=5)
    for row in range(0, 60, 7):
        assert error(scene, found, row, 0) < 5e-3, row


@pytest.mark.gpu
def test_queries_may_be_a_view_and_tables_of_many_slots() -> None:
    scene = Scene([(150, 400), (70, 70)], 8, 2, 128, 16, torch.bfloat16).on("cuda")
    wide = torch.full((len(scene.q), 12, 128), 9.0, dtype=torch.bfloat16, device="cuda")
    wide[:, :8] = scene.q
    scene.q = wide[:, :8]
    tables = torch.cat((torch.zeros_like(scene.batch.block_tables), scene.batch.block_tables))
    scene.batch = replace(scene.batch, block_tables=tables, slots=scene.batch.slots + 2)
    out = attended(scene)
    for row in range(2):
        assert error(scene, out, row, 0) < 5e-3, row


@pytest.mark.gpu
def test_shorter_rows_are_left_alone() -> None:
    scene = Scene(BORDERS, 32, 8, 128, 16, torch.bfloat16).on("cuda")
    out = attended(scene, shortest=65)
    counts = torch.tensor([n for n, _ in BORDERS], device="cuda")
    served = torch.repeat_interleave(counts >= 65, counts)
    assert out[~served].isnan().all()
    assert not out[served].isnan().any()
