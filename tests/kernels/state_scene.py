"""Recurrent layers over texts that are cut into steps, and their definition, token by token in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.recurrence import gated_delta, state_space
from penstock.kernels.states import Gates, RecurrentCache, StateBatch, begin_states, ring_length

PLACES = 4  # of snapshots


class Row(NamedTuple):
    """Tokens that a step computes of a text."""

    text: int
    start: int
    count: int
    steps: bool = False
    kept: Mapping[int, int] = {}  # places of snapshots by their positions


@dataclass(frozen=True, eq=False)
class Layer:
    """Inputs of some texts of equal length, `[texts, length, ...]`; `skip` makes it Mamba-2."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    weight: Tensor
    scale: float = 1.0
    skip: Tensor | None = None

    def to(self, device: str, dtype: torch.dtype) -> Layer:
        """Queries, keys and values in a type."""
        return replace(
            self, q=self.q.to(device, dtype), k=self.k.to(device, dtype), v=self.v.to(device, dtype),
            decay=self.decay.to(device), weight=self.weight.to(device),
            skip=None if self.skip is None else self.skip.to(device),
        )  # fmt: skip


def layer(texts: int, length: int, heads: tuple[int, int], dims: tuple[int, int], *, delta: bool, seed: int) -> Layer:
    """heads: of keys, and of values; dims: likewise."""
    random = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(texts, length, *shape, generator=random)

    q, k, v = drawn(heads[0], dims[0]), drawn(heads[0], dims[0]), drawn(heads[1], dims[1])
    decay, weight = -drawn(heads[1]).abs() * 0.1, drawn(heads[1]).sigmoid()
    if delta:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        return Layer(q, k, v, decay, weight, dims[0] ** -0.5)
    return Layer(q, k, v, decay, weight, skip=torch.randn(heads[1], generator=random))


def cache_of(given: Layer, slots: int, most_steps: int, states: torch.dtype = torch.float32) -> RecurrentCache:
    """Memory full of what would spoil results."""
    ring = ring_length(most_steps)
    _, _, key_heads, key_dim = given.k.shape
    heads, dim = given.v.shape[2:]

    def filled(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=given.v.device)

    kind = given.v.dtype
    return RecurrentCache(
        filled(slots, heads, key_dim, dim, dtype=states), filled(slots, ring, key_heads, key_dim, dtype=kind),
        filled(slots, ring, heads, dim, dtype=kind),
        None if given.skip is not None else filled(slots, ring, heads, dim, dtype=kind),
        filled(slots, ring, 2, heads, dtype=torch.float32),
        filled(PLACES, heads, key_dim, dim, dtype=states),
    )  # fmt: skip


def batch_of(rows: Sequence[Row], bases: Tensor, most_steps: int) -> StateBatch:
    """Slot i + 1 is text i's; slot 0 is scratch."""

    def numbers(*given: int) -> Tensor:
        return torch.tensor(given, dtype=torch.int32, device=bases.device)

    ends = [0]
    for row in rows:
        ends.append(ends[-1] + row.count)
    chunks = sum(not row.steps for row in rows)
    places = [row.kept.get(row.start + at + 1, -1) for row in rows for at in range(row.count)]
    return begin_states(
        numbers(*ends), numbers(*(row.text + 1 for row in rows)), numbers(*(row.start for row in rows)),
        numbers(*(int(row.steps) for row in rows)), bases, ends[-1], most_steps, chunks,
        kept=numbers(*places) if any(row.kept for row in rows) else None,
    )  # fmt: skip


def run_step(given: Layer, rows: Sequence[Row], cache: RecurrentCache, batch: StateBatch) -> Tensor:
    def tokens(x: Tensor) -> Tensor:
        return torch.cat([x[row.text, row.start : row.start + row.count] for row in rows])

    q, k, v = tokens(given.q), tokens(given.k), tokens(given.v)
    gates = Gates(tokens(given.decay), tokens(given.weight))
    if given.skip is None:
        return gated_delta(q, k, v, gates, cache, batch, given.scale)
    return state_space(v, k, q, gates, given.skip, cache, batch)


def exact(given: Layer, text: int) -> tuple[Tensor, Tensor]:
    """Results `[length, heads, value_dim]`, and the state behind each token, in fp64."""
    group = given.v.shape[2] // given.k.shape[2]
    q, k = (x[text].double().repeat_interleave(group, 1) for x in (given.q, given.k))
    v, decay, weight = given.v[text].double(), given.decay[text].double(), given.weight[text].double()
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    results, states = [], []
    for at in range(len(v)):
        state = state * decay[at].exp()[:, None, None]
        u = v[at] if given.skip is not None else v[at] - torch.einsum("hk,hkv->hv", k[at], state)
        state = state + torch.einsum("hk,hv->hkv", k[at], u * weight[at, :, None])
        results.append(torch.einsum("hk,hkv->hv", q[at], state) * given.scale)
        states.append(state)
    found = torch.stack(results)
    return (found if given.skip is None else found + v * given.skip.double()[:, None]), torch.stack(states)


def cut_at(text: int, *cuts: int, kept: Mapping[int, int] | None = None) -> list[Row]:
    """Chunks of a text from 0 over the cuts."""
    edges = [0, *cuts]
    return [
        Row(text, first, last - first, kept={at: place for at, place in (kept or {}).items() if first < at <= last})
        for first, last in itertools.pairwise(edges)
    ]


def copied(cache: RecurrentCache) -> RecurrentCache:
    held = {one.name: getattr(cache, one.name) for one in fields(cache)}
    return RecurrentCache(**{name: None if x is None else x.clone() for name, x in held.items()})
