"""Which graphs there are, and in which order they are captured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.engine_core.execution.cuda_graphs import (
    DRAFTED_MOST,
    MIXED_MOST,
    PREWARMED_SIZES,
    CaptureOrder,
    ForwardGraphs,
    GraphSizes,
    Memory,
    SamplingShape,
    Shape,
    absorbed_pairs,
    decode_sizes,
    entry_lengths,
    graph_sizes,
    kept_tokens,
    mixed_sizes,
    sampling_shapes,
    shapes,
    size_of,
)
from penstock.engine_core.execution.forward import Forward
from penstock.engine_core.execution.input_batch import HostRows, mixed_rows
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.models.layer_spec import LatentSpec
from penstock.protocol.steps import StepPlan
from tests.engine_core.execution.harness import column, tiny_spec

SIZES = GraphSizes(decode=(1, 2, 4, 6), mixed=(16, 32), entries=(1, 2, 4, 6), rows=6, max_context=100)


def test_decode_sizes_reach_the_most_rows_and_waste_little() -> None:
    assert decode_sizes(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
    assert decode_sizes(1) == (1,)
    assert decode_sizes(6) == (1, 2, 4, 6)
    assert decode_sizes(100)[-2:] == (96, 100)


@pytest.mark.parametrize("most", [1, 3, 17, 300, 4096])
def test_every_count_of_rows_has_a_size(most: int) -> None:
    sizes = decode_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(9, most + 1):
        assert min(size for size in sizes if size >= rows) <= 1.9 * rows


def test_mixed_sizes_waste_a_quarter_at_most() -> None:
    sizes = mixed_sizes(2048)
    assert sizes[:7] == (8, 16, 32, 48, 64, 80, 96)  # the first for one row with a few drafts
    assert sizes[-1] == 2048
    assert len(sizes) < 32
    assert all(after - before <= max(16, before // 4 + 1) for before, after in pairwise(sizes))
    assert mixed_sizes(7) == ()
    assert mixed_sizes(15) == (8,)
    assert mixed_sizes(100)[-1] == 96


def test_a_model_that_keeps_the_device_busy_has_graphs_for_small_steps_alone() -> None:
    large = graph_sizes(32, 8_000_000_000, 256, 8192, 40960)
    small = graph_sizes(28, 600_000_000, 256, 8192, 40960)
    tiny = graph_sizes(4, 3_000_000, 256, 8192, 1024)
    assert large.mixed[-1] == 1024
    assert small.mixed[-1] == tiny.mixed[-1] == MIXED_MOST
    hybrid = graph_sizes(32, 8_400_000_000, 256, 8192, 40960, recurrent=24)
    assert hybrid.mixed[-1] == 1536, "an H200 took 31 ms for so many tokens of Qwen3.5-9B, its host 40 to launch them"
    assert large.decode == small.decode == decode_sizes(256)
    assert small.entries == decode_sizes(320)
    assert set(decode_sizes(256)) < set(small.entries), "steps without drafts are padded no further"
    assert graph_sizes(28, 600_000_000, 4, 100, 40960).mixed[-1] == 96


def test_every_row_may_have_drafts_within_a_bound() -> None:
    sizes = [graph_sizes(32, 8_000_000_000, seqs, 8192, 4096, drafts=4).entries[-1] for seqs in (1, 64, 256, 1024)]
    assert sizes == [5, 320, DRAFTED_MOST, 1280]


def test_shapes_bound_rows_and_entries() -> None:
    assert shapes(SIZES) == (
        Shape(1, 1, 1, True), Shape(2, 2, 2, True), Shape(4, 4, 4, True), Shape(6, 6, 6, True),
        Shape(16, 6, 6, False), Shape(32, 6, 6, False),
    )  # fmt: skip
    assert Shape(16, 6, 4, False).lengths() == (7, 6, 6, 16, 0, 4)
    assert Shape(16, 6, 4, False).lengths(recurrent=True) == (7, 6, 6, 16, 16, 4)
    assert Shape(6, 6, 6, True).lengths(recurrent=True) == (7, 6, 6, 6, 0, 6)
    assert entry_lengths(4) == (5, 4, 4, 4, 4)


def test_the_largest_of_each_kind_come_first_then_the_rest() -> None:
    order = CaptureOrder(shapes(SIZES), sampling_shapes(SIZES))
    assert [size_of(what) for what in order.largest] == [32, 6, 6]
    assert [size_of(what) for what in order.others] == [16, 4, 4, 2, 2, 1, 1]
    assert {type(what) for what in order.largest} == {type(what) for what in order.others} == {Shape, SamplingShape}
    assert order.all == [*order.largest, *order.others]


def test_what_may_take_kernels_of_its_own_is_prewarmed() -> None:
    large = graph_sizes(28, 600_000_000, 256, 8192, 1024)
    order = CaptureOrder(shapes(large), sampling_shapes(large))
    assert {size_of(what) for what in order.prewarmed} == {*PREWARMED_SIZES, 256, 320, 2048}
    assert len(order.prewarmed) < len(order.all) / 2


def test_steps_with_adapters_have_twins_of_both_halves() -> None:
    sizes = replace(SIZES, adapters=True)
    largest = CaptureOrder(shapes(sizes), sampling_shapes(sizes)).largest
    assert [size_of(what) for what in largest] == [32, 32, 6, 6, 6, 6]
    assert sampling_shapes(sizes)[3:5] == (SamplingShape(6), SamplingShape(1, adapted=True))


def test_steps_with_images_have_twins_of_some_mixed_graphs() -> None:
    sizes = graph_sizes(28, 600_000_000, 256, 8192, 1024, images=True)
    assert set(sizes.seeing) <= set(sizes.mixed)
    assert sizes.seeing[-1] == sizes.mixed[-1]
    assert all(after <= 1.5 * before for before, after in pairwise(sizes.seeing))
    assert graph_sizes(28, 600_000_000, 256, 8192, 1024).seeing == ()
    small = replace(SIZES, seeing=(32,))
    assert [shape for shape in shapes(small) if shape.seeing] == [Shape(32, 6, 6, False, seeing=True)]
    largest = CaptureOrder(shapes(small), sampling_shapes(small)).largest
    assert [size_of(what) for what in largest] == [32, 32, 6, 6]
    assert kept_tokens(replace(SIZES, seeing=(16, 32))) == kept_tokens(SIZES) + 16


def test_steps_with_images_and_adapters_have_graphs_of_their_own() -> None:
    both = replace(SIZES, seeing=(16, 32), adapters=True)
    found = [shape for shape in shapes(both) if shape.seeing and shape.adapted]
    assert [(shape.tokens, shape.plain) for shape in found] == [(16, False), (32, False)]
    assert kept_tokens(both) == 2 * kept_tokens(replace(both, adapters=False))


def test_nothing_is_captured_for_steps_that_have_no_graph() -> None:
    assert CaptureOrder((Shape(2, 2, 2, True),), (SamplingShape(2),)).all == [Shape(2, 2, 2, True), SamplingShape(2)]
    assert CaptureOrder((Shape(2, 2, 2, True),), ()).all == [Shape(2, 2, 2, True)]


def test_all_but_the_largest_keep_their_hidden_states_beside_those_of_the_largest() -> None:
    assert kept_tokens(SIZES) == 1 + 2 + 4 + 16
    assert kept_tokens(GraphSizes(decode=(6,), mixed=(), entries=(6,), rows=6, max_context=100)) == 0


class Uncaptured(Memory):
    """Of graphs that nobody replays."""

    def __init__(self) -> None:
        pass

    def capture(self, work: Any, *, run: bool) -> tuple[Any, Any]:
        return None, None


def chunk(first: int, count: int) -> HostRows:
    return mixed_rows(np.zeros(0, np.int32), StepPlan(step=1, epoch=1, chunks=column(0, first, count, 1)))


def test_long_rows_that_see_many_keys_have_no_graph() -> None:
    """A graph absorbs all queries. How many are too many follows from the heads of a rank."""
    sizes = replace(SIZES, mixed=(16, 256), long_pairs=200 * 500)
    forward: Any = type("Stateless", (), {"states": None})()
    graphs = ForwardGraphs(
        cast("Forward", forward), shapes(sizes), torch.zeros(6, 4), sizes, 6, Upload(torch.device("cpu")), Uncaptured()
    )
    assert graphs.fitting(chunk(0, 200)) is None, "before any is captured"
    graphs.capture(shapes(sizes)[-1], run=False)
    for rows, fits in ((chunk(0, 200), True), (chunk(500, 200), False), (chunk(90_000, 100), True)):
        assert (graphs.fitting(rows) is not None) is fits
    spec = tiny_spec()
    assert absorbed_pairs(spec, 1) == 0
    glm = LatentSpec(rank=512, rope_dim=64, nope_dim=192, value_dim=256)
    latent = spec.with_attention(latent=glm, heads=20, kv_heads=20, head_dim=576)
    pairs = absorbed_pairs(latent, 1)
    assert 1024 * 1025 // 2 < pairs < 2048 * 2049 // 2
    assert absorbed_pairs(latent, 2) == pytest.approx(2 * pairs, abs=1)
    assert graph_sizes(47, 3_000_000_000, 256, 8192, 40960, long_pairs=pairs).long_pairs == pairs
