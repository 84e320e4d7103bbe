"""Which part of a model a rank of a group holds, as numbers. Imports no torch: planning asks, too."""

from __future__ import annotations

import msgspec

from engine_core.models.spec import ModelSpec
from protocol.errors import ConfigError

FLAG = "--tensor-parallel-size"


def rank_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The model as one of `size` ranks has its attention: its share of the heads. Key-value heads are split, or one of
    them repeated where there are fewer than ranks."""
    kv_heads = max(1, spec.kv_heads // size)
    return msgspec.structs.replace(spec, heads=spec.heads // size, kv_heads=kv_heads)


def check_ranks(spec: ModelSpec, size: int) -> None:
    """Raise ConfigError with the numbers unless so many ranks can share the model's heads and width."""
    for what, count in (("attention heads", spec.heads), ("numbers of each MLP's width", spec.intermediate)):
        if count % size:
            raise ConfigError(FLAG, size, f"it must divide the model's {count} {what}: {divisors(spec)}")
    if spec.kv_heads % size and size % spec.kv_heads:
        few = f"it must divide the model's {spec.kv_heads} key-value heads or be a multiple of them: {divisors(spec)}"
        raise ConfigError(FLAG, size, few)


def divisors(spec: ModelSpec) -> str:
    """The sizes that the model allows, in words."""
    found = [size for size in range(1, 65) if shared_evenly(spec, size)]
    return "one of " + ", ".join(map(str, found))


def shared_evenly(spec: ModelSpec, size: int) -> bool:
    pairs = spec.kv_heads % size == 0 or size % spec.kv_heads == 0
    return pairs and spec.heads % size == 0 and spec.intermediate % size == 0
