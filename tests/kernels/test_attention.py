"""The plain-torch reference itself, held to the definition of attention in double precision, token by token."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.attention import GROUP_NUMBERS, QUERY_PIECE, paged_attention, quantized, write_kv
from penstock.kernels.records import AttentionBatch
from tests.kernels.scene import MIXED, Images, Rows, Scene

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("window", [0, 1, 6, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_mixed_batch_is_attention(block_size: int, window: int, heads: int, kv_heads: int) -> None:
    scene = Scene(MIXED, heads, kv_heads, 8, block_size)
    torch.testing.assert_close(scene.paged(window).double(), scene.expected(window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4)])
def test_softcaps_and_sinks(softcap: float, sinks: bool, window: int, heads: int, kv_heads: int) -> None:
    scene = Scene(MIXED, heads, kv_heads, 8, 16, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(scene.paged(window).double(), scene.expected(window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (6, 1.5)])
def test_pages_in_e4m3(window: int, softcap: float) -> None:
    scene = Scene(MIXED, 6, 2, 8, 16, softcap=softcap, sinks=softcap > 0, fp8=True)
    torch.testing.assert_close(scene.paged(window).double(), scene.expected(window), atol=4e-6, rtol=1e-5)


def test_numbers_beyond_e4m3_are_its_largest_and_no_number_stays_none() -> None:
    x = torch.tensor([[[1e9, -1e9, 5.0, torch.nan]], [[448.0, 0.0, -1e-9, torch.inf]]])
    found = quantized(x, torch.tensor([0.5])).float()
    expected = torch.tensor([[[448.0, -448.0, 10.0, torch.nan]], [[448.0, 0.0, 0.0, 448.0]]])
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_chunks_longer_than_a_piece() -> None:
    scene = Scene([(QUERY_PIECE * 2 + 3, QUERY_PIECE * 2 + 40), (1, 9)], 2, 1, 4, 16)
    for window in (0, 50):
        torch.testing.assert_close(scene.paged(window).double(), scene.expected(window), atol=2e-6, rtol=1e-5)


PICTURES: Rows = [(40, 60), (1, 9), (6, 6), (20, 20), (1, 30)]
IMAGES: Images = [(0, 16, 23), (0, 25, 42), (0, 42, 60), (2, 0, 6), (3, 19, 20)]


@pytest.mark.parametrize("window", [0, 1, 6, 30])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_tokens_of_an_image_see_one_another(window: int, softcap: float) -> None:
    """One image has tokens in pages already, one stands behind another, one is a single token."""
    scene = Scene(PICTURES, 4, 2, 8, 16, softcap=softcap, images=IMAGES)
    torch.testing.assert_close(scene.paged(window).double(), scene.expected(window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 50])
def test_an_image_longer_than_a_piece(window: int) -> None:
    scene = Scene([(QUERY_PIECE * 2 + 3, QUERY_PIECE * 2 + 40)], 2, 1, 4, 16, images=[(0, 39, 39 + 2 * QUERY_PIECE)])
    torch.testing.assert_close(scene.paged(window).double(), scene.expected(window), atol=2e-6, rtol=1e-5)


def test_many_single_rows_are_cut_into_groups() -> None:
    rows = [(1, 200 + 7 * row) for row in range(400)]
    scene = Scene(rows, 2, 1, 4, 16)
    torch.testing.assert_close(scene.paged().double(), scene.expected(), atol=2e-6, rtol=1e-5)
    found = scene.batch.spans[16, 1, 4, 0]
    spans = found.spans
    assert len(spans) > 1
    assert all(4 * span.slots.numel() <= GROUP_NUMBERS for span in spans)
    assert found.memory.shape == (2, max(span.slots.numel() for span in spans), 1, 4)
    assert [span.tokens.start for span in spans[1:]] == [span.tokens.stop for span in spans[:-1]]


def test_one_row_larger_than_a_group_stands_alone() -> None:
    scene = Scene([(1, GROUP_NUMBERS // 4 + 5), (1, 3)], 1, 1, 4, 16)
    torch.testing.assert_close(scene.paged().double(), scene.expected(), atol=2e-6, rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch() -> None:
    together = Scene(MIXED, 4, 2, 8, 16)
    found = together.paged()
    for row, (queries, context) in enumerate(MIXED):
        start = int(together.batch.query_start[row])
        alone = AttentionBatch(
            query_start=torch.tensor([0, queries], dtype=torch.int32),
            context=torch.tensor([context], dtype=torch.int32),
            slots=together.batch.slots[row : row + 1],
            block_tables=together.batch.block_tables,
            slot_mapping=together.batch.slot_mapping[start : start + queries],
            max_query=queries,
            max_context=context,
        )
        q = together.q[start : start + queries]
        single = paged_attention(q, together.k_pages, together.v_pages, alone, together.options())
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
