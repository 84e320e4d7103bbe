"""Programmatic dependent launch (PDL, CUDA programming guide), and the number of a GPU's multiprocessors.

A kernel launched with `launch_pdl` may start while the previous one still runs. Before `gdc_wait` it may read only what
no kernel of a step writes, which is weights. Every such kernel waits, so completion is handed on along the whole
stream. A kernel that never calls `gdc_launch_dependents`, or was launched without PDL, is waited for to its end. CUDA
graphs keep these launches as they are.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@triton.jit
def begin_pdl(PDL: tl.constexpr):
    """Let the next kernel start, then wait until the previous one is complete."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@lru_cache(maxsize=64)
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on the device can overlap by PDL: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=64)
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; where there is none (Triton's interpreter), one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
