"""Attention over expanded latents: against the definition in double precision, and in pieces of heads and keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine_core.execution.long_rows import find_long_rows
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels import latent_expansion
from penstock.kernels.attention_device import attend_long_rows
from penstock.kernels.chip import CHIPS
from penstock.kernels.latent_expansion import BLOCK, MEMORY, attend_expanded, memory_bytes, others_of
from penstock.kernels.records import AttentionBatch
from tests.kernels.scene import Rows, Scene

RANK, DIM, NOPE, HEADS = 20, 6, 10, 5  # rows of a key of 16 numbers, and none of these is a power of 2
MIXED: Rows = [(1, 5), (9, 9), (3, 33), (8, 70), (20, 150), (2, 2)]
LONG: Rows = [(19, 50), (8, 8)]
SHORTEST = 8
TINY = 1  # bytes of memory: those of one head are taken


class Latents(NamedTuple):
    """A batch, what it attends with, and the same in double precision."""

    batch: AttentionBatch
    q: Tensor
    pages: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    expected: Tensor

    def attended(self, memory: int = MEMORY) -> Tensor:
        out = torch.full((len(self.q), HEADS, self.values.shape[2]), 7.0, dtype=self.q.dtype, device=self.q.device)
        attend_expanded(self.q, self.pages, self.batch, self.keys, self.values, self.scale, out, memory)
        return out

    def long_tokens(self, rows: Rows) -> Tensor:
        return torch.cat([torch.full((count,), count >= SHORTEST) for count, _ in rows])


def latents(rows: Rows, value: int = 7, block_size: int = 16, device: str = "cpu") -> Latents:
    own = Scene(rows, HEADS, 1, RANK + DIM, block_size)
    random = torch.Generator().manual_seed(value)
    q = torch.randn(len(own.q), HEADS, NOPE + DIM, generator=random)
    both = torch.randn(HEADS, NOPE + value, RANK, generator=random) / RANK**0.5
    keys, values = both[:, :NOPE].transpose(1, 2), both[:, NOPE:].transpose(1, 2)
    own.k = [torch.cat((x[:, 0, :RANK] @ keys, x[:, 0, RANK:].expand(HEADS, -1, -1)), 2).transpose(0, 1)
             for x in own.k]  # fmt: skip
    page_rows = own.k_pages[:, :, 0].contiguous()
    own.v = [torch.zeros_like(k) for k in own.k]
    for row, (_, context) in enumerate(rows):
        places = torch.arange(context)
        slots = own.tables[row][places // block_size].long() * block_size + places % block_size
        own.v[row] = (page_rows.flatten(0, 1)[slots, :RANK] @ values).transpose(0, 1)
    own.q = q
    starts = np.array([context - count for count, context in rows], np.int32)
    long_rows = find_long_rows(own.batch.query_start.numpy(), starts, Upload(torch.device(device)), SHORTEST)
    expected, batch = own.expected(), replace(own.on(device).batch, long_rows=long_rows)
    given = (part.to(device) for part in (q, page_rows, keys, values))
    return Latents(batch, *given, (NOPE + DIM) ** -0.5, expected)


@pytest.fixture(params=["reference", "kernel"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernel":
        monkeypatch.setattr(latent_expansion, "attend", attend_long_rows)
    return str(request.param)


@pytest.mark.usefixtures("poisoned", "attention")
@pytest.mark.parametrize("rows", [MIXED, LONG], ids=["long and short", "long alone"])
@pytest.mark.parametrize("value", [7, 21])  # narrower and wider than keys
def test_it_is_attention_over_keys_and_values_of_each_head(
    rows: Rows, value: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in memory for one head. Tokens of other rows are left alone."""
    monkeypatch.setattr(latent_expansion, "GROUP_KEYS", 6 * BLOCK)
    own = latents(rows, value, device=device)
    long = own.long_tokens(rows)
    for memory in (1 << 20, TINY):
        found = own.attended(memory).cpu()
        torch.testing.assert_close(found[long].double(), own.expected[long], atol=3e-6, rtol=1e-5)
        assert (found[~long] == 7).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("pieces", ["keys", "groups"])
def test_latents_are_expanded_piece_by_piece(pieces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some keys after the others, and each row for itself."""
    if pieces == "keys":
        monkeypatch.setattr(latent_expansion, "LATENTS", 48)
    else:
        monkeypatch.setattr("penstock.engine_core.execution.long_rows.GROUP_KEYS", BLOCK)
    own = latents(MIXED, block_size=7)
    assert own.batch.long_rows is not None
    assert len(own.batch.long_rows.groups) == (1 if pieces == "keys" else 3)
    long = own.long_tokens(MIXED)
    torch.testing.assert_close(own.attended(1 << 20)[long].double(), own.expected[long], atol=3e-6, rtol=1e-5)


def test_layers_of_a_step_share_what_is_found_and_groups_of_pages_do_not() -> None:
    own = latents(MIXED)
    own.attended()
    held = dict(own.batch.expansions)
    own.attended()
    assert held
    assert all(own.batch.expansions[key] is value for key, value in held.items())
    other = replace(own.batch, others=((own.batch.block_tables, own.batch.slot_mapping),)).of_group(1)
    assert not other.expansions
    assert other.long_rows is own.batch.long_rows


def test_the_other_rows_are_a_batch() -> None:
    own = latents(MIXED)
    others = others_of(own.batch)
    assert others.query_start.tolist() == [0, 1, 4, 6]
    assert others.context.tolist() == [5, 33, 2]
    assert others.slots.tolist() == [5, 3, 0]
    assert (others.max_query, others.max_context) == (3, own.batch.max_context)
    assert others.long_rows is None
    assert own.batch.long_rows is not None
    assert own.batch.long_rows.others is not None
    assert own.batch.long_rows.others.tokens.tolist() == [0, 10, 11, 12, 41, 42]


def test_memory_follows_from_the_longest_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start measures it by one chunk; the widest head at the longest length has room in any case."""
    assert memory_bytes(8192, 256, 2) == MEMORY
    assert memory_bytes(1_000_001, 256, 2) == 2 * 1_000_064 * 512
    taken: list[tuple[int, ...]] = []
    plain: Callable[..., Tensor] = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: (taken.append(shape), plain(*shape, **options))[1])
    for rows in (MIXED, LONG):
        latents(rows).attended(1 << 20)
    assert [shape for shape in taken if len(shape) == 1 and shape[0] == (1 << 20) // 4] == [((1 << 20) // 4,)] * 2


def test_one_kernel_serves_any_number_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have one head, so that nothing is compiled when a longer context leaves room for fewer heads at once."""
    shapes: list[tuple[int, ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, options: object) -> Tensor:
        shapes.append((*q.shape[1:], *k.shape[1:], len(batch.context)))
        return torch.zeros_like(q)

    monkeypatch.setattr(latent_expansion, "attend", attend)
    monkeypatch.setattr(latent_expansion, "GROUP_KEYS", 8 * BLOCK)
    own = latents([(8, 500)])
    own.attended(memory_bytes(8 * BLOCK, 16, 4, TINY) * 2)
    assert shapes == [(1, 16, BLOCK, 1, 16, heads) for heads in (1, 2, 2)]


def test_published_heads_have_hopper_s_kernel() -> None:
    from penstock.kernels.attention_hopper import serves
    from penstock.kernels.records import AttentionOptions

    for width in (192, 256):  # DeepSeek-V2 and V3, GLM-4.7-Flash
        q = torch.zeros(1, 1, width, dtype=torch.bfloat16)
        pages = torch.zeros(2, BLOCK, 1, width, dtype=torch.bfloat16)
        assert serves(q, pages, AttentionOptions(1.0), CHIPS["sm_90"])
