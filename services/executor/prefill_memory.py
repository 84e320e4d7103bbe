"""How executors of replicas that decode find the memory in which those of prefill replicas have KV blocks.

A prefill replica's executor leaves a symbolic link to its descriptor in the run directory. The others look there a few
times a second, and map what they find in a thread: pinning many GiB takes seconds. Until then, and whenever that is not
possible, what comes from there is answered as stale, and computed.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from threading import Thread

import torch

from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.shared_blocks import SharedBlocks
from penstock.protocol import groups
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import Role
from penstock.services.supervisor import logs
from penstock.services.supervisor.run_directory import FRESH

log = logging.getLogger(__name__)


class PrefillMemory:
    """The memory of prefill replicas' executors, as one executor has it."""

    def __init__(self, copier: BlockCopier, model: ModelConfig, index: int, run_dir: Path) -> None:
        place = groups.place(index, model)
        self._copier = copier
        member = index - groups.members(place.replica, model).start
        self._files = {
            replica: run_dir / f"{Role.EXECUTOR}-{groups.members(replica, model)[member]}.kv"
            for replica in range(model.prefill_replicas)
            if place.replica >= model.prefill_replicas
        }
        self._targets: dict[int, str] = {}  # what each link was when it was followed last
        self._mapping: Thread | None = None
        if copier.shared is not None:
            publish(run_dir / f"{Role.EXECUTOR}-{index}.kv", copier.shared.path)

    def tick(self) -> None:
        """Map what is new, and let go of what a dead process has left, whose next one takes as much: one at a time."""
        if self._mapping is not None and self._mapping.is_alive():
            return
        for replica, file in self._files.items():
            target = living(file)
            if target != self._targets.get(replica, ""):
                self._targets[replica] = target
                self._mapping = Thread(target=self._follow, args=(replica, target), name="prefill memory", daemon=True)
                self._mapping.start()
                return

    def _follow(self, replica: int, path: str) -> None:
        self._copier.others.pop(replica, None)
        if not path:
            return
        fields: dict[str, object] = {"replica": replica, "path": path}
        try:
            if self._copier.device.type == "cuda":
                torch.cuda.set_device(self._copier.device)
            found = SharedBlocks.open(path, self._copier.layout, self._copier.device)
        except (OSError, ValueError, MemoryError) as error:
            fields["reason"] = str(error)
            logs.write(log, logging.WARNING, "prefill_memory_failed", fields)
            return
        self._copier.others[replica] = found
        logs.write(log, logging.INFO, "prefill_memory", {**fields, "bytes": found.blocks.nbytes})


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
