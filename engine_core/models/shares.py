"""Which part of a model a rank of a group holds, as numbers. Imports no torch: planning asks, too."""

from __future__ import annotations

import msgspec

from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.errors import ConfigError

FLAG = "--tensor-parallel-size"
VOCABULARY_STEP = 64  # rows; shares of a vocabulary are multiples, which suits a device's products


def rank_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The model as one of `size` ranks has its attention: its share of the heads. Key-value heads are split, or one of
    them repeated where there are fewer than ranks."""
    kv_heads = max(1, spec.kv_heads // size)
    return msgspec.structs.replace(spec, heads=spec.heads // size, kv_heads=kv_heads)


def vocabulary_share(rows: int, size: int) -> int:
    """Rows of a vocabulary that each of `size` ranks has memory for; those of the last ranks are padded."""
    return rows if size == 1 else -(-rows // (size * VOCABULARY_STEP)) * VOCABULARY_STEP


def part_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """One rank's share as a model of its own, as far as weights and activations are reckoned of it."""
    experts = spec.experts and msgspec.structs.replace(spec.experts, width=spec.experts.width // size)
    return msgspec.structs.replace(
        rank_spec(spec, size), intermediate=spec.intermediate // size, experts=experts,
        vocab_size=vocabulary_share(spec.vocab_size, size),
    )  # fmt: skip


def shared(spec: ModelSpec, *, expert_parallel: bool = False) -> list[tuple[str, int]]:
    """What the ranks share evenly, in words, and how much of it there is."""
    found, experts = [("attention heads", spec.heads)], spec.experts
    if experts is None or not all(experts.layers):
        found.append(("numbers of each MLP's width", spec.intermediate))
    if experts is not None:
        whole, width = ("experts", experts.count), ("numbers of each expert's width", experts.width)
        found.append(whole if expert_parallel else width)
    return found


def check_ranks(spec: ModelSpec, size: int, *, expert_parallel: bool = False) -> None:
    """Raise ConfigError with the numbers unless so many ranks can share the model's heads and width, and its experts or
    their width."""
    if expert_parallel and spec.experts is None:
        raise ConfigError("--expert-parallel", True, "the model has no experts")
    sizes = divisors(spec, expert_parallel=expert_parallel)
    for what, count in shared(spec, expert_parallel=expert_parallel):
        if count % size:
            raise ConfigError(FLAG, size, f"it must divide the model's {count} {what}: {sizes}")
    if spec.kv_heads % size and size % spec.kv_heads:
        few = f"it must divide the model's {spec.kv_heads} key-value heads or be a multiple of them: {sizes}"
        raise ConfigError(FLAG, size, few)


def divisors(spec: ModelSpec, *, expert_parallel: bool = False) -> str:
    """The sizes that the model allows, in words."""
    found = [size for size in range(1, 65) if shared_evenly(spec, size, expert_parallel=expert_parallel)]
    return "one of " + ", ".join(map(str, found))


def shared_evenly(spec: ModelSpec, size: int, *, expert_parallel: bool = False) -> bool:
    pairs = spec.kv_heads % size == 0 or size % spec.kv_heads == 0
    return pairs and all(count % size == 0 for _, count in shared(spec, expert_parallel=expert_parallel))
