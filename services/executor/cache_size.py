"""How large the caches of an executor are: what is left of its device beside weights, the largest steps, and others."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.model_runner import RunnerOptions
from penstock.engine_core.execution.warmup import step_peak, used_memory
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.memory_estimate import (
    CPU_CEILING,
    CPU_SHARE,
    CacheShape,
    check_blocks,
    cpu_blocks,
    given_blocks,
    gpu_blocks,
    host_places,
    snapshot_bytes,
    staging_bytes,
    state_places,
)
from penstock.engine_core.models.sharding import rank_spec
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig
from penstock.services.executor.device import available_memory
from penstock.services.executor.sleep import Measured
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

LEFT_SHARE = 0.98  # of what other models leave of a GPU, the share that one more may take


@dataclass
class StepMemory:
    """What the largest steps take of a GPU. It is measured once in the life of a process."""

    earlier: Measured | None = None  # by an earlier image, of the same model with the same options
    measured: Measured | None = None

    def measure(
        self, model: Decoder, spec: ModelSpec, options: RunnerOptions, tokens: int, draft: Draft | None
    ) -> Measured:
        """Where all members of a group know it from before, no steps are run: they run them together."""
        if options.group.all_min(0 if self.earlier is None else 1):
            self.measured = self.earlier
        else:
            before, _ = used_memory(options.device)
            peak = step_peak(model, spec, options, tokens, draft)
            self.measured = Measured(peak, max(0, used_memory(options.device)[0] - before))
        assert self.measured is not None, "known or measured"
        return self.measured


def count_blocks(
    config: Config, shape: CacheShape, model: Decoder, spec: ModelSpec, options: RunnerOptions, draft: Draft | None,
    tokens: int, memory: StepMemory, others: int = 0,
) -> tuple[int, int]:  # fmt: skip
    """KV blocks of this executor, enough for one request of full length or ConfigError with the numbers, and snapshots
    of states; an encoder has none. The share of the device is this model's alone, within what `others` left. `tokens`:
    most of a step."""
    if spec.encoder:
        return 0, 0
    executor: ExecutorConfig = config.executor
    each = snapshot_bytes(rank_spec(spec, options.group.size), options.dtype.itemsize)

    def places(free: int) -> int:
        return state_places(executor.state_snapshots, each, free, options.max_num_seqs) if each else 0

    if executor.kv_cache_memory:
        blocks = given_blocks(shape, executor.kv_cache_memory)
        blocks = check_blocks(shape, blocks, "--kv-cache-memory", executor.kv_cache_memory)
        if options.device.type == "cpu":
            there = available_memory()
            host_places("--kv-cache-memory", executor.kv_cache_memory, shape.block_bytes, "a KV block", there)
        return blocks, places(executor.kv_cache_memory)
    if options.device.type == "cpu":
        free = available_memory()
        blocks = check_blocks(shape, cpu_blocks(shape, free), "--kv-cache-memory", 0)
        return blocks, places(min(free // CPU_SHARE, CPU_CEILING))
    used, total = used_memory(options.device)
    found = memory.measure(model, spec, options, tokens, draft)
    used += found.lasting + (staging_bytes(shape.block_bytes) if executor.kv_host_memory else 0)
    share = executor.gpu_memory_utilization
    if others:
        used, share = used - others, min(share, LEFT_SHARE * (total - others) / total)
    fields = {"used_bytes": used, "total_bytes": total, "others_bytes": others, **msgspec.structs.asdict(found)}
    logs.info(log, "measured", step_bytes=found.peak, anew=found is not memory.earlier, **fields)
    count = places(int(total * share) - used - found.peak)
    blocks = gpu_blocks(shape, total, share, used + count * each, found.peak)
    return check_blocks(shape, blocks, "--gpu-memory-utilization", executor.gpu_memory_utilization), count
