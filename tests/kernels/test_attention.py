"""The plain-torch reference itself, held to the definition of attention in double precision, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.attention import GROUP_KEYS, QUERY_PIECE, AttentionBatch, paged_attention, write_kv

Rows = list[tuple[int, int]]  # queries and context of each row


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Scene:
    """Random keys and values of some rows, put into shuffled pages whose every other slot is not a number."""

    def __init__(self, rows: Rows, heads: int, kv_heads: int, dim: int, block_size: int, dtype=torch.float32) -> None:
        random = torch.Generator().manual_seed(len(rows) * 1009 + block_size)
        self.rows = rows
        self.q = torch.randn(sum(n for n, _ in rows), heads, dim, generator=random).to(dtype)
        self.k = [torch.randn(context, kv_heads, dim, generator=random).to(dtype) for _, context in rows]
        self.v = [torch.randn(context, kv_heads, dim, generator=random).to(dtype) for _, context in rows]
        wide = max(-(-context // block_size) for _, context in rows) + 2
        blocks = 1 + len(rows) * wide
        self.tables = (torch.randperm(blocks - 1, generator=random) + 1).int().view(len(rows), wide)
        shape = blocks, block_size, kv_heads, dim
        self.k_pages, self.v_pages = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        new = []
        for row, (queries, context) in enumerate(rows):
            positions = torch.arange(context)
            slots = self.tables[row][positions // block_size].long() * block_size + positions % block_size
            write_kv(self.k[row], self.v[row], self.k_pages, self.v_pages, slots)
            new.append(slots[context - queries :])
        starts = [0, *torch.tensor([n for n, _ in rows]).cumsum(0).tolist()]
        self.batch = AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context=torch.tensor([context for _, context in rows], dtype=torch.int32),
            block_tables=self.tables,
            slot_mapping=torch.cat(new),
            max_query=max(n for n, _ in rows),
            max_context=max(context for _, context in rows),
        )

    def paged(self, window: int = 0) -> Tensor:
        return paged_attention(self.q, self.k_pages, self.v_pages, self.batch, self.q.shape[2] ** -0.5, window)

    def expected(self, window: int = 0) -> Tensor:
        group = self.q.shape[1] // self.k[0].shape[1]
        out, token = [], 0
        for row, (queries, context) in enumerate(self.rows):
            k, v = (side[row].double().repeat_interleave(group, dim=1) for side in (self.k, self.v))
            for position in range(context - queries, context):
                low = max(0, position + 1 - window) if window else 0
                scores = torch.einsum("hd,khd->hk", self.q[token].double(), k[low : position + 1])
                weights = (scores / math.sqrt(self.q.shape[2])).softmax(-1)
                out.append(torch.einsum("hk,khd->hd", weights, v[low : position + 1]))
                token += 1
        return torch.stack(out)


MIXED: Rows = [(1, 5), (7, 7), (1, 1), (1, 33), (5, 21), (1, 16), (1, 17), (20, 20)]


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("window", [0, 1, 6, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_mixed_batch_is_attention(block_size: int, window: int, heads: int, kv_heads: int) -> None:
    scene = Scene(MIXED, heads, kv_heads, 8, block_size)
    torch.testing.assert_close(scene.paged(window).double(), scene.expected(window), atol=2e-6, rtol=1e-5)


def test_chunks_longer_than_a_piece() -> None:
    scene = Scene([(QUERY_PIECE * 2 + 3, QUERY_PIECE * 2 + 40), (1, 9)], 2, 1, 4, 16)
    for window in (0, 50):
        torch.testing.assert_close(scene.paged(window).double(), scene.expected(window), atol=2e-6, rtol=1e-5)


def test_many_single_rows_are_cut_into_groups() -> None:
    rows = [(1, 200 + 7 * row) for row in range(40)]
    scene = Scene(rows, 2, 1, 4, 16)
    torch.testing.assert_close(scene.paged().double(), scene.expected(), atol=2e-6, rtol=1e-5)
    spans = scene.batch.spans[16, 0]
    assert len(spans) > 1
    assert all(span.slots.numel() <= GROUP_KEYS for span in spans)
    assert [span.tokens.start for span in spans[1:]] == [span.tokens.stop for span in spans[:-1]]


def test_one_row_larger_than_a_group_stands_alone() -> None:
    scene = Scene([(1, GROUP_KEYS + 5), (1, 3)], 1, 1, 4, 16)
    torch.testing.assert_close(scene.paged().double(), scene.expected(), atol=2e-6, rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch() -> None:
    together = Scene(MIXED, 4, 2, 8, 16)
    found = together.paged()
    for row, (queries, context) in enumerate(MIXED):
        start = int(together.batch.query_start[row])
        alone = AttentionBatch(
            query_start=torch.tensor([0, queries], dtype=torch.int32),
            context=torch.tensor([context], dtype=torch.int32),
            block_tables=together.tables[row : row + 1],
            slot_mapping=together.batch.slot_mapping[start : start + queries],
            max_query=queries,
            max_context=context,
        )
        q = together.q[start : start + queries]
        single = paged_attention(q, together.k_pages, together.v_pages, alone, 8**-0.5)
        torch.testing.assert_close(single, found[start : start + queries], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Arithmetic is fp32: the result is the exact one, rounded to the type of the queries."""
    scene = Scene(MIXED, 4, 2, 16, 16, dtype)
    found = scene.paged()
    assert found.dtype == dtype
    torch.testing.assert_close(found, scene.expected().to(dtype), atol=1e-3, rtol=torch.finfo(dtype).eps)


def test_strided_queries() -> None:
    scene = Scene(MIXED, 4, 2, 8, 16)
    found = scene.paged()
    scene.q = torch.cat((scene.q, scene.q), dim=1)[:, :4]
    torch.testing.assert_close(scene.paged(), found)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 6])
def test_the_same_on_a_gpu(window: int) -> None:
    scene = Scene(MIXED, 6, 2, 64, 16)
    expected = scene.expected(window)
    batch = AttentionBatch(
        query_start=scene.batch.query_start.cuda(),
        context=scene.batch.context.cuda(),
        block_tables=scene.tables.cuda(),
        slot_mapping=scene.batch.slot_mapping.cuda(),
        max_query=scene.batch.max_query,
        max_context=scene.batch.max_context,
    )
    found = paged_attention(scene.q.cuda(), scene.k_pages.cuda(), scene.v_pages.cuda(), batch, 64**-0.5, window)
    torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=1e-5)


def test_write_leaves_other_slots_alone() -> None:
    k_pages, v_pages = torch.zeros(4, 3, 2, 5), torch.zeros(4, 3, 2, 5)
    k, v = torch.randn(4, 2, 5), torch.randn(4, 2, 5)
    slots = torch.tensor([11, 3, 0, 0])
    write_kv(k, v, k_pages, v_pages, slots)
    assert torch.equal(k_pages[3, 2], k[0])
    assert torch.equal(v_pages[1, 0], v[1])
    assert torch.equal(k_pages[0, 0], k[2]) or torch.equal(k_pages[0, 0], k[3])
    untouched = torch.ones(12, dtype=torch.bool)
    untouched[slots] = False
    assert not k_pages.flatten(0, 1)[untouched].any()
    assert not v_pages.flatten(0, 1)[untouched].any()
