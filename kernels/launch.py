"""Launches that overlap the end of the kernel before them (CUDA programming guide, programmatic dependent launch).

A kernel launched with `launch_pdl` may start while the one before it still runs. It fetches what no kernel of a step
writes (weights), waits by `gdc_wait` until the kernel before it is complete, and touches nothing else earlier. Every
such kernel waits, so completeness is handed on along the whole stream; one that never says `gdc_launch_dependents`, or
was launched otherwise, is simply waited for to its end. Graphs keep these launches as they are.
"""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def overlaps(device: torch.device) -> bool:
    """Whether the device can start a kernel before the last one ended: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; where there is none (Triton's interpreter), one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
