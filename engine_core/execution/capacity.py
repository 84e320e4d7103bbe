"""How many KV blocks an executor gets: from bytes that are given, measured, or a stated share of the machine's."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.errors import ConfigError

CPU_SHARE = 8  # a CPU gives the cache one part in eight of the memory that is available
CPU_CEILING = 4 << 30  # and never more than this unless --kv-cache-memory says so


@dataclass(frozen=True)
class CacheShape:
    """What decides the size of the cache. Bytes are of one executor."""

    block_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    length_given: bool  # --max-model-len was given, not taken from the model

    @property
    def request_blocks(self) -> int:
        """Blocks of one request of full length."""
        return -(-self.max_model_len // self.block_size)

    @property
    def useful_blocks(self) -> int:
        """Blocks that all slots together could fill."""
        return self.request_blocks * self.max_num_seqs


def block_bytes(spec: ModelSpec, block_size: int, item_bytes: int) -> int:
    """Keys and values of one block over all layers."""
    return 2 * spec.layers * block_size * spec.kv_heads * spec.head_dim * item_bytes


def drafting_bytes(layers: ModelSpec, block_size: int, item_bytes: int, *, states: bool) -> int:
    """What drafting by these layers adds to a block: keys and values, and of an EAGLE head the `states` it reads."""
    return block_bytes(layers, block_size, item_bytes) + states * block_size * layers.hidden * item_bytes


def cpu_blocks(shape: CacheShape, available: int) -> int:
    """Blocks on a CPU without --kv-cache-memory: an eighth of the available memory, at most 4 GiB and at most what the
    slots could use."""
    return min(min(available // CPU_SHARE, CPU_CEILING) // shape.block_bytes - 1, shape.useful_blocks)


def gpu_blocks(shape: CacheShape, total: int, utilization: float, used: int, step_peak: int) -> int:
    """Blocks on a GPU without --kv-cache-memory.

    What may be used is `utilization` of `total`; of that `used` is taken (weights, tables, the context, other
    processes) and a worst-case step needs `step_peak` on top. All in bytes.
    """
    return (int(total * utilization) - used - step_peak) // shape.block_bytes - 1


def given_blocks(shape: CacheShape, given: int) -> int:
    """Blocks in the bytes of --kv-cache-memory, scratch block included in the bytes."""
    return given // shape.block_bytes - 1


def check_blocks(shape: CacheShape, blocks: int, option: str, value: object) -> int:
    """Return `blocks` if they hold one request of full length.

    Raises ConfigError with the numbers: naming --max-model-len with the length that fits where any does, else `option`,
    which decides the size of the cache.
    """
    if blocks >= shape.request_blocks:
        return blocks
    fits = max(0, blocks) * shape.block_size
    need = (shape.request_blocks + 1) * shape.block_bytes
    has = f"the KV cache has room for {fits} tokens ({max(0, blocks)} blocks of {shape.block_size})"
    wish = f"one request of {shape.max_model_len} tokens needs {shape.request_blocks} blocks ({need} bytes)"
    if fits:
        length = shape.max_model_len if shape.length_given else 0
        raise ConfigError("--max-model-len", length, f"{has}, but {wish}; give at most {fits}, or raise {option}")
    raise ConfigError(option, value, f"{has}, but {wish}")
