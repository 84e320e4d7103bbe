"""Gluon's barrier, TMA load and view of shared memory, by whichever names this Triton has for them."""

from __future__ import annotations

from triton.experimental.gluon.language import shared_memory_descriptor as Shared

try:
    from triton.experimental.gluon.language import barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:  # names of Triton 3.6
    from triton.experimental.gluon.language import thread_barrier as barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load

# A tile as another type, shape and layout; private in Triton 3.6.
REINTERPRET = Shared.reinterpret if hasattr(Shared, "reinterpret") else Shared._reinterpret

__all__ = ["REINTERPRET", "async_load", "barrier"]
