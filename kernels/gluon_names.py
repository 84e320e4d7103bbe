"""Gluon's barrier and TMA load, by whichever names this Triton has for them."""

from __future__ import annotations

try:
    from triton.experimental.gluon.language import barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:  # names of Triton 3.6
    from triton.experimental.gluon.language import thread_barrier as barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load

__all__ = ["async_load", "barrier"]
