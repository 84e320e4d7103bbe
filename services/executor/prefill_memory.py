"""How executors of replicas that decode find the memory in which those of prefill replicas have KV blocks.

A prefill replica's executor leaves a symbolic link to its descriptor in the run directory. A thread of each other one
looks there a few times a second and maps what it finds: pinning many GiB takes seconds. Until then, and whenever that
is not possible, what is to come from there is answered as stale, and computed.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import NamedTuple

import torch

from penstock.engine_core.distributed import nixl
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.remote_blocks import PublishedBlocks, RemoteBlocks
from penstock.engine_core.execution.shared_blocks import SharedBlocks
from penstock.protocol import groups
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import HostAddress, Role, new_incarnation, read_address
from penstock.services.executor.rendezvous import interface
from penstock.services.supervisor import logs
from penstock.services.supervisor.run_directory import FRESH

log = logging.getLogger(__name__)

UCX_DEVICES = "UCX_NET_DEVICES"
RDMA = Path("/sys/class/infiniband")
INTERVAL = 0.2  # seconds between looks


def reach_hosts(config: Config, index: int, copies: BlockCopier) -> None:
    """Have executors of other hosts read the memory of a prefill replica's, and one that decodes read theirs. Where
    schedulers have an address there may be such executors. Raises ConfigError."""
    model = config.model
    if not (model.prefill_replicas and config.links.scheduler_address):
        return
    choose_network(read_address("--scheduler-address", config.links.scheduler_address))
    place = groups.place(index, model)
    copies.member = index - groups.members(place.replica, model).start
    name = f"{Role.EXECUTOR}-{index}-{new_incarnation():08x}"
    try:
        if copies.shared is not None:
            copies.published = PublishedBlocks.make(copies.shared, nixl.Agent(name, served=True))
        else:
            copies.remote = RemoteBlocks(nixl.Agent(name), copies.layout, copies.device)
    except (nixl.NixlError, MemoryError) as error:
        raise ConfigError("--prefill-replicas", model.prefill_replicas, nixl.NEEDED.format(error)) from None


def choose_network(address: HostAddress, environ: MutableMapping[str, str] = os.environ, rdma: Path = RDMA) -> None:
    """Have UCX use the interface by which the schedulers are reached, and listen there alone. Where there is RDMA, or
    the operator has chosen, UCX finds its way."""
    if rdma.is_dir() and any(rdma.iterdir()):
        return
    name = ""
    with suppress(OSError):  # there is no such host, or no way to it, now
        family, kind, _, _, where = socket.getaddrinfo(address.bare, address.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # which sends nothing
            name = interface(probe.getsockname()[0])
    if name:
        environ.setdefault(UCX_DEVICES, name)
    else:
        logs.warning(log, "no_interface", address=str(address))


class PrefillMemory:
    """The memory of prefill replicas' executors, as one executor has it."""

    def __init__(self, copier: BlockCopier, model: ModelConfig, index: int, run_dir: Path) -> None:
        place = groups.place(index, model)
        self._copier = copier
        member = index - groups.members(place.replica, model).start
        self._files = {
            replica: run_dir / f"{Role.EXECUTOR}-{groups.members(replica, model)[member]}.kv"
            for replica in range(model.prefill_replicas)
            if groups.replica_role(place.replica, model) is groups.ReplicaRole.DECODE
        }
        self._targets: dict[int, Target | None] = {}  # what each link was when it was followed last
        if copier.shared is not None:
            publish(run_dir / f"{Role.EXECUTOR}-{index}.kv", copier.shared.path)

    def watch(self, done: Event) -> None:
        """Look for what is new until `done`."""
        while not done.wait(INTERVAL):
            self.look()

    def look(self) -> None:
        """Map what is new, and let go of what a dead process has left, whose next one takes as much."""
        for replica, file in self._files.items():
            target = living(file)
            if target != self._targets.get(replica):
                self._targets[replica] = target
                self._copier.others.pop(replica, None)
                if target is not None:
                    self._map(replica, target.path)

    def _map(self, replica: int, path: str) -> None:
        try:
            if self._copier.device.type == "cuda":
                torch.cuda.set_device(self._copier.device)
            found = SharedBlocks.open(path, self._copier.layout, self._copier.device)
        except (OSError, ValueError, MemoryError) as error:
            logs.warning(log, "prefill_memory_failed", replica=replica, path=path, reason=str(error))
            return
        self._copier.others[replica] = found
        logs.info(log, "prefill_memory", replica=replica, path=path, bytes=found.blocks.nbytes)


class Target(NamedTuple):
    """What a link leads to. An executor that sleeps keeps its process, in which the same number may become another
    file's."""

    path: str
    inode: int


def living(file: Path) -> Target | None:
    """The memory that a link leads to; None where there is no such link, or its executor has ended or sleeps."""
    try:
        path = os.readlink(file)
        found = Target(path, os.stat(path).st_ino)
        return found if os.readlink(path).startswith("/memfd:") else None
    except OSError:
        return None


def publish(file: Path, target: str) -> None:
    """Have a symbolic link replace the one that an executor before this one has left."""
    fresh = file.with_name(file.name + FRESH)
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(file)
