"""Launches of recurrent layers for `benchmarks.chip_launches`, which has replaced `chip_of` when it imports this."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.meta_tensors import SLOTS, memory, numbers
from penstock.kernels.gated_norm import gated_norm
from penstock.kernels.recurrence import gated_delta, state_space
from penstock.kernels.short_convolution import NO_HEADS, short_convolution
from penstock.kernels.state_gates import delta_gates, time_gates
from penstock.kernels.states import RecurrentCache, UnitHeads, begin_states, convolution_length, ring_length


def recurrent(heads: int, key_heads: int, key_dim: int, dim: int, *, delta: bool) -> None:
    """Steps of single tokens, many and one, and of chunks among drafts."""
    single = torch.float32
    ring, width = ring_length(4), 4 if delta else 3
    channels = 2 * key_heads * key_dim + heads * dim
    states = memory(SLOTS, heads, key_dim, dim, kind=single)
    cache = RecurrentCache(
        states,
        memory(SLOTS, ring, key_heads, key_dim), memory(SLOTS, ring, heads, dim),
        memory(SLOTS, ring, heads, dim) if delta else None,
        memory(SLOTS, ring, 2, heads, kind=single),
        states,
    )  # fmt: skip
    inputs = memory(SLOTS, convolution_length(width, 4), channels)
    unit = UnitHeads(2 * key_heads, key_dim) if delta else NO_HEADS
    products = memory(2048, heads)
    of_heads = memory(heads, kind=single)
    for chunk_rows, most_steps in ((0, 1), (1, 4)):
        rows = numbers(64)
        kept = numbers(2048) if chunk_rows else None
        batch = begin_states(numbers(65), rows, rows, rows, numbers(SLOTS), 2048, most_steps, chunk_rows, kept=kept)
        x = memory(2048, channels)
        weight, bias = memory(channels, width), None if delta else memory(channels)
        x = short_convolution(x, weight, bias, inputs, batch, unit=unit, tails=memory(SLOTS, width - 1, channels))
        q, k, v = x.split((key_heads * key_dim,) * 2 + (heads * dim,), 1)
        q, k = (part.unflatten(1, (key_heads, key_dim)) for part in (q, k))
        v = v.unflatten(1, (heads, dim))
        few = [replace(batch, slots=numbers(1), most_pieces=0)] if most_steps == 1 else []
        for some in [batch, *few]:
            if delta:
                found = gated_delta(q, k, v, delta_gates(products, products, of_heads, of_heads), cache, some, 0.1)
            else:
                found = state_space(v, k, q, time_gates(products, of_heads, of_heads), of_heads, cache, some)
        if delta:
            gated_norm(found, v, memory(dim), 1e-6, gate_first=False)
        else:
            wide = found.flatten(1)[:, None]
            gated_norm(wide, wide, memory(wide.shape[2]), 1e-6, gate_first=True)
