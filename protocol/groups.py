"""The place of each executor: its replica, stage of the pipeline and rank of tensor parallelism.

A group is the executors of one replica: `pipeline_parallel_size` stages of `tensor_parallel_size` ranks each. Executors
are numbered replica by replica, stage by stage, rank by rank. Scheduler number r has the group of replica r.
"""

from __future__ import annotations

import enum

import msgspec

from penstock.protocol.engine_config import MOST_EXECUTORS, ModelConfig
from penstock.protocol.errors import ConfigError


class ReplicaRole(enum.StrEnum):
    """Of a replica among those of its server."""

    MIXED = "mixed"  # there are no roles
    PREFILL = "prefill"  # it computes prompts, and has their blocks copied to where other replicas read them
    DECODE = "decode"


class Place(msgspec.Struct, frozen=True, order=True):
    """An executor's replica, the stage that has its layers, and the rank that has its share of them."""

    replica: int
    stage: int
    rank: int


def group_size(model: ModelConfig) -> int:
    """Executors of one replica."""
    return model.tensor_parallel_size * model.pipeline_parallel_size


def executors(model: ModelConfig) -> int:
    """Executors of all replicas."""
    return model.data_parallel_size * group_size(model)


def place(index: int, model: ModelConfig) -> Place:
    """Of executor number `index`."""
    assert 0 <= index < executors(model), f"there are {executors(model)} executors, none is number {index}"
    replica, member = divmod(index, group_size(model))
    return Place(replica, *divmod(member, model.tensor_parallel_size))


def number(place: Place, model: ModelConfig) -> int:
    """Of the executor at a place: the inverse of `place`."""
    stages = place.replica * model.pipeline_parallel_size + place.stage
    return stages * model.tensor_parallel_size + place.rank


def replica_role(replica: int, model: ModelConfig) -> ReplicaRole:
    """Of replica number `replica`: the first ones compute prompts."""
    if not model.prefill_replicas:
        return ReplicaRole.MIXED
    return ReplicaRole.PREFILL if replica < model.prefill_replicas else ReplicaRole.DECODE


def members(replica: int, model: ModelConfig) -> range:
    """Numbers of a replica's executors."""
    size = group_size(model)
    return range(replica * size, (replica + 1) * size)


def answering(replica: int, model: ModelConfig) -> int:
    """Number of the executor that samples and answers the scheduler: the first rank of the last stage."""
    return number(Place(replica, model.pipeline_parallel_size - 1, 0), model)


def check_groups(model: ModelConfig) -> None:
    """Raise ConfigError for sizes that cannot be combined."""
    if executors(model) > MOST_EXECUTORS:
        sizes = (
            f"with {model.data_parallel_size} replicas of {model.pipeline_parallel_size} stages that makes "
            f"{executors(model)} executors, more than {MOST_EXECUTORS}"
        )
        raise ConfigError("--tensor-parallel-size", model.tensor_parallel_size, sizes)
