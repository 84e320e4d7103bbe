"""What ranks share, in numbers: sizes that fit, and what is said of those that do not."""

from __future__ import annotations

import msgspec
import pytest

from engine_core.models.shares import check_ranks, rank_spec, shared_evenly
from engine_core.models.spec import ModelSpec
from protocol.errors import ConfigError
from tests.engine_core.models.test_layers import SPEC

LARGE = msgspec.structs.replace(SPEC, heads=64, kv_heads=8, head_dim=128, intermediate=28672)


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(1, 64, 8), (2, 32, 4), (8, 8, 1), (16, 4, 1), (64, 1, 1)])
def test_a_rank_has_its_share_of_the_heads(size: int, heads: int, kv_heads: int) -> None:
    check_ranks(LARGE, size)
    found = rank_spec(LARGE, size)
    assert (found.heads, found.kv_heads) == (heads, kv_heads)
    assert msgspec.structs.replace(found, heads=64, kv_heads=8) == LARGE


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
    spec = msgspec.structs.replace(SPEC, heads=12, kv_heads=6, intermediate=48)
    assert "6 key-value heads" in refused(spec, 4)
    for size in (2, 3, 6, 12):
        check_ranks(spec, size)


def test_so_is_the_width() -> None:
    assert "20 numbers" in refused(msgspec.structs.replace(SPEC, heads=8, kv_heads=8), 8)
