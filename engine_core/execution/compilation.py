"""Kernels compiled side by side before they are needed: one after the other they would take most of a cold start.

Work is rehearsed first: kernels that are not there yet are noted instead of run, by Triton's own hook. Processes, where
the caller has some, begin to compile each as it is noted, into Triton's cache on disk: half of a compiler's time is
Python's, of which a process runs one thread at a time. Then all are loaded from there, or compiled after all, in
threads.
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

MOST_THREADS = 16
# What these write becomes an index: they run in rehearsals too.
INDEXERS = frozenset((
    "penstock.kernels.attention_schedule", "penstock.kernels.gather_triton", "penstock.kernels.routing_triton",
))  # fmt: skip


@dataclass(frozen=True)
class Missing:
    """A kernel in a form that was asked for and is not there."""

    preload: Callable[[str], Any]  # of the kernel
    form: str  # as its `preload` takes it
    elsewhere: Future[None] | None  # a process compiles it


class Absent:
    """Triton's driver where the GPU that is compiled for must not be touched."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextmanager
def rehearsal(compilers: Executor | None = None) -> Iterator[list[Missing]]:
    """Within it, launches of kernels that are not there leave no trace but in the list, each form of a kernel once.

    What such a kernel would have written keeps what it held. `compilers` are processes that begin with each at once.
    """
    import triton

    missing: list[Missing] = []
    noted: set[tuple[str, str, str]] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        form: str = compile["specialization_data"]
        if fn.module in INDEXERS:
            return False
        if (fn.module, fn.name, form) not in noted:
            noted.add((fn.module, fn.name, form))
            elsewhere = None
            if compilers is not None:
                target = triton.runtime.driver.active.get_current_target()
                elsewhere = compilers.submit(compile_form, fn.module, fn.name, form, target)
            missing.append(Missing(fn.jit_function.preload, form, elsewhere))
        return True

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield missing
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def compile_all(missing: Sequence[Missing], device: torch.device) -> None:
    """Make the kernels for a GPU, as many at a time as there are cores."""
    if not missing:
        return
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), len(missing))
    index = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (index,)) as pool:
        for done in [pool.submit(make, one) for one in missing]:
            done.result()


def make(missing: Missing) -> None:
    """Compile the kernel and, which takes as long again, what launches it; then load both. Where a process did it, they
    are found in the cache; where one failed, that comes out here."""
    if missing.elsewhere is not None:
        missing.elsewhere.exception()
    kernel = missing.preload(missing.form)
    _ = kernel.run  # whoever asks for it first has it made


def compile_form(module: str, name: str, form: str, target: Any) -> None:
    """In a process of its own, which has no GPU: have the kernel, and what launches it, in Triton's cache on disk."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.driver import driver

    driver.set_active(Absent(target))
    kernel = getattr(importlib.import_module(module), name).preload(form)
    CudaLauncher(kernel.src, kernel.metadata)
