"""Tensors without memory, by which launches are collected."""

from __future__ import annotations

import torch
from torch import Tensor

SLOTS = 257  # of a server, the scratch slot among them


def memory(*shape: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=kind, device="meta")


def numbers(*shape: int) -> Tensor:
    return memory(*shape, kind=torch.int32)
