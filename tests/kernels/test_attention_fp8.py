"""Pages in e4m3: each of its numbers as the kernels widen it, and attention over them in double precision."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from penstock.kernels.attention import E4M3
from penstock.kernels.attention_fp8 import paired_queries, unpack
from tests.kernels.scene import MIXED, Rows, Scene
from tests.kernels.test_attention_triton import IMAGES, PICTURES, SINGLES, check, form

pytestmark = [pytest.mark.usefixtures("one_thread", "poisoned"), pytest.mark.sweep]


@triton.jit
def widen_kernel(pairs, first, second, ASM: tl.constexpr):
    places = tl.arange(0, 128)
    held = tl.load(pairs + places)
    tl.store(first + places, unpack(held, 0, first.dtype.element_ty, ASM))
    tl.store(second + places, unpack(held, 1, first.dtype.element_ty, ASM))


@triton.jit
def split_kernel(x, first, second):
    lines = tl.arange(0, 16)[:, None]
    even, odd, factor = paired_queries(tl.load(x + lines * 32 + tl.arange(0, 32)[None, :]))
    places = lines * 16 + tl.arange(0, 16)[None, :]
    tl.store(first + places, even.to(tl.float32) * factor)
    tl.store(second + places, odd.to(tl.float32) * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_number_is_widened_exactly(dtype: torch.dtype, device: str) -> None:
    held = torch.arange(256, dtype=torch.uint8, device=device).roll(77)
    values = held.view(E4M3).float()
    first, second = (torch.zeros(128, dtype=dtype, device=device) for _ in range(2))
    widen_kernel[(1,)](held.view(torch.int16), first, second, ASM=device == "cuda")
    for nth, found in enumerate((first, second)):
        assert torch.equal(found.float().nan_to_num(999.0), values[nth::2].nan_to_num(999.0))
        signed = ~found.isnan()  # a NaN's sign is the chip's
        assert torch.equal(found.signbit()[signed], values[nth::2].signbit()[signed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_are_split_like_the_pairs(dtype: torch.dtype, device: str) -> None:
    """Those in bfloat16 become numbers in float16, and none of them infinite."""
    x = torch.randn(16, 32, device=device).to(dtype)
    x[3, 7:9] = 60000.0 if dtype == torch.float16 else 1e6
    first, second = (torch.empty(16, 16, device=device) for _ in range(2))
    split_kernel[(1,)](x, first, second)
    torch.testing.assert_close(first, x[:, ::2].float(), atol=2.0**-18, rtol=0.0)
    torch.testing.assert_close(second, x[:, 1::2].float(), atol=2.0**-18, rtol=0.0)


@pytest.mark.parametrize("window", [0, 17])
def test_tokens_of_an_image_see_one_another(window: int, device: str) -> None:
    check(Scene(PICTURES, 4, 2, 32, 8, fp8=True, images=IMAGES), device, form(16, 24), window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap", "programs", "split_keys"),
    [
        (4, 2, 64, 0, 0.0, 1, 0),
        (8, 2, 32, 0, 0.0, 3, 0),
        (8, 2, 32, 0, 0.0, 30, 0),  # more than tiles
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
