"""A group's own small all-reduce, where its ranks are GPUs of one host that reach one another's memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import torch

from penstock.engine_core.distributed.custom_all_reduce import open_exchange
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.distributed.peer_memory import CudaMemory, DeviceMemory, together
from penstock.engine_core.execution.all_reduce_tuning import Trial, quickest
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

DISABLED = "NCCL_P2P_DISABLE"  # of the environment: devices are not to reach one another's memory


def with_exchange(
    group: Group, width: int, dtype: torch.dtype, device: torch.device, environment: Mapping[str, str] = os.environ
) -> Group:
    """The group with an exchange for as many rows as it is found to be quicker for; one line in the log says how many,
    or why there is none. Every member calls this at once."""
    if group.ranks is None or device.type != "cuda":
        return group
    try:
        memory = together(group.ranks, lambda: device_memory(group, device, environment))
        exchange = open_exchange(group.ranks, width, dtype, device, memory)
    except OSError as error:
        logs.info(log, "all_reduce", rows=0, reason=str(error))
        return group
    found, trials = quickest(group, exchange, device)
    rows = 0 if found.exchange is None else found.exchange.rows
    logs.info(log, "all_reduce", rows=rows, size=exchange.inboxes.size if rows else 0, **figures(trials))
    return found


def device_memory(group: Group, device: torch.device, environment: Mapping[str, str]) -> DeviceMemory:
    """What the driver does with this GPU's memory. Raises OSError where the ranks are not to share it."""
    if group.stages > 1:
        # Other streams wait for other stages then, and an exchange wants a place for all its programs meanwhile.
        raise OSError("the group has stages")
    if environment.get(DISABLED, "0") != "0":
        raise OSError(f"{DISABLED} is set")
    torch.cuda.synchronize(device)  # this thread has the device's context from here on
    return CudaMemory()


def figures(trials: Sequence[Trial]) -> dict[str, str]:
    """What the log says of the trials: microseconds by rows."""
    return {
        "exchange_us": " ".join(f"{trial.rows}:{trial.exchanged:.1f}" for trial in trials),
        "collective_us": " ".join(f"{trial.rows}:{trial.summed:.1f}" for trial in trials),
    }
