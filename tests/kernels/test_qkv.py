"""Norm, turn and page write: the plain-torch reference, and the kernel held to it in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import E4M3, LARGEST
from penstock.kernels.records import HeadNorms, Rotation
from penstock.kernels.rope import apply_rope, gather_rotation, rotate_and_store
from penstock.kernels.rope_triton import rotate_heads
from tests.cuda import no_synchronization

pytestmark = [pytest.mark.usefixtures("one_thread", "poisoned"), pytest.mark.sweep]

EPS = 1e-5


class Product:
    """A fused product of some tokens, their angles and pages that stand full of NaN."""

    def __init__(
        self, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32, block_size: int = 8
    ) -> None:
        random = torch.Generator().manual_seed(tokens * 131 + dim)
        fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=random).to(dtype).view(tokens, -1, dim)
        self.q, self.k, self.v = fused.split((heads, kv_heads, kv_heads), 1)
        angles = torch.rand(tokens + 5, dim // 2, generator=random) * 7
        positions = torch.randperm(tokens + 5, generator=random)[:tokens]
        self.rotation = gather_rotation(torch.cat((angles.cos(), angles.sin()), 1), positions)
        blocks = tokens // block_size + 2
        self.slots = torch.randperm((blocks - 1) * block_size, generator=random)[:tokens] + block_size
        self.kv_scales = torch.rand(2, kv_heads, generator=random) / 256 + 1 / 512  # numbers beyond 448 are among them
        shape = blocks, block_size, kv_heads, dim
        self.pages = tuple(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        weights = (torch.randn(dim, generator=random).to(dtype) for _ in range(2))
        self.norms = HeadNorms(*weights, EPS)
        self.scale = torch.rand(tokens, generator=random) + 0.5

    def expected(self, norms: str) -> tuple[Tensor, Tensor]:
        """Turned queries and keys in double precision."""
        turned = []
        for x, weight in ((self.q, self.norms.query), (self.k, self.norms.key)):
            found = normed(x.double(), weight) if norms == "before" else x.double()
            found = apply_rope(found, Rotation(self.rotation.cos.double(), self.rotation.sin.double()))
            turned.append(normed(found, weight) if norms == "behind" else found)
        scale = self.rotation.query_scale
        return turned[0] if scale is None else turned[0] * scale.double()[:, None, None], turned[1]

    def check(self, q: Tensor, norms: str) -> None:
        dtype = self.q.dtype
        tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
        expected_q, expected_k = self.expected(norms)
        assert q.dtype == dtype
        torch.testing.assert_close(q.double(), expected_q, **tolerance)
        k_pages, v_pages = (pages.flatten(0, 1) for pages in self.pages)
        torch.testing.assert_close(k_pages[self.slots].double(), expected_k, **tolerance)
        assert torch.equal(v_pages[self.slots], self.v)
        untouched = torch.ones(len(k_pages), dtype=torch.bool)
        untouched[self.slots] = False
        assert k_pages[untouched].isnan().all()
        assert v_pages[untouched].isnan().all()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def norms_of(product: Product, where: str, device: str = "cpu") -> HeadNorms | None:
    query, key, *_ = product.norms
    return HeadNorms(query.to(device), key.to(device), EPS, where == "behind") if where else None


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("where", ["", "before", "behind"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 8)])
def test_reference(heads: int, kv_heads: int, dim: int, where: str, scaled: bool) -> None:
    product = Product(11, heads, kv_heads, dim)
    if scaled:
        product.rotation = product.rotation._replace(query_scale=product.scale)
    norms = norms_of(product, where)
    q = rotate_and_store(product.q, product.k, product.v, product.rotation, *product.pages, product.slots, norms)
    product.check(q, where)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("where", ["", "before", "behind"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [
        (4, 2, 32),
        (9, 9, 64),  # more heads than a program takes
        (8, 1, 128),
        (3, 3, 24),  # lanes past the half stay idle
    ],
)
def test_kernel(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, where: str, scaled: bool, device: str) -> None:
    product = Product(5, heads, kv_heads, dim, dtype)
    cos, sin, _ = product.rotation
    product.rotation = Rotation(cos, sin, product.scale if scaled else None)
    rotation = Rotation(cos.to(device), sin.to(device), product.scale.to(device) if scaled else None)
    fused = torch.cat((product.q, product.k, product.v), 1).to(device)
    pages = [side.to(device) for side in product.pages]
    found = rotate_heads(
        *fused.split((heads, kv_heads, kv_heads), 1), rotation, *pages, product.slots.to(device),
        norms_of(product, where, device), None,
    )  # fmt: skip
    product.pages = tuple(side.cpu() for side in pages)
    product.check(found.cpu(), where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_both_write_the_same_e4m3(dtype: torch.dtype, device: str) -> None:
    """Angles of zero, so that both round the same numbers."""
    product = Product(5, 4, 2, 32, dtype)
    rotation = Rotation(torch.ones(5, 1, 32), torch.zeros(5, 1, 32))
    sides = [[side.to(E4M3).to(place) for side in product.pages] for place in ("cpu", device)]
    fused = torch.cat((product.q, product.k, product.v), 1)
    scales = product.kv_scales
    rotate_and_store(*fused.split((4, 2, 2), 1), rotation, *sides[0], product.slots, None, scales)
    turned = Rotation(*(part.to(device) for part in rotation[:2]))
    slots = product.slots.to(device)
    rotate_heads(*fused.to(device).split((4, 2, 2), 1), turned, *sides[1], slots, None, scales.to(device))
    for expected, found in zip(*sides, strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
        assert (expected.float().abs() == LARGEST).any()


@pytest.mark.gpu
def test_a_gpu_is_served_by_the_kernel() -> None:
    product = Product(300, 32, 8, 128, torch.bfloat16)
    fused = torch.cat((product.q, product.k, product.v), 1).cuda()
    pages = [side.cuda() for side in product.pages]
    with no_synchronization():
        slots, (cos, sin, _) = product.slots.to("cuda", non_blocking=True), product.rotation
        rotation = Rotation(cos.to("cuda", non_blocking=True), sin.to("cuda", non_blocking=True))
        found = rotate_and_store(*fused.split((32, 8, 8), 1), rotation, *pages, slots)
    product.pages = tuple(side.cpu() for side in pages)
    product.check(found.cpu(), "")


@pytest.mark.parametrize("dim", [32, 24])
@pytest.mark.parametrize("kernel", [False, True])
def test_values_may_have_a_norm_and_be_what_keys_are_made_of(kernel: bool, dim: int, device: str) -> None:
    product = Product(5, 4, 2, dim)
    product.v = product.k
    norms = HeadNorms(product.norms.query, product.norms.key, EPS, values=True)
    place = device if kernel else "cpu"
    rotation = Rotation(*(part.to(place) for part in product.rotation[:2]))
    pages = [side.to(place) for side in product.pages]
    q, k = torch.cat((product.q, product.k), 1).to(place).split((4, 2), 1)
    norms = norms._replace(query=norms.query.to(place), key=norms.key.to(place))
    store = (lambda *own: rotate_heads(*own, None)) if kernel else rotate_and_store
    product.pages, slots = tuple(pages), product.slots.to(place)
    found = store(q, k, k, rotation, *pages, slots, norms)
    product.pages = tuple(side.cpu() for side in pages)
    keys, values = (side.flatten(0, 1)[product.slots] for side in product.pages)
    torch.testing.assert_close(values.double(), normed(product.v.double(), torch.ones(dim)), rtol=1e-6, atol=1e-6)
    expected = product.expected("before")
    torch.testing.assert_close(found.cpu().double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(keys.double(), expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", [False, True])
def test_queries_alone_are_turned_where_keys_are_another_layers(kernel: bool, device: str) -> None:
    product = Product(5, 4, 2, 24)
    place = device if kernel else "cpu"
    pages = [side.to(place) for side in product.pages]
    q, slots = product.q.to(place), product.slots.to(place)
    rotation = Rotation(*(part.to(place) for part in product.rotation[:2]))
    norms = norms_of(product, "before", place)
    found = (
        rotate_heads(q, q[:, :0], q[:, :0], rotation, *pages, slots, norms, None)
        if kernel
        else rotate_and_store(q, q[:, :0], q[:, :0], rotation, *pages, slots, norms)
    )
    torch.testing.assert_close(found.cpu().double(), product.expected("before")[0], rtol=1e-6, atol=1e-6)
    assert all(side.isnan().all() for side in pages)
