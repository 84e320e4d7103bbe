"""Numbers of executors: every place has one, groups are ranges, and what does not go together is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import (
    MOST_EXECUTORS,
    Place,
    ReplicaRole,
    answering,
    check_groups,
    executors,
    group_size,
    members,
    number,
    place,
    replica_role,
)
from penstock.protocol.validation import check

SIZES = st.integers(1, 8)


def sized(ranks: int = 1, stages: int = 1, replicas: int = 1) -> ModelConfig:
    return ModelConfig(tensor_parallel_size=ranks, pipeline_parallel_size=stages, data_parallel_size=replicas)


def test_one_executor_is_a_group_of_its_own() -> None:
    model = ModelConfig()
    assert (group_size(model), executors(model)) == (1, 1)
    assert place(0, model) == Place(0, 0, 0)
    assert members(0, model) == range(1)
    assert answering(0, model) == 0


def test_numbers_go_by_replica_then_stage_then_rank() -> None:
    model = sized(2, 2, 2)
    assert [place(index, model) for index in range(8)] == [
        Place(0, 0, 0), Place(0, 0, 1), Place(0, 1, 0), Place(0, 1, 1),
        Place(1, 0, 0), Place(1, 0, 1), Place(1, 1, 0), Place(1, 1, 1),
    ]  # fmt: skip
    assert members(1, model) == range(4, 8)
    assert (answering(0, model), answering(1, model)) == (2, 6)


@given(ranks=SIZES, stages=SIZES, replicas=SIZES)
def test_every_place_has_one_number(ranks: int, stages: int, replicas: int) -> None:
    model = sized(ranks, stages, replicas)
    places = [place(index, model) for index in range(executors(model))]
    assert places == sorted(places)
    assert [number(found, model) for found in places] == list(range(ranks * stages * replicas))
    assert max(places) == Place(replicas - 1, stages - 1, ranks - 1)


@given(ranks=SIZES, stages=SIZES, replicas=SIZES)
def test_groups_share_the_executors(ranks: int, stages: int, replicas: int) -> None:
    model = sized(ranks, stages, replicas)
    found = [index for replica in range(replicas) for index in members(replica, model)]
    assert found == list(range(executors(model)))
    for replica in range(replicas):
        assert {place(index, model).replica for index in members(replica, model)} == {replica}
        answers = place(answering(replica, model), model)
        assert answers == Place(replica, stages - 1, 0)


@pytest.mark.parametrize("index", [-1, 4])
def test_a_number_of_nobody_is_our_mistake(index: int) -> None:
    with pytest.raises(AssertionError, match="there are 4 executors"):
        place(index, sized(4))


def test_tensor_parallel_sizes_are_allowed() -> None:
    for ranks in (1, 2, 4, 64):
        check_groups(sized(ranks))


def test_there_may_be_several_replicas() -> None:
    for replicas in (1, 2, 8):
        check_groups(sized(ranks=2, replicas=replicas))


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafts_of_a_model_go_with_ranks_and_stages(method: str) -> None:
    config = msgspec.structs.replace(
        Config(),
        model=sized(stages=2),
        scheduler=SchedulerConfig(
            speculative_config=f'{{"method": "{method}", "model": "draft", "num_speculative_tokens": 3}}'
        ),
    )
    check(config)
    check(msgspec.structs.replace(config, model=sized(ranks=2)))


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_there_may_be_several_stages(stages: int) -> None:
    check(msgspec.structs.replace(Config(), model=sized(stages=stages)))


def test_a_server_has_a_bounded_number_of_executors() -> None:
    assert executors(sized(64, 8, 1)) == MOST_EXECUTORS


def apart(prefill: int = 1, **fields: object) -> Config:
    """Two replicas, of which so many compute prompts."""
    config = Config(model=msgspec.structs.replace(sized(replicas=2), prefill_replicas=prefill))
    for name, value in {"kv_host_memory": 1 << 20, **fields}.items():
        config = msgspec.structs.replace(config, executor=msgspec.structs.replace(config.executor, **{name: value}))
    return config


def test_the_first_replicas_compute_prompts() -> None:
    model = check(apart()).model
    assert [replica_role(replica, model) for replica in range(2)] == [ReplicaRole.PREFILL, ReplicaRole.DECODE]
    assert replica_role(0, sized(replicas=2)) is ReplicaRole.MIXED


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (apart(2), "2 is not allowed; at least one of the 2 replicas (--data-parallel-size) must decode"),
        (apart(kv_host_memory=0), "1 is not allowed; it needs --kv-host-memory"),
    ],
)
def test_prompts_cannot_be_computed_elsewhere(config: Config, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert str(caught.value).startswith(f"--prefill-replicas: {said}")
