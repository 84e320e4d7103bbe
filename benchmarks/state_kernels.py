"""Single tokens of recurrent layers on one GPU, by several forms of their kernel: `python -m benchmarks.state_kernels`.

Rows of a step have slots of their own and entries in all numbers; calls stand in a CUDA graph and go through slots that
hold several times what the cache does. A form's results and entries are held to double precision first. The table says
microseconds of a layer, then the share of the copy bandwidth that its bytes reach. `benchmarks.state_forms` has the
kernels beside the product's own ("now").
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks import report
from benchmarks.state_forms import group_kernel, tile_kernel
from penstock.kernels.chip import chip_of
from penstock.kernels.recurrence_triton import recur_rows
from penstock.kernels.states import PIECE, Gates, Part, RecurrentCache, StateBatch, ring_length

ROWS = (1, 8, 64, 256)
SLOTS = 512
CALLS = 64  # of a graph at most, each with slots of its own as far as there are enough
LONG = 8 * PIECE  # tokens of a row before its piece
COPY = 4.28e12  # bytes a second that a device copy reads and writes, measured
MOST_OFF = 4e-3  # relative distance from the exact result, which is rounded once
REPLAYS = 5
PROCESSES = 14  # that compile


class Shape(NamedTuple):
    name: str
    heads: int
    key_heads: int
    key_dim: int
    dim: int
    delta: bool


SHAPES = (Shape("Qwen3.5", 32, 16, 128, 128, True), Shape("Falcon-H1", 32, 2, 256, 64, False))


class Form(NamedTuple):
    """A kernel, and how it is cut."""

    kernel: str  # tile: each tile by itself, keys included; group: heads of a key together; now: the product's
    columns: int = 0
    warps: int = 0
    stages: int = 0
    programs: int = 0  # of each multiprocessor that are wanted at least, before one has several tiles
    registers: int | None = None
    evict: str = ""  # policy of the cache for states
    early: bool = False  # group: copies of states begin before the keys are scored

    @property
    def label(self) -> str:
        if self.kernel == "now":
            return "now"
        words = f"{self.kernel} {self.columns}x{self.warps}w s{self.stages} p{self.programs}"
        words += f" r{self.registers}" if self.registers else ""
        return words + (" early" if self.early else "") + (" once" if self.evict else "")


FORMS = (
    Form("now"),
    Form("tile", 128, 8, 1, 9999, 128), Form("tile", 64, 4, 1, 9999), Form("tile", 64, 4, 1, 9999, evict="evict_first"),
    Form("tile", 64, 4, 1, 9999, 128),
    Form("tile", 32, 4, 1, 9999, 96), Form("tile", 128, 8, 2, 2, 128), Form("tile", 128, 8, 2, 8, 128),
    Form("tile", 128, 4, 2, 2), Form("tile", 128, 4, 2, 8), Form("tile", 64, 4, 2, 3, 168),
    Form("group", 128, 4, 2, 2), Form("group", 128, 4, 2, 2, early=True),
    Form("group", 128, 8, 2, 2, 128), Form("group", 128, 8, 2, 2, 128, early=True),
    Form("group", 64, 4, 2, 3, 168), Form("group", 64, 4, 2, 3, 168, early=True),
    Form("group", 64, 4, 3, 2), Form("group", 64, 4, 3, 2, early=True),
    Form("group", 64, 8, 3, 2, 128), Form("group", 32, 4, 4, 3), Form("group", 32, 4, 3, 3, 128, early=True),
)  # fmt: skip
FILE = Path(os.environ.get("OUT", "benchmarks/results/h200")) / "state_kernels.json"


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


def launch(form: Form, scene: Scene, batch: StateBatch) -> Tensor:
    """A layer's single tokens by a form."""
    part, shape, cache = scene.part(len(batch.slots)), scene.shape, scene.cache
    if form.kernel == "now":
        return recur_rows(part, cache, batch, scene.scale, scene.skip)
    q, k, v, gates = part
    rows, chip = len(batch.slots), chip_of(v.device)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    group, columns = shape.heads // shape.key_heads, min(form.columns, shape.dim)
    tiles, wanted = triton.cdiv(shape.dim, columns), form.programs * chip.num_sms
    given = (
        q, k, v, *gates, cache.keys, cache.values, cache.gates,
        cache.values if cache.updates is None else cache.updates,
        batch.query_start, batch.slots, batch.starts, batch.stepping, batch.bases, cache.states,
        v if scene.skip is None else scene.skip, out, scene.scale, cache.states.stride(0), *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], cache.keys.stride(0), cache.values.stride(0), cache.gates.stride(0),
        cache.keys.shape[1],
    )  # fmt: skip
    constants: dict[str, Any] = {
        "COLUMNS": columns, "STAGES": form.stages, "EVICT": form.evict, "SKIP": scene.skip is not None,
        "HEADS": shape.heads, "GROUP": group, "KEY_DIM": shape.key_dim,
        "KEY_LANES": max(16, triton.next_power_of_2(shape.key_dim)), "DIM": shape.dim, "DELTA": shape.delta,
        "PDL": chip.pdl, "launch_pdl": chip.pdl, "num_warps": form.warps,
        "maxnreg": form.registers,
    }  # fmt: skip
    if form.kernel == "tile":
        share = triton.cdiv(shape.heads * tiles, min(shape.heads * tiles, triton.cdiv(wanted, rows)))
        tile_kernel[(triton.cdiv(shape.heads * tiles, share), rows)](*given, share, **constants)
        return out
    own_heads = next(
        some for some in range(group, 0, -1) if some == 1 or (group % some == 0 and rows * shape.heads >= wanted * some)
    )
    own_tiles = tiles if rows * shape.heads // own_heads >= wanted else 1
    group_kernel[(triton.cdiv(tiles, own_tiles), shape.heads // own_heads, rows)](
        *given, own_heads, own_tiles, EARLY=form.early, **constants
    )  # fmt: skip
    return out


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


def off(form: Form, given: Scene, rows: int) -> float:
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
    found, part = launch(form, scene, batch), scene.part(rows)
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


def compiled(scenes: Sequence[Scene], forms: Sequence[Form]) -> None:
    """Compile every form in processes."""
    from penstock.engine_core.execution.compilation import prewarm
    from penstock.engine_core.execution.product_bench import load_kernels

    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        with prewarm(pool) as found:
            for scene in scenes:
                for form in forms:
                    for rows in ROWS:
                        with suppress(Exception):  # guard: the compiler's; it fails again later
                            launch(form, scene, scene.batch(rows, 0))
        load_kernels(found, torch.device("cuda", torch.cuda.current_device()))


def timed(form: Form, scene: Scene, rows: int) -> dict[str, Any]:
    """Microseconds of a call, and what share of the bandwidth that is."""
    from benchmarks.kernels import replayed

    calls = min(CALLS, max(SLOTS // rows, 4))
    batches = [scene.batch(rows, rows * at) for at in range(calls)]
    launch(form, scene, batches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches:
            launch(form, scene, batch)
    taken = replayed(graph, REPLAYS) / calls
    sizes = [bytes_of(scene, batch) for batch in batches]
    states, every = (sum(size[at] for size in sizes) / calls for at in (0, 1))
    return {"us": round(taken, 2), "bytes": int(every), "states": int(states),
            "share": round(every / COPY / taken * 1e6, 4)}  # fmt: skip


def measured(form: Form, scene: Scene, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Figures of a form, or why there are none."""
    told: dict[str, Any] = {"shape": scene.shape.name, "form": form.label}
    found = []
    try:
        told["error"] = round(max(off(form, scene, some) for some in (3, 40)), 5)
        if not told["error"] <= MOST_OFF:
            raise ValueError(f"wrong: {told['error']}")
        found = [{**told, "rows": some, **timed(form, scene, some)} for some in rows]
    except Exception as error:  # guard: a compiler or driver fails in any way, and the others are still wanted
        found = [{**told, "problem": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}]
    for one in found:
        print(one, flush=True)
    return found


def table(figures: Sequence[dict[str, Any]], rows: Sequence[int]) -> str:
    lines = []
    for shape in dict.fromkeys(one["shape"] for one in figures):
        lines.append(f"{shape:32}" + "".join(f"{some:>16}" for some in rows))
        for label in dict.fromkeys(one["form"] for one in figures if one["shape"] == shape):
            own = {one.get("rows"): one for one in figures if (one["shape"], one["form"]) == (shape, label)}
            cells = [
                f"{own[some]['us']:9.1f}{100 * own[some]['share']:5.0f} %" if some in own else "-" for some in rows
            ]
            lines.append(
                f"{label:32}" + "".join(f"{cell:>16}" for cell in cells) + own.get(None, {}).get("problem", "")[:60]
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_kernels")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="batch sizes, with commas")
    parser.add_argument("--forms", default="", help="only forms whose label has this")
    parser.add_argument("--limit", type=float, default=170, help="seconds after which it ends, wherever it stands")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(options.limit, exit=True)
    rows = [int(one) for one in options.rows.split(",")]
    forms = [form for form in FORMS if options.forms in form.label]
    figures: list[dict[str, Any]] = []
    torch.manual_seed(0)
    with torch.inference_mode():
        scenes = [Scene(shape, SLOTS) for shape in SHAPES]
        compiled(scenes, forms)
        for scene in scenes:
            for form in forms:
                figures += measured(form, scene, rows)
                report.write(options.output, "state_kernels", {"figures": figures}, arguments)
    print(table(figures, rows), flush=True)
    return int(any("problem" in one for one in figures))


if __name__ == "__main__":
    sys.exit(main())
