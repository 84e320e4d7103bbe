"""Compiles kernels in parallel before they are needed: one after the other they would take most of a cold start.

Dummy runs come first, in which Triton's hook collects kernels that are not compiled instead of running them. Worker
processes, where the caller has some, start on each at once and leave it in Triton's cache on disk: half of a compiler's
time is Python's, which runs in one thread of a process at a time. Then all kernels are loaded from the cache, or
compiled after all, in threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.kernels import gluon
from penstock.kernels.triton_names import KernelLaunch, cache_hook, compile_offline, current_target, read_launch

log = logging.getLogger(__name__)

MAX_THREADS = 16
# Other kernels use what these write as an index, so they run in a prewarm too.
INDEXERS = frozenset((
    "penstock.kernels.attention_schedule", "penstock.kernels.gather_triton", "penstock.kernels.routing_triton",
))  # fmt: skip


@dataclass(frozen=True)
class UncompiledKernel:
    """A specialization of a kernel that was launched and is not compiled."""

    launch: KernelLaunch
    worker: Future[None] | None  # of a process that compiles it


@contextmanager
def prewarm(compilers: Executor | None = None) -> Iterator[list[UncompiledKernel]]:
    """Within it, launches of uncompiled kernels do nothing but add to the list, each specialization once.

    Their outputs keep what they held. `compilers` are worker processes that start on each kernel at once. With a Triton
    whose hook is not understood launches compile and run, and the list stays empty.
    """
    uncompiled: list[UncompiledKernel] = []
    seen: set[tuple[str, str, str]] = set()
    understood = True

    def collect(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        nonlocal understood
        launch = read_launch(fn, compile)
        if launch is None:
            understood = False
            return False
        if launch.module in INDEXERS:
            return False
        if launch[:3] not in seen:
            seen.add(launch[:3])
            worker = None
            if compilers is not None:
                worker = compilers.submit(compile_offline, *launch[:3], current_target())
            uncompiled.append(UncompiledKernel(launch, worker))
        return True

    with cache_hook(collect) as hooked:
        yield uncompiled
    if not (hooked and understood):
        log.warning("prewarm_unavailable", extra={"fields": {"instead": "each kernel is compiled as it is first used"}})


def compile_kernels(uncompiled: Sequence[UncompiledKernel], device: torch.device) -> bool:
    """Compile and load the kernels for a GPU, as many at a time as there are cores.

    Whether all are there: a module of `kernels.gluon` whose kernel does not compile is given up, and what takes over
    has yet to be compiled. Raises the compiler's error for any other kernel.
    """
    failed: dict[str, tuple[str, Exception]] = {}
    for kernel, done in zip(uncompiled, load_all(uncompiled, device), strict=True):
        try:
            done.result()
        except Exception as error:  # guard: design 7, a compiler fails in any way, and a general kernel serves
            if kernel.launch.module not in gluon.MODULES:
                raise
            failed.setdefault(kernel.launch.module, (kernel.launch.name, error))
    causes = [kernel.worker.exception() for kernel in uncompiled if kernel.worker is not None]
    if not failed and (cause := next(filter(None, causes), None)) is not None:
        fields = {"cause": f"{type(cause).__name__}: {cause}".partition("\n")[0], "instead": "threads"}
        log.warning("compile_workers_failed", extra={"fields": fields})
    for module, (name, reason) in failed.items():
        gluon.give_up(module, name, reason)
    return not failed


def load_all(uncompiled: Sequence[UncompiledKernel], device: torch.device) -> list[Future[None]]:
    """Load kernels for a GPU, as many at a time as there are cores: all are done when this returns."""
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), max(1, len(uncompiled)))
    index = torch.cuda.current_device() if device.index is None and uncompiled else device.index
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (index,)) as pool:
        return [pool.submit(load_kernel, kernel) for kernel in uncompiled]


def load_kernel(uncompiled: UncompiledKernel) -> None:
    """Load a kernel and its launcher, which takes as long to compile. Where a worker compiled them they come from the
    cache; where it failed, the error is raised here."""
    if uncompiled.worker is not None:
        uncompiled.worker.exception()
    kernel = uncompiled.launch.preload(uncompiled.launch.specialization)
    _ = kernel.run  # its first use builds the launcher
