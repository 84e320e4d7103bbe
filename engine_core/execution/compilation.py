"""Kernels compiled side by side before they are needed: one after the other they would take most of a cold start.

Work is rehearsed first: kernels that are not there yet are noted instead of run, by Triton's own hook. Then all that
were noted are compiled in threads, or taken from Triton's cache on disk; compilers spend their time outside of Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

MOST_THREADS = 16
INDEXERS = frozenset(("kernels.gather_triton",))  # what these write becomes an index: they run in rehearsals too


@dataclass(frozen=True)
class Missing:
    """A kernel in a form that was asked for and is not there."""

    preload: Callable[[str], Any]  # of the kernel
    form: str  # as its `preload` takes it


@contextmanager
def rehearsal() -> Iterator[list[Missing]]:
    """Within it, launches of kernels that are not there leave no trace but in the list, each form of a kernel once.

    What such a kernel would have written keeps what it held.
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
            missing.append(Missing(fn.jit_function.preload, form))
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
    """Compile the kernel and, which takes as long again, what launches it; then load both."""
    kernel = missing.preload(missing.form)
    _ = kernel.run  # whoever asks for it first has it made
