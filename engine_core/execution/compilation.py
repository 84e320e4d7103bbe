"""Compiles kernels in parallel before they are needed: one after the other they would take most of a cold start.

Dummy runs come first, in which Triton's hook collects kernels that are not compiled instead of running them. Worker
processes, where the caller has some, start on each at once and leave it in Triton's cache on disk: half of a compiler's
time is Python's, which runs in one thread of a process at a time. Then all kernels are loaded from the cache, or
compiled after all, in threads.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

MAX_THREADS = 16
# Other kernels use what these write as an index, so they run in a prewarm too.
INDEXERS = frozenset((
    "penstock.kernels.attention_schedule", "penstock.kernels.gather_triton", "penstock.kernels.routing_triton",
))  # fmt: skip


@dataclass(frozen=True)
class UncompiledKernel:
    """A specialization of a kernel that was launched and is not compiled."""

    preload: Callable[[str], Any]  # of the kernel
    specialization: str  # as `preload` takes it
    worker: Future[None] | None  # of a process that compiles it


class OfflineDriver:
    """Triton's driver in a process that must not touch the GPU it compiles for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextmanager
def prewarm(compilers: Executor | None = None) -> Iterator[list[UncompiledKernel]]:
    """Within it, launches of uncompiled kernels do nothing but add to the list, each specialization once.

    Their outputs keep what they held. `compilers` are worker processes that start on each kernel at once.
    """
    import triton

    uncompiled: list[UncompiledKernel] = []
    seen: set[tuple[str, str, str]] = set()

    def collect(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        specialization: str = compile["specialization_data"]
        if fn.module in INDEXERS:
            return False
        if (fn.module, fn.name, specialization) not in seen:
            seen.add((fn.module, fn.name, specialization))
            worker = None
            if compilers is not None:
                target = triton.runtime.driver.active.get_current_target()
                worker = compilers.submit(compile_kernel, fn.module, fn.name, specialization, target)
            uncompiled.append(UncompiledKernel(fn.jit_function.preload, specialization, worker))
        return True

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = collect
    try:
        yield uncompiled
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def compile_kernels(uncompiled: Sequence[UncompiledKernel], device: torch.device) -> None:
    """Compile and load the kernels for a GPU, as many at a time as there are cores."""
    if not uncompiled:
        return
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(uncompiled))
    index = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (index,)) as pool:
        for done in [pool.submit(load_kernel, kernel) for kernel in uncompiled]:
            done.result()


def load_kernel(uncompiled: UncompiledKernel) -> None:
    """Load a kernel and its launcher, which takes as long to compile. Where a worker compiled them they come from the
    cache; where it failed, the error is raised here."""
    if uncompiled.worker is not None:
        uncompiled.worker.exception()
    kernel = uncompiled.preload(uncompiled.specialization)
    _ = kernel.run  # its first use builds the launcher


def compile_kernel(module: str, name: str, specialization: str, target: Any) -> None:
    """In a worker process without a GPU: leave the kernel and its launcher in Triton's cache on disk."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.driver import driver

    driver.set_active(OfflineDriver(target))
    kernel = getattr(importlib.import_module(module), name).preload(specialization)
    CudaLauncher(kernel.src, kernel.metadata)
