"""How many processes of each role a server has where the operator left that to it.

An api process writes about 60,000 tokens a second and a tokenizer makes about 130,000 of them, so one of each would do
for most models; more of them share the work of a step, so that its tokens are out sooner. The scheduler and the
executors come first: of few cores they get their own.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from penstock.protocol.config import Config

QUOTA = Path("/sys/fs/cgroup/cpu.max")
FEW, MANY = 4, 8  # cores


def sized(config: Config, cores: int) -> Config:
    """`config` with every number of processes that was 0 replaced by one that suits `cores`."""
    shared = 1 if config.api.uds else MANY  # processes that can listen at one place
    apis = config.api.api_processes or min(shared, 1 if cores < FEW else 2 if cores < MANY else 4)
    tokenizers = config.tokenizer.tokenizer_processes or (1 if cores < MANY else 2)
    return msgspec.structs.replace(
        config,
        api=msgspec.structs.replace(config.api, api_processes=apis),
        tokenizer=msgspec.structs.replace(config.tokenizer, tokenizer_processes=tokenizers),
    )


def usable_cores(quota: Path = QUOTA) -> int:
    """Cores that this process may run on: its affinity, and the quota of its control group (cgroups v2, cpu.max)."""
    cores = len(os.sched_getaffinity(0))
    try:
        most, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if most == "max" else max(1, min(cores, int(most) // int(period)))
