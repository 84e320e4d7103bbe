"""Memory of the KV cache and of the mask store."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.models.spec import ModelSpec

CACHE_LINE = 64  # bytes

Pages = tuple[Tensor, Tensor]  # keys and values of one layer: [blocks + 1, block_size, kv_heads, head_dim] each


def kv_pages(spec: ModelSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> list[Pages]:
    """A pair for each layer, zero. Block 0 is scratch."""
    shape = blocks + 1, block_size, spec.kv_heads, spec.head_dim
    return [(zeros(shape, dtype, device), zeros(shape, dtype, device)) for _ in range(spec.layers)]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU the memory is the kernel's promise: it becomes real as it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    promised = np.zeros(size + CACHE_LINE, np.uint8)
    start = -promised.ctypes.data % CACHE_LINE
    return torch.from_numpy(promised[start : start + size]).view(dtype).view(shape)
