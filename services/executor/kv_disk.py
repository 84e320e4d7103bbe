"""The folder of an executor's KV blocks on disk, and what makes them those of its model: PATH/MODEL/executor-N.

A folder is private and locked by the executor that uses it. A mistake of the operator's is a ConfigError. A disk that
fails is none: the executor serves without it, and prompts are computed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import select
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.block_files import BlockFiles, places_in, too_small
from penstock.engine_core.execution.storage_copies import StorageCopier
from penstock.engine_core.models.draft_spec import DraftSpec
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol import groups
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.version import VERSION
from penstock.services.supervisor import logs
from penstock.services.supervisor.run_directory import taken

log = logging.getLogger(__name__)

OPTION, SIZE = "--kv-disk", "--kv-disk-size"
LOCK_SECONDS = 10.0  # until a killed executor has released its lock
SAMPLES, SAMPLE = 32, 4096  # of a file's content: how many, and bytes of each
OTHER = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Served:
    """What an executor serves."""

    spec: ModelSpec
    draft: DraftSpec | None
    length: int  # of the longest sequence, by which some models scale their rotations
    group: Group
    dtype: torch.dtype
    folders: tuple[Path, ...]  # of the weights
    files: bytes  # their digest before they were read

    def identity(self, config: Config, layout: str, weights: bytes | None = None) -> bytes:
        """Of blocks: what their bytes depend on beside their keys. Weights whose files have changed while they were
        read are those of no other life. weights: what tells them apart on other hosts as well; None: on this one."""
        if self.files != files_digest(self.folders):
            return os.urandom(32)
        model, group = config.model, self.group
        facts = (
            VERSION, torch.__version__, model.block_size, model.load_format, model.seed,
            model.batch_invariant, model.expert_parallel, group.rank, group.size, group.stage, group.stages,
            self.length, str(self.dtype), layout, self.files if weights is None else weights,
            msgspec.json.encode((self.spec, self.draft), order="deterministic"),
        )  # fmt: skip
        return hashlib.blake2b(repr(facts).encode(), digest_size=32).digest()


def attach_disk(config: Config, index: int, copies: BlockCopier | None, served: Served) -> None:
    """Give the copier of blocks its files on disk, where the disk works. Raises ConfigError."""
    path, limit = config.executor.kv_disk, config.executor.kv_disk_size
    if served.spec.encoder:
        raise ConfigError(OPTION, path, "the model is an encoder, which keeps no KV blocks")
    if copies is None:  # a stage whose layers are all recurrent has no blocks
        return
    each = copies.host.shape[1]
    if not places_in(limit, each):
        raise ConfigError(SIZE, limit, too_small(each))
    try:
        folder, lock = own_folder(config, index)
        files = BlockFiles(folder, limit, each, served.identity(config, copies.layout.label), lock)
        remove_others(config, folder)
    except OSError as error:
        logs.warning(log, "kv_disk_fails", path=path, error=str(error), instead="prompts are computed")
        return
    copies.storage = StorageCopier(files, copies.host.numpy())
    logs.info(log, "kv_disk", folder=str(folder), blocks=files.total, held=len(files.entries()))
    free = shutil.disk_usage(folder).free
    wanted = limit - sum(file.stat().st_blocks * 512 for file in folder.iterdir())
    if free < wanted:
        logs.warning(log, "kv_disk_small", free=free, wanted=wanted, reason="blocks beyond that are not written")


def own_folder(config: Config, index: int) -> tuple[Path, int]:
    """The folder of executor number `index`, and its lock. Raises OSError, and ConfigError where others may use it, or
    another server does."""
    root = Path(os.path.abspath(config.executor.kv_disk))
    name = OTHER.sub("-", (config.model.served_model_name.split(",")[0] or Path(config.model.model).name)).strip(".-")
    folder = root / (name or "model") / f"executor-{index}"
    root.mkdir(mode=0o700, exist_ok=True)
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, exist_ok=True)
        status = made.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(OPTION, str(root), f"{made} must be a folder of this user's with mode 0700")
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while not taken(lock):
        if time.monotonic() >= deadline:
            os.close(lock)
            raise ConfigError(OPTION, str(root), f"another server uses {folder}: give each a folder of its own")
        select.select((), (), (), 0.05)
    return folder, lock


def remove_others(config: Config, folder: Path) -> None:
    """Remove folders of executors that this server no longer has, unless another one uses them."""
    count = groups.executors(config.model)
    for other in folder.parent.glob("executor-*"):
        number = other.name.removeprefix("executor-")
        if not number.isdecimal() or int(number) < count:
            continue
        with suppress(FileNotFoundError):
            lock = os.open(other / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if taken(lock):
                shutil.rmtree(other, ignore_errors=True)
            os.close(lock)


def files_digest(folders: Iterable[Path]) -> bytes:
    """Of what these folders hold: names, sizes, times of change, and samples of the content. It is another one for
    other weights, without reading all of them."""
    digest = hashlib.blake2b(digest_size=32)
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if not path.is_file():
                continue
            status = path.stat()
            digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
            with open(path, "rb", buffering=0) as file:
                for at in range(SAMPLES):
                    digest.update(os.pread(file.fileno(), SAMPLE, status.st_size * at // SAMPLES))
    return digest.digest()
