"""A group's places, and a group of one, which exchanges nothing. What several exchange: see test_ranks.py."""

from __future__ import annotations

import pytest
import torch

from penstock.engine_core.distributed.group import ALONE, Group


def test_one_executor_is_first_and_last_and_answers() -> None:
    assert ALONE.answers
    assert ALONE.begins
    assert ALONE.ends
    assert (ALONE.rank, ALONE.size, ALONE.stage, ALONE.stages) == (0, 1, 0, 1)


def test_one_exchanges_nothing() -> None:
    x, tokens = torch.randn(3, 5), torch.tensor([4, 5], dtype=torch.int32)
    assert ALONE.all_reduce(x) is x
    assert ALONE.all_gather(x, 5) is x
    ALONE.broadcast(tokens)
    assert tokens.tolist() == [4, 5]
    assert ALONE.all_min(7) == 7


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_the_last_stages_first_rank_answers(ranks: int, stages: int) -> None:
    members = [Group(rank, ranks, stage, stages) for stage in range(stages) for rank in range(ranks)]
    assert [at for at, member in enumerate(members) if member.answers] == [(stages - 1) * ranks]
    assert sum(member.begins for member in members) == ranks
    assert sum(member.ends for member in members) == ranks


@pytest.mark.parametrize(("size", "width"), [(1, 6), (2, 6), (3, 7), (4, 5)])
def test_parts_side_by_side_are_what_every_rank_holds(size: int, width: int) -> None:
    whole = torch.randn(2, 9, width)[:, :3]
    parts = [Group(rank=rank, size=size).shard(whole) for rank in range(size)]
    assert {part.shape for part in parts} == {(2, 3, -(-width // size))}
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts, -1)[..., :width], whole)
    parts[0].zero_()
    assert whole.all(), "a copy of its own"
