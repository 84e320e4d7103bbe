"""Pages in e4m3: each of its numbers as the kernels widen it, and attention over them in double precision."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from penstock.kernels.attention import E4M3
from penstock.kernels.attention_fp8 import split_pairs, unpack
from tests.kernels.scene import MIXED, Rows, Scene
from tests.kernels.test_attention_triton import SINGLES, check, form

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


@triton.jit
def widen_kernel(pairs, first, second, ASM: tl.constexpr):
    places = tl.arange(0, 128)
    held = tl.load(pairs + places)
    tl.store(first + places, unpack(held, 0, first.dtype.element_ty, ASM))
    tl.store(second + places, unpack(held, 1, first.dtype.element_ty, ASM))


@triton.jit
def split_kernel(x, first, second):
    lines, columns = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    even, odd = split_pairs(tl.load(x + lines * 32 + columns))
    places = lines * 16 + tl.arange(0, 16)[None, :]
    tl.store(first + places, even)
    tl.store(second + places, odd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_is_widened_exactly(dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes[codes & 0x7F == 0x7F] = 0  # no number
    held, values = codes.roll(77), codes.roll(77).view(E4M3).float()
    first, second = (torch.zeros(128, dtype=dtype, device=device) for _ in range(2))
    widen_kernel[(1,)](held.view(torch.int16), first, second, ASM=device == "cuda")
    for nth, found in enumerate((first, second)):
        assert torch.equal(found.float(), values[nth::2])
        assert torch.equal(found.signbit(), values[nth::2].signbit())


def test_columns_are_split_like_the_pairs(device: str) -> None:
    x = torch.randn(16, 32, device=device)
    first, second = (torch.empty(16, 16, device=device) for _ in range(2))
    split_kernel[(1,)](x, first, second)
    assert torch.equal(first, x[:, ::2])
    assert torch.equal(second, x[:, 1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap", "programs", "split_keys"),
    [
        (4, 2, 64, 0, 0.0, 1, 0),
        (8, 2, 32, 0, 0.0, 3, 0),
        (8, 2, 24, 0, 0.0, 2, 32),  # lanes past the head stay idle
        (2, 2, 16, 6, 5.0, 2, 0),
        (4, 4, 32, 17, 0.0, 1, 32),
    ],
)
@pytest.mark.parametrize("rows", [MIXED, SINGLES], ids=["mixed", "singles"])
def test_pages_in_e4m3(
    rows: Rows, heads: int, kv_heads: int, dim: int, window: int, softcap: float, programs: int, split_keys: int,
    dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    scene = Scene(rows, heads, kv_heads, dim, 8, dtype, softcap=softcap, sinks=softcap > 0, fp8=True)
    by_row = rows == SINGLES
    check(scene, device, form(16, programs, by_row=by_row, split_keys=split_keys), window)
