"""Attention over latents: the reference against the definition in double precision, kernels against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import latent_attention_triton as twin
from penstock.kernels.attention_tiling import with_invariant_splits
from penstock.kernels.chip import CHIPS, chip_of
from penstock.kernels.latent_attention import latent_attention, multiply_heads, store_latents
from penstock.kernels.norm import rms_norm
from penstock.kernels.rope import apply_rope, gather_rotation
from penstock.protocol.errors import ConfigError
from tests.kernels.scene import MIXED, Rows, Scene

RANK, DIM = 20, 6  # neither is a power of 2
LONG: Rows = [(1, 140), (2, 133), (1, 3)]


def scene(rows: Rows, heads: int, block_size: int = 16) -> tuple[Scene, Tensor, Tensor]:
    """Rows, pages of latents, and what attention over them is."""
    found = Scene(rows, heads, 1, RANK + DIM, block_size)
    found.v = found.k
    return found, found.k_pages[:, :, 0].contiguous(), found.expected()[..., :RANK]


@pytest.mark.parametrize("block_size", [7, 16])
def test_the_reference_is_attention(block_size: int) -> None:
    own, pages, expected = scene(MIXED, 5, block_size)
    found = latent_attention(own.q, pages, own.batch, RANK, (RANK + DIM) ** -0.5)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads"),
    [(MIXED, 5), ([(1, 5), (1, 40)], 40), ([(19, 50)], 20)],  # few and many queries; groups of heads; one chunk
)
def test_the_kernel_is_attention(rows: Rows, heads: int, invariant: bool, device: str) -> None:
    own, pages, expected = scene(rows, heads)
    own = own.on(device)
    batch = replace(own.batch, invariant=invariant)
    found = twin.attend_latents(own.q, pages.to(device), batch, RANK, (RANK + DIM) ** -0.5)
    torch.testing.assert_close(found.cpu().double(), expected, atol=3e-6, rtol=1e-5)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("by_row", "split_keys"), [(True, 0), (True, 64), (False, 0)])
def test_splits_are_joined(by_row: bool, split_keys: int, device: str) -> None:
    """Three programs share the keys of a tile, evenly or by splits of a fixed size, or ten those of all tiles."""
    own, pages, expected = scene(LONG, 5)
    own, pages, chip = own.on(device), pages.to(device), chip_of(torch.device(device))
    tiling, shape = twin.cut(own.q, pages, own.batch, RANK, 10, chip, tall=False)
    programs = 3 if by_row else 10
    tiling = replace(tiling, programs=programs, by_row=by_row, split_keys=split_keys, min_split_keys=32)
    out = torch.empty(*own.q.shape[:2], RANK, device=device)
    batch = replace(own.batch, arrivals=torch.zeros(64, dtype=torch.int32, device=device))
    twin.attend_tiles(own.q, pages, out, batch, (RANK + DIM) ** -0.5, tiling, shape)
    torch.testing.assert_close(out.cpu().double(), expected, atol=3e-6, rtol=1e-5)
    assert batch.arrivals is not None
    assert not batch.arrivals.any()


def test_a_row_has_the_same_bits_alone(device: str) -> None:
    own, pages, _ = scene(LONG, 5)
    own, pages = own.on(device), pages.to(device)
    whole = twin.attend_latents(own.q, pages, replace(own.batch, invariant=True), RANK, 0.2)
    alone = replace(
        own.batch, query_start=torch.tensor([0, 1], dtype=torch.int32, device=device), context=own.batch.context[1:2],
        slots=own.batch.slots[1:2], invariant=True, max_query=1, max_context=133, spans={}, tiles={},
    )  # fmt: skip
    assert torch.equal(twin.attend_latents(own.q[2:3], pages, alone, RANK, 0.2), whole[2:3])


def test_what_has_no_room_is_refused_by_name() -> None:
    q, pages = torch.empty(1, 4, 4096 + 64), torch.empty(1, 16, 4096 + 64)
    own, _, _ = scene([(1, 3)], 4)
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        twin.cut(q, pages, own.batch, 4096, 4, CHIPS["sm_89"], tall=False)


def test_invariant_tiles_follow_from_the_heads_alone() -> None:
    chip = CHIPS["sm_90"]
    found = set()
    for rows in (MIXED, LONG, [(1, 3)]):
        own, pages, _ = scene(rows, 20)
        tiling, shape = twin.cut(own.q, pages, own.batch, RANK, twin.TILES[0][0], chip, tall=True)
        cut = with_invariant_splits(tiling, shape, chip)
        found.add((cut.block_m, cut.block_n, cut.warps, shape.group, cut.split_keys))
    assert len(found) == 1


@pytest.mark.usefixtures("poisoned")
def test_latents_are_normed_keys_and_queries_turned(device: str) -> None:
    """From views of wider products, into slots of pages and columns of wider queries; the rest stays as it is."""
    random = torch.Generator(device).manual_seed(3)
    product = torch.randn(5, 3 + RANK + DIM, generator=random, device=device)
    queries = torch.randn(5, 9, 4 + DIM, generator=random, device=device)[..., 4:]
    weight, table = torch.rand(RANK, device=device) + 0.5, torch.randn(40, DIM, generator=random, device=device)
    rotation = gather_rotation(table, torch.tensor([3, 1, 39, 0, 7], device=device))
    slots = torch.tensor([5, 31, 1, 18, 0], device=device)
    found = []
    for store in (store_latents, twin.store_by_token):
        pages = torch.full((2, 16, RANK + DIM), 7.0, device=device)
        turned = torch.full((5, 9, RANK + DIM), 7.0, device=device)
        latents, keys = product[:, 3 : 3 + RANK], product[:, 3 + RANK :]
        store(latents, keys, weight, 1e-6, queries, turned[..., RANK:], rotation, pages, slots)
        found.append((pages, turned))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-6, rtol=1e-5)
    pages, turned = found[0]
    torch.testing.assert_close(turned[..., RANK:], apply_rope(queries, rotation))
    assert (turned[..., :RANK] == 7).all()
    torch.testing.assert_close(pages.flatten(0, 1)[slots, :RANK], rms_norm(product[:, 3 : 3 + RANK], weight, 1e-6))
    assert (pages.flatten(0, 1)[2:5] == 7).all()


def test_heads_are_multiplied_by_their_own_matrices(device: str) -> None:
    """Both halves of an expansion, one of which is a transpose, and the same bits for a token alone."""
    x = torch.randn(37, 3, 50, device=device)[..., :33]
    for weights in (torch.randn(3, 33, 70, device=device), torch.randn(3, 70, 33, device=device).transpose(1, 2)):
        out, other = (torch.zeros(37, 3, 80, device=device)[..., :70] for _ in range(2))
        multiply_heads(x, weights, other, False)
        torch.testing.assert_close(other, torch.einsum("thi,hio->tho", x, weights), atol=2e-5, rtol=1e-4)
        twin.multiply_heads_by_tiles(x, weights, out)
        torch.testing.assert_close(out, other, atol=2e-5, rtol=1e-4)
        alone = torch.zeros(1, 3, 70, device=device)
        twin.multiply_heads_by_tiles(x[5:6], weights, alone)
        assert torch.equal(alone[0], out[5])
