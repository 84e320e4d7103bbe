"""How executors of replicas that decode find the memory in which those of prefill replicas have KV blocks.

A prefill replica's executor leaves a symbolic link to its descriptor in the run directory. A thread of each other one
looks there a few times a second and maps what it finds: pinning many GiB takes seconds. Until then, and whenever that
is not possible, what is to come from there is answered as stale, and computed.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from threading import Event

import torch

from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.shared_blocks import SharedBlocks
from penstock.protocol import groups
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import Role
from penstock.services.supervisor import logs
from penstock.services.supervisor.run_directory import FRESH

log = logging.getLogger(__name__)

INTERVAL = 0.2  # seconds between looks


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
        self._targets: dict[int, str] = {}  # what each link was when it was followed last
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
            if target != self._targets.get(replica, ""):
                self._targets[replica] = target
                self._copier.others.pop(replica, None)
                if target:
                    self._map(replica, target)

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


def living(file: Path) -> str:
    """What a link leads to; empty where there is no such link, or its process has ended."""
    try:
        target = os.readlink(file)
        os.stat(target)
    except OSError:
        return ""
    return target


def publish(file: Path, target: str) -> None:
    """Have a symbolic link replace the one that an executor before this one has left."""
    fresh = file.with_name(file.name + FRESH)
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(file)
