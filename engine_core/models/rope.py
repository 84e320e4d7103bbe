"""Tables of rotary positions, stretched as the model's configuration says."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.engine_core.models.spec import ModelSpec, RopeSpec


def rope_table(spec: ModelSpec, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of positions 0..length-1: fp32 `[length, head_dim]`, cosines of half the dimensions first."""
    rope, positions = spec.attention.rope, torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * rope_frequencies(rope, spec.attention.head_dim, length)
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor
    return table.to(device)


def rope_frequencies(rope: RopeSpec, dim: int, length: int) -> Tensor:
    """Radians per position of each pair of dimensions, fp32 `[dim / 2]`, for a model served up to `length` positions.

    Dynamic scaling raises the base with the sequence in its first form; but a cached key outlives the length that it
    was turned for, and a base that moves would make tokens depend on chunking and on cache hits. So the base is fixed
    for the served length: up to the trained length these are the plain frequencies, beyond it those that the first form
    has for a sequence of exactly that length.
    """
    theta = rope.theta
    if rope.kind == "dynamic" and length > rope.original_max_position:
        stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        return yarn_frequencies(rope, dim, plain)
    if rope.kind == "llama3":
        return llama3_frequencies(rope, plain)
    return plain


def yarn_frequencies(rope: RopeSpec, dim: int, plain: Tensor) -> Tensor:
    """Fast dimensions keep their frequency, slow ones are divided, a ramp between (Peng et al., 2023, section 3.2)."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def llama3_frequencies(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long wavelengths are divided, short ones kept, a ramp between (Llama 3.1 model card)."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # rotations within the trained length
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain
