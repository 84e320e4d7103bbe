"""Triton's machinery beyond its language: names that a release may change, in one place, each behind a check.

Tried with Triton 3.6 and 3.9. Gluon's names are in `kernels.gluon_names`. Nothing here is imported with the module, so
that a process without torch may use it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

CacheHook = Callable[..., bool]


class KernelLaunch(NamedTuple):
    """A specialization of a kernel, as Triton's cache hook tells of it before it is compiled."""

    module: str
    name: str
    specialization: str  # as `preload` takes it
    preload: Callable[[str], Any]


class OfflineDriver:
    """Triton's driver in a process that must not touch the GPU it compiles for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def knobs(group: str) -> Any:
    """A group of Triton's settings, None where it has none of that name."""
    import triton

    return getattr(getattr(triton, "knobs", None), group, None)


def set_fp_fusion() -> bool:
    """Have products be fused with the sums behind them, which Triton 3.10 will not do unless it is told to: the bits of
    all kernels were tested so. Processes started later inherit it. Whether this Triton has the setting."""
    language = knobs("language")
    if not hasattr(language, "default_fp_fusion"):
        return False
    language.default_fp_fusion = True
    return True


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels of this process, which knows no PTX."""
    found = getattr(knobs("runtime"), "interpret", None)
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on") if found is None else found


def cache_folder() -> Path:
    """Where Triton keeps compiled kernels."""
    found = getattr(knobs("cache"), "dir", None) or os.environ.get("TRITON_CACHE_DIR")
    return Path(found) if found else Path.home() / ".triton" / "cache"


@contextmanager
def cache_hook(hook: CacheHook) -> Iterator[bool]:
    """Within it `hook` is asked before a kernel is compiled; where it says True the launch does nothing.

    Gives whether this Triton has such a hook, and can compile what it tells of.
    """
    import triton

    runtime = knobs("runtime")
    if not hasattr(runtime, "jit_cache_hook") or not hasattr(triton.JITFunction, "preload"):
        yield False
        return
    before = runtime.jit_cache_hook
    runtime.jit_cache_hook = hook
    try:
        yield True
    finally:
        runtime.jit_cache_hook = before


def read_launch(fn: Any, compile: dict[str, Any]) -> KernelLaunch | None:
    """What the hook was told, or None where this Triton tells it otherwise: then the kernel is compiled at once."""
    try:
        return KernelLaunch(fn.module, fn.name, compile["specialization_data"], fn.jit_function.preload)
    except (AttributeError, KeyError):
        return None


def watch_compilations(before: CacheHook, after: Callable[..., None]) -> bool:
    """From now on have `before` and `after` called around each compilation. Whether this Triton does that."""
    runtime = knobs("runtime")
    if not hasattr(runtime, "jit_cache_hook") or not hasattr(runtime, "jit_post_compile_hook"):
        return False
    runtime.jit_cache_hook, runtime.jit_post_compile_hook = before, after
    return True


def current_target() -> Any:
    """The GPU that kernels are compiled for in this process."""
    import triton

    return triton.runtime.driver.active.get_current_target()


def import_compiler() -> None:
    """Import what every compilation does, before processes that compile are forked."""
    for module in ("triton.backends.nvidia.driver", "triton.compiler.compiler"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def compile_offline(module: str, name: str, specialization: str, target: Any) -> None:
    """Leave a kernel and its launcher in Triton's cache on disk, without a GPU."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.driver import driver

    driver.set_active(OfflineDriver(target))
    kernel = getattr(importlib.import_module(module), name).preload(specialization)
    CudaLauncher(kernel.src, kernel.metadata)


def open_compiler() -> None:
    """Load Triton's own driver module, which it compiles where its cache is empty. It imports no torch. A Triton
    without it loads what it needs with the first kernel."""
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("triton")  # first: it imports its backends, and another thread may be importing it
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()
