"""A group's torch.distributed process groups, and its own small all-reduce where the ranks are GPUs of one host."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from penstock.engine_core.distributed.custom_all_reduce import CudaMemory, DeviceMemory, open_exchange, together
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.all_reduce_tuning import Trial, quickest
from penstock.protocol.config import Config
from penstock.protocol.groups import Place
from penstock.services.executor.rendezvous import Generation
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

COLLECTIVE_SECONDS = 600.0  # that a member may wait in one for the others; watchdogs find a hanging step sooner
# NVLink's multicast is off unless the operator wants it: on some machines it stays broken until the next boot.
ENVIRONMENT: Mapping[str, str] = {"NCCL_NVLS_ENABLE": "0"}
DISABLED = "NCCL_P2P_DISABLE"  # of the environment: GPUs are not to access one another's memory


def begin(config: Config, place: Place, generation: Generation, device: torch.device) -> Group:
    """The group of a generation as this member sees it: torch's process groups over the generation's store.

    Raises torch's RuntimeError when another member ends meanwhile.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ranks, stages = config.model.tensor_parallel_size, config.model.pipeline_parallel_size
    member, wait = place.stage * ranks + place.rank, timedelta(seconds=COLLECTIVE_SECONDS)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = PrefixStore(generation.name, generation.store)
    store.set_timeout(wait)
    dist.init_process_group(backend, store=store, rank=member, world_size=ranks * stages, timeout=wait)
    members = mine = dist.group.WORLD
    forwards = backwards = None
    if stages > 1:  # every member makes all groups, in the same order
        made = [dist.new_group(list(range(stage * ranks, (stage + 1) * ranks))) for stage in range(stages)]
        mine = made[place.stage]
        columns = [list(range(rank, ranks * stages, ranks)) for rank in range(ranks)]
        forwards, backwards = ([dist.new_group(column) for column in columns][place.rank] for _ in range(2))
    return Group(
        place.rank, ranks, place.stage, stages, mine if ranks > 1 else None, members, forwards, backwards,
        config.model.batch_invariant,
    )  # fmt: skip


def with_exchange(
    group: Group, width: int, dtype: torch.dtype, device: torch.device, environment: Mapping[str, str] = os.environ
) -> Group:
    """The group with its own all-reduce for as many rows as that is faster for. The log says how many, or why there is
    none. Every member calls this at once."""
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
    """The driver's functions for this GPU's memory. Raises OSError where the ranks are not to share it."""
    if group.stages > 1:
        # Other streams wait for other stages then, while the exchange needs all its programs resident.
        raise OSError("the group has stages")
    if environment.get(DISABLED, "0") != "0":
        raise OSError(f"{DISABLED} is set")
    torch.cuda.synchronize(device)  # this thread has the device's context from here on
    return CudaMemory()


def figures(trials: Sequence[Trial]) -> dict[str, str]:
    """Log fields of the trials: microseconds by rows."""
    return {
        "exchange_us": " ".join(f"{trial.rows}:{trial.exchanged:.1f}" for trial in trials),
        "collective_us": " ".join(f"{trial.rows}:{trial.summed:.1f}" for trial in trials),
    }
