"""Tables of rotary positions, stretched as the model's configuration says."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.engine_core.models.layer_spec import RopeSpec


def rope_table(rope: RopeSpec, head_dim: int, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of positions 0..length-1: fp32 `[length, head_dim]`, cosines of half the dimensions first.

    Numbers of a head that are not turned have the angle zero: the pairs of those that are come first.
    """
    if rope.kind == "none":
        return torch.cat((torch.ones(length, head_dim // 2), torch.zeros(length, head_dim // 2)), dim=1).to(device)
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * rope_frequencies(rope, rope.dim or head_dim, length)
    still = (0, head_dim // 2 - angles.shape[1])
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.cat((pad(cos, still, value=1.0), pad(sin, still)), dim=1).to(device)


def query_scales(rope: RopeSpec, length: int, device: torch.device) -> Tensor | None:
    """What queries of positions 0..length-1 are multiplied with, fp32 `[length]`; None: nothing (Nakanishi, 2025)."""
    if not rope.temperature:
        return None
    turns = (torch.arange(length, dtype=torch.float32) + rope.temperature_shift) / rope.temperature_length
    return (1.0 + rope.temperature * turns.floor().log1p()).to(device)


def rope_axes(rope: RopeSpec, head_dim: int, device: torch.device) -> Tensor | None:
    """By which of a token's positions each pair of a head turns: int32 `[head_dim / 2]`, 0 its time, 1 its line, 2 its
    column; None: the rope has one position (M-RoPE: Wang et al., 2024; alternating: Qwen3-VL, 2025)."""
    if not rope.sections:
        return None
    axes = torch.zeros(head_dim // 2, dtype=torch.int32)
    if rope.sections_alternate:
        for axis, count in enumerate(rope.sections[1:], 1):
            axes[axis : 3 * count : 3] = axis
    else:
        turns = torch.arange(len(rope.sections), dtype=torch.int32) % 3
        found = turns.repeat_interleave(torch.tensor(rope.sections))
        axes[: len(found)] = found
    return axes.to(device)


def head_order(rope: RopeSpec, head_dim: int) -> tuple[slice, ...]:
    """Which numbers of a head in the checkpoint, in this order, make a head as the kernels want it: number i pairs with
    i + head_dim / 2. Scores do not depend on the order, which queries and keys share."""
    dim = rope.dim or head_dim
    half, rest = dim // 2, (head_dim - dim) // 2
    if rope.interleaved:
        turned = slice(0, dim, 2), slice(1, dim, 2)
    else:
        turned = slice(0, half), slice(half, dim)
    if not rest:
        return turned if rope.interleaved else (slice(0, dim),)
    return turned[0], slice(dim, dim + rest), turned[1], slice(dim + rest, head_dim)


def rope_frequencies(rope: RopeSpec, dim: int, length: int) -> Tensor:
    """Radians per position of each pair of dimensions, fp32 `[dim / 2]`, for a model served up to `length` positions.

    Dynamic scaling raises the base with the sequence in its first form; but a cached key outlives the length that it
    was turned for, and a base that moves would make tokens depend on chunking and on cache hits. So the base is fixed
    for the served length: up to the trained length these are the plain frequencies, beyond it those that the first form
    has for a sequence of exactly that length. Longrope's choice of factors is fixed for it likewise.
    """
    theta = rope.theta
    if rope.kind == "dynamic" and length > rope.original_max_position:
        stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "proportional":
        return plain[: int(rope.share * dim // 2)] / rope.factor
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.long_factor if length > rope.original_max_position else rope.short_factor)
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
