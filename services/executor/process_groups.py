"""A member's process groups: what torch.distributed needs to know before ranks can share a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from penstock.engine_core.distributed.group import Group
from penstock.protocol.config import Config
from penstock.protocol.groups import Place
from penstock.services.executor.handshake import Life
from penstock.services.executor.rendezvous import host_and_port

COLLECTIVE_SECONDS = 600.0  # that a member may wait in one for the others; whose step hangs the watchdog knows sooner
# NVLink's multicast is off unless the operator wants it: on some machines it stays broken until the next boot.
ENVIRONMENT: Mapping[str, str] = {"NCCL_NVLS_ENABLE": "0"}
ONE_HOST: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def begin(config: Config, place: Place, life: Life, device: torch.device) -> Group:
    """The group of a life that has begun, as this member sees it: torch's process groups over a store of this life.

    Raises torch's RuntimeError when another member ends meanwhile.
    """
    where, model = config.executor.rendezvous, config.model
    for name, value in (ENVIRONMENT if where else {**ENVIRONMENT, **ONE_HOST}).items():
        os.environ.setdefault(name, value)
    ranks, stages = model.tensor_parallel_size, model.pipeline_parallel_size
    member, wait = place.stage * ranks + place.rank, timedelta(seconds=COLLECTIVE_SECONDS)
    store: Store
    if life.port:
        store = TCPStore(host_and_port(where)[0], life.port, ranks * stages, member == 0, wait)
    else:
        file = store_file(Path(config.run.run_dir), place.replica, life)
        if member == 0:
            remove_others(file)
        store = FileStore(str(file))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=PrefixStore(life.name, store), rank=member, world_size=ranks * stages, timeout=wait
    )
    members = mine = dist.group.WORLD
    forwards = backwards = None
    if stages > 1:  # everybody makes all of them, in one order
        made = [dist.new_group(list(range(stage * ranks, (stage + 1) * ranks))) for stage in range(stages)]
        mine = made[place.stage]
        columns = [list(range(rank, ranks * stages, ranks)) for rank in range(ranks)]
        forwards, backwards = ([dist.new_group(column) for column in columns][place.rank] for _ in range(2))
    return Group(
        place.rank, ranks, place.stage, stages, mine if ranks > 1 else None, members, forwards, backwards,
        config.model.batch_invariant,
    )  # fmt: skip


def store_file(run_dir: Path, replica: int, life: Life) -> Path:
    """Where the members of a life on one machine tell one another their addresses."""
    return run_dir / f"group-{replica}-{life.name}.store"


def remove_others(file: Path) -> None:
    """The stores of lives that are over."""
    for other in file.parent.glob(f"{file.name.rpartition('-')[0]}-*.store"):
        if other != file:
            other.unlink(missing_ok=True)
