"""Weights that are looked at while a process starts: their hashes in threads beside the loading, then what they say."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from penstock.engine_core.execution.model_runner import Runner
from penstock.engine_core.execution.self_test import read_probe, trouble
from penstock.engine_core.loading.checkpoint import find_files
from penstock.engine_core.loading.checksums import check_hash, published_hashes
from penstock.protocol.config import Config
from penstock.protocol.errors import ModelError
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

MOST_THREADS = 8


class Verification:
    """Files that are being read and hashed."""

    def __init__(self, files: int, checks: Sequence[Future[None]]) -> None:
        self._files = files
        self._checks = checks

    def finish(self) -> str:
        """Wait for all of them; what is known then, in words. Raises ModelError for the first damaged file."""
        for check in self._checks:
            check.result()
        if not self._checks:
            return "not verified: nothing names their SHA-256"
        return f"SHA-256 of {len(self._checks)} of {self._files} files"


@contextmanager
def verification(config: Config, index: int, folders: Sequence[Path]) -> Iterator[Verification | None]:
    """Files of these folders for which something names a hash, while inside. None where nothing is to be checked:
    weights are random, it is switched off, or another executor of this host does it. Raises ModelError."""
    model = config.model
    if model.load_format == "dummy" or not model.verify_weights or index != config.executor.first_executor:
        yield None
        return
    files: list[Path] = []
    hashes: dict[Path, str] = {}
    for folder in folders:
        here = find_files(folder)
        files += here
        hashes |= published_hashes(folder, here)
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2, len(hashes)))
    pool = ThreadPoolExecutor(threads, "verify")
    try:
        yield Verification(len(files), [pool.submit(check_hash, path, digest) for path, digest in hashes.items()])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def check_output(config: Config, runner: Runner, folder: Path) -> None:
    """Run the self-test. Raises ModelError where it fails, or warns of it where wrong output is allowed."""
    if config.model.load_format == "dummy":
        return
    sizes = runner.sizes
    found = trouble(runner, read_probe(folder, sizes.vocabulary, sizes.max_model_len))
    if found and not config.model.allow_wrong_output:
        why = "the weights are damaged, or this model is not computed rightly here"
        raise ModelError(f"{folder}: the model failed its self-test: {found}; {why} (--allow-wrong-output serves it)")
    if found:
        logs.warning(log, "output_is_wrong", reason=f"the model failed its self-test: {found}")
