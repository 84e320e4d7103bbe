"""The weights that stay in the host's memory while an executor sleeps (--keep-weights): when they are copied, when they
come back, and when they are let go. How they lie there is `engine_core.loading.kept_weights`.

The copy is made as the executor first falls asleep, and lasts until its process ends, or other weights are written, or
the operator wants the memory. Whatever is wrong with it, the weights are read from files.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from penstock.services.executor.device import available_memory
from penstock.services.supervisor import logs

if TYPE_CHECKING:
    import torch

    from penstock.engine_core.loading.kept_weights import Parts, Table

log = logging.getLogger(__name__)

NOT_KEPT = -1  # in place of a descriptor
SPARE = 1 << 28  # bytes of the host's memory that are left to others


class KeptWeights:
    """One executor's copy, through all images of its process."""

    def __init__(self, file: int = NOT_KEPT) -> None:
        self.file = file

    @property
    def nbytes(self) -> int:
        """Of the host's memory."""
        return 0 if self.file == NOT_KEPT else os.fstat(self.file).st_size

    def drop(self) -> None:
        """Give its memory back: these weights are not to come again."""
        if self.file != NOT_KEPT:
            os.close(self.file)
            self.file = NOT_KEPT

    def restore(self, parts: Parts, key: str, device: torch.device) -> Table | None:
        """Fill these parts; None: there is no copy that fits, and they must be read from files."""
        if self.file == NOT_KEPT:
            return None
        from penstock.engine_core.loading.kept_weights import KeptWeightsError, restore

        try:
            table = restore(self.file, parts, key, device)
        except KeptWeightsError as error:
            logs.warning(log, "kept_weights_unusable", reason=str(error), instead="weights are read from files")
            self.drop()
            return None
        logs.info(log, "weights_restored", bytes=self.nbytes, path=table.path, version=table.version)
        return table

    def keep(self, parts: Parts, key: str, path: str, version: str) -> None:
        """Copy the weights of these parts, unless that has been done."""
        if self.file != NOT_KEPT:
            return
        from penstock.engine_core.loading.kept_weights import write

        began = time.monotonic()
        self.file = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
        try:
            write(self.file, parts, key, path, version, max(0, available_memory() - SPARE))
        except (OSError, MemoryError) as error:
            logs.warning(log, "weights_not_kept", reason=str(error))
            self.drop()
            return
        seconds = round(time.monotonic() - began, 3)
        logs.info(log, "weights_kept", bytes=self.nbytes, version=version, seconds=seconds)
