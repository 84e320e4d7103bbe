"""Linear recurrences of a decayed state: Gated DeltaNet (Yang et al., 2025) and Mamba-2 (Dao and Gu, 2024).

Both hold a matrix S per head and read it by o = q S. A token fades it and adds its key times a vector u:
S = exp(decay) S + k u. For Mamba-2 u is weight * v. For the delta rule it is the part of that which the faded state
does not give yet, weight * (v - k exp(decay) S). A piece of PIECE positions takes a few products of matrices: each u
follows from the state before the piece and from the keys and values in it (the WY form).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.states import PIECE, Gates, Part, RecurrentCache, StateBatch


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, cache: RecurrentCache, batch: StateBatch, scale: float
) -> Tensor:
    """The gated delta rule; advances the cache, and returns `[tokens, heads, value_dim]` of v's type.

    q and k are `[tokens, key_heads, key_dim]` of length 1 in their last axis (`short_convolution` makes them so), v is
    `[tokens, heads, value_dim]`, all of one type and read by their strides; value head h has key head
    h // (heads / key_heads). Scores are multiplied by `scale`. Sums and states are fp32.

    Bits: the state at a base is the same however its text was cut, and by whatever steps it came. A chunk's results
    are the same wherever the chunk begins and ends, and on a CPU those of steps are the same as a chunk's. On a GPU a
    step reads pseudo-values that were rounded to v's type, which costs about one rounding of it. States are free of it.
    """
    assert cache.updates is not None
    return recur(Part(q, k, v, gates), cache, batch, scale)


def state_space(
    x: Tensor, b: Tensor, c: Tensor, gates: Gates, skip: Tensor, cache: RecurrentCache, batch: StateBatch
) -> Tensor:
    """Mamba-2's layer; advances the cache, and returns `[tokens, heads, head_dim]` of x's type.

    x is `[tokens, heads, head_dim]`, b and c `[tokens, groups, state]`, which neighbouring heads share, skip fp32
    [heads], by which x is added to the results. The gates' weights are the time steps. Bits are as in `gated_delta`.
    """
    assert cache.updates is None
    return recur(Part(c, b, x, gates), cache, batch, 1.0, skip)


def recur(
    part: Part, cache: RecurrentCache, batch: StateBatch, scale: float, skip: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Both: the delta rule where the cache has updates. skip: fp32 [heads], of values in the results."""
    if chip_of(part.v.device).runs_triton:
        from penstock.kernels.recurrence_triton import recur_rows

        return recur_rows(part, cache, batch, scale, skip)
    out = torch.zeros(part.v.shape, dtype=part.v.dtype, device=part.v.device)
    ends = batch.query_start.tolist()
    rows = zip(batch.slots.tolist(), batch.starts.tolist(), batch.stepping.tolist(), batch.bases.tolist(), strict=True)
    for row, (slot, start, steps, base) in enumerate(rows):
        own = slice(ends[row], ends[row + 1])
        if own.stop > own.start:
            tokens = Part(part.q[own], part.k[own], part.v[own], Gates(part.gates.decay[own], part.gates.weight[own]))
            kept = None if batch.kept is None else batch.kept[own].tolist()
            out[own] = recur_row(tokens, cache, slot, start, base, scale, stepping=bool(steps), kept=kept)
    if skip is not None:
        out = (out + part.v * skip[:, None]).to(part.v.dtype)
    return out


def recur_row(
    tokens: Part, cache: RecurrentCache, slot: int, start: int, base: int, scale: float, *, stepping: bool,
    kept: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """The plain-torch reference for one row. Arithmetic is of the states' type, so that tests may have it in fp64."""
    end, ring = start + len(tokens.v), cache.keys.shape[1]
    state = cache.states[slot] if base else torch.zeros_like(cache.states[slot])
    stays = start if stepping else end
    found = []
    for first in range(base, end, PIECE):
        last = min(first + PIECE, end)
        piece = read_piece(tokens, cache, slot, start, first, last)
        results, updates, state = advance(piece, state, scale, delta=cache.updates is not None)
        if first + PIECE <= stays:
            cache.states[slot] = state
        if kept is not None and cache.snapshots is not None and start < first + PIECE <= end:
            place = kept[first + PIECE - 1 - start]
            if place >= 0:
                cache.snapshots[place] = state
        new = torch.arange(max(start, first), max(start, last))
        found.append(results[new - first])
        if cache.updates is not None:
            cache.updates[slot, new % ring] = updates[new - first].to(cache.updates.dtype)
    held = min(end - start, ring)
    places = torch.arange(end - held, end) % ring
    cache.keys[slot, places] = tokens.k[-held:]
    cache.values[slot, places] = tokens.v[-held:]
    cache.gates[slot, places] = torch.stack(tokens.gates, 1)[-held:]
    return torch.cat(found)


def read_piece(tokens: Part, cache: RecurrentCache, slot: int, start: int, first: int, last: int) -> Part:
    """Positions first .. last - 1: those below `start` from the ring, without queries; zeros behind them."""
    old = torch.arange(first, max(min(start, last), first)) % cache.keys.shape[1]
    new = slice(max(first - start, 0), max(last - start, 0))

    def padded(held: Tensor, given: Tensor) -> Tensor:
        whole = torch.cat((held.to(given.dtype), given[new])).to(cache.states.dtype)
        return torch.nn.functional.pad(whole, [0, 0] * (whole.dim() - 1) + [0, PIECE - len(whole)])

    keys, (decays, weights) = cache.keys[slot, old], cache.gates[slot, old].unbind(1)
    return Part(
        padded(torch.zeros_like(keys), tokens.q), padded(keys, tokens.k), padded(cache.values[slot, old], tokens.v),
        Gates(padded(decays, tokens.gates.decay), padded(weights, tokens.gates.weight)),
    )  # fmt: skip


def advance(piece: Part, state: Tensor, scale: float, *, delta: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Results and updates `[PIECE, heads, value_dim]` of a piece, and the state behind it, from that before it. A row
    of a result follows from the piece's tokens up to its own; those behind it may be zeros."""
    group = piece.v.shape[1] // piece.k.shape[1]
    q, k = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (piece.q, piece.k))  # [heads, PIECE, key_dim]
    weight = piece.gates.weight.T[..., None]  # [heads, PIECE, 1]
    u = piece.v.transpose(0, 1) * weight
    passed = piece.gates.decay.T.cumsum(1)  # [heads, PIECE]
    fade = (passed[:, :, None] - passed[:, None]).tril().exp().tril()  # [heads, PIECE, PIECE]
    old = passed.exp()[..., None]
    if delta:
        among = (k @ k.transpose(1, 2) * fade * weight).tril(-1)
        u = torch.linalg.solve_triangular(
            among, u - weight * old * (k @ state), upper=False, unitriangular=True
        )  # fmt: skip
    results = (old * (q @ state) + (q @ k.transpose(1, 2) * fade) @ u) * scale
    left = (passed[:, -1:] - passed).exp()[..., None]
    state = state * old[:, -1:] + k.transpose(1, 2) @ (left * u)
    return results.transpose(0, 1), u.transpose(0, 1), state
