"""Single tokens of recurrent layers on one GPU: `python -m benchmarks.state_kernels`.

Rows of a step have slots of their own and entries in all numbers; calls stand in a CUDA graph and go through slots that
hold several times what the cache does. Results and entries are held to double precision first. A figure is microseconds
of a layer, and the share of the copy bandwidth that its bytes reach.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from penstock.kernels.recurrence_triton import recur_rows
from penstock.kernels.states import PIECE, Gates, Part, RecurrentCache, StateBatch, ring_length

ROWS = (1, 8, 64, 256)
SLOTS = 512
CALLS = 64  # of a graph at most, each with slots of its own as far as there are enough
LONG = 8 * PIECE  # tokens of a row before its piece
COPY = 4.28e12  # bytes a second that a device copy reads and writes, measured
MOST_OFF = 4e-3  # relative distance from the exact result, which is rounded once
REPLAYS = 5


class Shape(NamedTuple):
    name: str
    heads: int
    key_heads: int
    key_dim: int
    dim: int
    delta: bool


SHAPES = (Shape("Qwen3.5", 32, 16, 128, 128, True), Shape("Falcon-H1", 32, 2, 256, 64, False))


FILE = Path("benchmarks/results/h200/state_kernels.json")


class Scene:
    """A layer's states, and inputs of rows."""

    def __init__(self, shape: Shape, slots: int, device: str = "cuda", kind: torch.dtype = torch.bfloat16) -> None:
        self.shape, ring = shape, ring_length(1)

        def drawn(*size: int, kind: torch.dtype = kind) -> Tensor:
            return torch.randn(size, dtype=torch.float32, device=device).to(kind)

        keys = torch.nn.functional.normalize(drawn(slots, ring, shape.key_heads, shape.key_dim), dim=-1)
        gates = torch.empty(slots, ring, 2, shape.heads, device=device).uniform_(0.01, 0.1)
        gates[:, :, 0].neg_()
        states = torch.empty(slots, shape.heads, shape.key_dim, shape.dim, device=device).normal_()
        values = drawn(slots, ring, shape.heads, shape.dim)
        self.cache = RecurrentCache(states, keys, values, drawn(*values.shape) if shape.delta else None, gates)
        channels = 2 * shape.key_heads * shape.key_dim + shape.heads * shape.dim
        self.x = drawn(slots, channels)
        self.gates = Gates(
            -torch.rand(slots, shape.heads, device=device) * 0.1, torch.rand(slots, shape.heads, device=device)
        )
        self.skip = None if shape.delta else torch.randn(shape.heads, device=device)
        self.scale = shape.key_dim**-0.5 if shape.delta else 1.0

    def part(self, rows: int) -> Part:
        wide = self.shape.key_heads * self.shape.key_dim
        q, k, v = self.x[:rows].split((wide, wide, self.shape.heads * self.shape.dim), 1)
        q, k = (x.unflatten(1, (self.shape.key_heads, self.shape.key_dim)) for x in (q, k))
        gates = Gates(self.gates.decay[:rows], self.gates.weight[:rows])
        return Part(q, k, v.unflatten(1, (self.shape.heads, self.shape.dim)), gates)

    def batch(self, rows: int, first: int, *, early: bool = False) -> StateBatch:
        """Slots from `first` on, which wrap. early: every third row has no state yet."""
        device = self.x.device
        row = torch.arange(rows + 1, dtype=torch.int32, device=device)
        slots = (first + row[:-1]) % len(self.cache.states)
        bases = torch.full_like(slots, LONG) * ((row[:-1] % 3 > 0) if early else 1)
        starts = bases + slots * 37 % PIECE
        return StateBatch(row, slots, starts, torch.ones_like(slots), bases, row, row, 1, 0, has_chunks=False)


def launch(scene: Scene, batch: StateBatch) -> Tensor:
    """A layer's single tokens."""
    return recur_rows(scene.part(len(batch.slots)), scene.cache, batch, scene.scale, scene.skip)


def exact(scene: Scene, batch: StateBatch) -> tuple[Tensor, Tensor]:
    """Results and new updates `[rows, heads, dim]` in double precision."""
    cache, group = scene.cache, scene.shape.heads // scene.shape.key_heads
    results, updates = [], []
    for row, (slot, start, base) in enumerate(
        zip(*(x.tolist() for x in (batch.slots, batch.starts, batch.bases)), strict=True)
    ):
        q, k, v, (decay, weight) = scene.part(len(batch.slots))
        query, key = (x[row].double().repeat_interleave(group, 0) for x in (q, k))
        places = torch.arange(base, start, device=v.device) % cache.keys.shape[1]
        keys = cache.keys[slot, places].double().repeat_interleave(group, 1)
        fades, shares = cache.gates[slot, places].double().unbind(1)
        held = (
            cache.updates[slot, places].double()
            if cache.updates is not None
            else cache.values[slot, places].double() * shares[..., None]
        )
        left = (fades.flip(0).cumsum(0).flip(0) - fades + decay[row].double()).exp()[..., None]
        whole = (fades.sum(0) + decay[row].double()).exp()[:, None]
        state = cache.states[slot].double() if base else torch.zeros_like(cache.states[slot]).double()
        state = whole[..., None] * state + torch.einsum("nhk,nhd->hkd", keys * left, held)
        new = v[row].double()
        if cache.updates is not None:
            new = new - torch.einsum("hk,hkd->hd", key, state)
        new = new * weight[row].double()[:, None]
        state = state + key[..., None] * new[:, None]
        found = torch.einsum("hk,hkd->hd", query, state) * scene.scale
        results.append(found if scene.skip is None else found + v[row].double() * scene.skip.double()[:, None])
        updates.append(new)
    return torch.stack(results), torch.stack(updates)


def copied(scene: Scene) -> Scene:
    """With memory of its own."""
    one = object.__new__(Scene)
    one.__dict__.update(scene.__dict__)
    held = {name: None if x is None else x.clone() for name, x in vars(scene.cache).items()}
    one.cache = RecurrentCache(**held)
    return one


def off(given: Scene, rows: int) -> float:
    """The largest relative error of a row's results or entries. What must not be read is not a number."""
    scene = copied(given)
    cache, batch = scene.cache, scene.batch(rows, 5, early=True)
    expected, updates = exact(scene, batch)
    ring = cache.keys.shape[1]
    own = batch.starts % ring
    for slot, start, base in zip(*(x.tolist() for x in (batch.slots, batch.starts, batch.bases)), strict=True):
        unknown = sorted(set(range(ring)) - {place % ring for place in range(base, start)})
        for held in (cache.keys, cache.values, cache.gates, cache.updates):
            if held is not None:
                held[slot, unknown] = math.nan
        if not base:
            cache.states[slot] = math.nan
    found, part = launch(scene, batch), scene.part(rows)
    at = batch.slots.long(), own.long()
    pairs = [(found, expected), (cache.keys[at], part.k), (cache.values[at], part.v)]
    pairs += [(cache.gates[at][:, which], part.gates[which]) for which in (0, 1)]
    if cache.updates is not None:
        pairs.append((cache.updates[at], updates))
    return max(float(((a.double() - b.double()).flatten(1).norm(dim=1) / b.double().flatten(1).norm(dim=1)).max())
               for a, b in pairs)  # fmt: skip


def bytes_of(scene: Scene, batch: StateBatch) -> tuple[int, int]:
    """Of the states, and of all that a step must read and write."""
    shape, item = scene.shape, scene.x.element_size()
    states = len(batch.slots) * scene.cache.states[0].numel() * 4
    entry = (shape.key_heads * shape.key_dim + shape.heads * shape.dim) * item + shape.heads * (4 if shape.delta else 8)
    known = int((batch.starts - batch.bases).sum())
    new = (2 * shape.key_heads * shape.key_dim + 2 * shape.heads * shape.dim) * item  # in and out
    new += entry + shape.heads * (shape.dim * item if shape.delta else 0) + 8 * shape.heads
    return states, states + known * entry + len(batch.slots) * new


def timed(scene: Scene, rows: int) -> dict[str, Any]:
    """Microseconds of a call, and what share of the bandwidth that is."""
    from benchmarks.kernels import replayed

    calls = min(CALLS, max(SLOTS // rows, 4))
    batches = [scene.batch(rows, rows * at) for at in range(calls)]
    launch(scene, batches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches:
            launch(scene, batch)
    taken = replayed(graph, REPLAYS) / calls
    sizes = [bytes_of(scene, batch) for batch in batches]
    states, every = (sum(size[at] for size in sizes) / calls for at in (0, 1))
    return {"us": round(taken, 2), "bytes": int(every), "states": int(states),
            "share": round(every / COPY / taken * 1e6, 4)}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_kernels")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="batch sizes, with commas")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    rows = [int(one) for one in options.rows.split(",")]
    figures: list[dict[str, Any]] = []
    torch.manual_seed(0)
    with torch.inference_mode():
        for shape in SHAPES:
            scene = Scene(shape, SLOTS)
            error = max(off(scene, some) for some in (3, 40))
            for some in rows:
                figures.append({"shape": shape.name, "rows": some, "error": round(error, 5), **timed(scene, some)})
                print(figures[-1], flush=True)
    report.write(options.output, "state_kernels", {"figures": figures}, arguments)
    return int(any(not one["error"] <= MOST_OFF for one in figures))


if __name__ == "__main__":
    sys.exit(main())
