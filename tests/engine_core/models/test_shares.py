"""What ranks share, in numbers: sizes that fit, and what is said of those that do not."""

from __future__ import annotations

import pytest

from penstock.engine_core.models.sharding import check_ranks, part_spec, rank_spec, shared_evenly, vocabulary_share
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.errors import ConfigError
from tests.engine_core.models.specs import resized, small_experts
from tests.engine_core.models.test_layers import SPEC

LARGE = resized(SPEC, heads=64, kv_heads=8, head_dim=128, intermediate=28672)


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(1, 64, 8), (2, 32, 4), (8, 8, 1), (16, 4, 1), (64, 1, 1)])
def test_a_rank_has_its_share_of_the_heads(size: int, heads: int, kv_heads: int) -> None:
    check_ranks(LARGE, size)
    found = rank_spec(LARGE, size)
    assert (found.attention.heads, found.attention.kv_heads) == (heads, kv_heads)
    assert resized(found, heads=64, kv_heads=8) == LARGE


def refused(spec: ModelSpec, size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        check_ranks(spec, size)
    assert caught.value.option == "--tensor-parallel-size"
    assert caught.value.value == size
    assert not shared_evenly(spec, size)
    return str(caught.value)


def test_heads_that_ranks_cannot_share_are_told_in_numbers() -> None:
    said = refused(LARGE, 3)
    assert "64 attention heads" in said
    assert "one of 1, 2, 4, 8, 16, 32, 64" in said


def test_pairs_are_split_or_repeated_but_never_cut() -> None:
    spec = resized(SPEC, heads=12, kv_heads=6, intermediate=48)
    assert "6 key-value heads" in refused(spec, 4)
    for size in (2, 3, 6, 12):
        check_ranks(spec, size)


@pytest.mark.parametrize(
    ("rows", "size", "share"), [(128256, 1, 128256), (128256, 4, 32064), (150, 2, 128), (9, 4, 64)]
)
def test_shares_of_a_vocabulary_are_equal_and_hold_it(rows: int, size: int, share: int) -> None:
    assert vocabulary_share(rows, size) == share
    assert size * share >= rows


def test_a_part_has_the_weights_that_a_rank_has() -> None:
    part = part_spec(LARGE, 4)
    assert (part.attention.heads, part.attention.kv_heads, part.dense[0].width) == (16, 2, 7168)
    assert part_spec(LARGE, 1) == LARGE


def test_so_is_the_width() -> None:
    assert "20 numbers" in refused(resized(SPEC, heads=8, kv_heads=8), 8)


def test_experts_are_shared_whole_or_by_their_width() -> None:
    experts = small_experts(12, 2, 96)
    spec = resized(SPEC, heads=48, kv_heads=1, intermediate=5, experts=experts)
    for size in (1, 2, 12, 16, 48):
        check_ranks(spec, size)  # where no layer has one MLP its width does not matter
    check_ranks(spec, 12, expert_parallel=True)
    said = refused(resized(spec, experts=small_experts(12, 2, 80)), 12)
    assert "80 numbers of each expert's width: one of 1, 2, 4, 8, 16" in said
    with pytest.raises(ConfigError, match=r"12 experts: one of 1, 2, 3, 4, 6, 12$"):
        check_ranks(spec, 16, expert_parallel=True)
    dense = resized(SPEC, heads=48, kv_heads=1, intermediate=5)
    mixed = resized(dense, layers=2, experts=experts, sparse=(True, False))
    assert "5 numbers of each MLP's width" in refused(mixed, 2)


def test_a_model_without_experts_has_none_to_share() -> None:
    with pytest.raises(ConfigError, match=r"expert-parallel.*no experts"):
        check_ranks(LARGE, 2, expert_parallel=True)
