"""Programmatic dependent launch (PDL, CUDA programming guide), on chips that have it.

A kernel launched with `launch_pdl` may start while the previous one still runs. Before `gdc_wait` it may read only what
no kernel of a step writes, which is weights. Every such kernel waits, so completion is handed on along the whole
stream. A kernel that never calls `gdc_launch_dependents`, or was launched without PDL, is waited for to its end. CUDA
graphs keep these launches as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_pdl(PDL: tl.constexpr):
    """Let the next kernel start, then wait until the previous one is complete."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
