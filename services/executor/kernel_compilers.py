"""Kernels are compiled by forks of the starting executor, which share its imports. A kernel that is compiled later,
under requests, is logged."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

import torch

from penstock.kernels.triton_names import import_compiler, watch_compilations
from penstock.services.supervisor import logs, process

log = logging.getLogger(__name__)

MAX_COMPILERS = 12  # about as many kernels take a second or more


@contextmanager
def compilers(device: torch.device) -> Iterator[Executor | None]:
    """Processes that compile a GPU's kernels, one per core, for as long as the context; None for a CPU.

    They never touch the GPU, so this process may have used it before the fork. They end with this process.
    """
    if device.type == "cpu":
        yield None
        return
    import_compiler()
    count = min(MAX_COMPILERS, len(os.sched_getaffinity(0)))
    with forks(count) as pool:
        yield pool


@contextmanager
def forks(count: int) -> Iterator[Executor]:
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), begin, (os.getpid(),))
    try:
        pool.submit(os.getpid)
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def begin(parent: int) -> None:
    """Run first in a fork: it handles none of the executor's signals and does not outlive the executor."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    process.follow_parent({process.PARENT: str(parent)})


def log_compilations(device: torch.device) -> None:
    """From now on, log each kernel that this process compiles: all streams wait for it.

    Source: Triton's `knobs.runtime.jit_cache_hook`, called before a compilation, and `jit_post_compile_hook`.
    """
    if device.type == "cpu":
        return
    began = time.monotonic()

    def before(**_: object) -> bool:
        nonlocal began
        began = time.monotonic()
        return False  # go on

    def after(*, repr: str, **_: object) -> None:
        logs.warning(log, "kernel_compiled", kernel=repr, seconds=time.monotonic() - began)

    if not watch_compilations(before, after):
        logs.warning(log, "compilations_unwatched", instead="a kernel compiled under requests is not logged")
