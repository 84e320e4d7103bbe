"""Decoding attention with small windows before and after its tiles of their own: `python -m benchmarks.window_kernels`.

On one GPU. Every form of a batch is held to double precision, over calls of a CUDA graph that has run, and that graph
is timed: calls in a row, each with pages of its own, as `benchmarks.kernels` has them. Each form also stands behind the
kernel that writes the step's keys, as in a layer, where a key that is read too early is no number: the times there are
without that kernel's own. Shares are of the speed of a copy in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks import report
from penstock.kernels import attention_tiling
from penstock.kernels.attention import E4M3
from penstock.kernels.attention_device import shape_of
from penstock.kernels.attention_tiling import Shape, Tiling
from penstock.kernels.chip import Chip
from penstock.kernels.records import AttentionBatch, AttentionOptions, Rotation

DEVICE = "cuda"
BLOCK, KV_HEADS = 16, 8
SLOTS = 64 * 8192  # that the pages of a shape have
OUTLAST = 320 << 20  # bytes that the calls of a graph read
MOST_CALLS = 200
CHECKED = 12  # calls of a graph, at most
REPLAYS = 7
MOST_OFF = 0.006  # relative distance from the exact result
FILE = Path("benchmarks/results/h200/window_kernels.json")


class Case(NamedTuple):
    """A batch of single queries that all see as many keys."""

    dim: int
    window: int  # 0: none
    rows: int
    context: int
    heads: int = 32
    sinks: bool = False
    fp8: bool = False

    @property
    def name(self) -> str:
        kind = f"window {self.window}" if self.window else f"{self.context} keys"
        more = " and sinks" * self.sinks + ", e4m3" * self.fp8
        return f"{self.rows} x {kind}, {self.heads} heads of {self.dim}{more}"

    @property
    def keys(self) -> int:
        return self.window or self.context

    @property
    def bytes(self) -> int:
        return 2 * self.rows * self.dim * ((1 if self.fp8 else 2) * self.keys * KV_HEADS + 2 * self.heads)


WIDTHS = ((64, 64, True), (128, 32, False), (256, 32, False))  # size and number of heads, sinks
CASES = (
    *(Case(dim, window, 64, 8192, heads, sinks) for dim, heads, sinks in WIDTHS for window in (128, 1024)),
    *(Case(dim, 4096, 64, 8192, heads, sinks) for dim, heads, sinks in WIDTHS if dim != 128),
    *(Case(dim, 128, rows, 2048, heads, sinks) for dim, heads, sinks in WIDTHS for rows in (1, 8, 32, 256)),
    *(Case(64, 128, rows, 8192, 64, sinks=True, fp8=True) for rows in (8, 64)),
    Case(256, 1024, 64, 8192, fp8=True),
    *(Case(256, 0, 64, context) for context in (2048, 8192)),
)


def shape_from(case: Case) -> Shape:
    kind = E4M3 if case.fp8 else torch.bfloat16
    return Shape(case.rows, case.rows, 1, case.context, case.heads, KV_HEADS, case.dim, kind, case.window, case.context)


def earlier_tiling(case: Case, chip: Chip) -> Tiling:
    """By the table without its rows for windows, in three loops."""
    kept = tuple(row for row in attention_tiling.rows() if row.kind != "window")
    with mock.patch.object(attention_tiling, "rows", return_value=kept):
        attention_tiling.find_row.cache_clear()
        found = attention_tiling.low_tiling(shape_from(case), 1, chip)
    attention_tiling.find_row.cache_clear()
    return replace(found, one_loop=False)


def forms_of(case: Case, chip: Chip) -> dict[str, Tiling]:
    """Before, after, and what lies between the two or beyond."""
    before, after = earlier_tiling(case, chip), attention_tiling.low_tiling(shape_from(case), 1, chip)
    found = {"before": before}
    if case.window:
        found["one loop, tile as before"] = replace(before, one_loop=True)
    elif not case.fp8:
        small = replace(before, block_n=32, warps=2, stages=4)
        found |= {"one loop": replace(before, one_loop=True), "small tile, one loop": replace(small, one_loop=True)}
        found["small tile"] = small
    names = {form: name for name, form in reversed(found.items())}  # the first of a form
    return {name: form for form, name in reversed(names.items()) if form != after} | {"after": after}


class Bench:
    """Pages of heads of one size and type, and batches of calls over them."""

    def __init__(self, dim: int, fp8: bool) -> None:
        torch.manual_seed(dim)
        shape = SLOTS // BLOCK + 1, BLOCK, KV_HEADS, dim
        self.k, self.v = (torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2))
        if fp8:
            self.k, self.v = self.k.to(E4M3), self.v.to(E4M3)
        self.scales = torch.ones(2, KV_HEADS, device=DEVICE) if fp8 else None
        self.order = torch.randperm(SLOTS // BLOCK, device=DEVICE).int() + 1


def picked(pages: Tensor, blocks: Tensor, places: Tensor) -> Tensor:
    """Keys or values in double precision. torch gathers no numbers of 8 bits."""
    held = pages.view(torch.uint8) if pages.dtype is E4M3 else pages
    return held[blocks, places].view(pages.dtype).double()


class Scene:
    """The calls of one case: queries, tables and where each writes its result."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self.bench, self.case = bench, case
        wide = case.context // BLOCK
        self.calls = max(12, min(MOST_CALLS, -(-OUTLAST // case.bytes)))
        size = case.rows * wide
        self.tables = torch.stack(
            [bench.order.roll(at * 5003)[:size].view(case.rows, wide) for at in range(self.calls)]
        )
        starts = torch.arange(case.rows + 1, dtype=torch.int32, device=DEVICE)
        context = torch.full((case.rows,), case.context, dtype=torch.int32, device=DEVICE)
        arrivals = torch.zeros(1 << 12, dtype=torch.int32, device=DEVICE)
        self.batches = [
            AttentionBatch(starts, context, starts, table, starts, 1, case.context, arrivals=arrivals)
            for table in self.tables
        ]
        sinks = torch.randn(case.heads, device=DEVICE) if case.sinks else None
        self.options = AttentionOptions(case.dim**-0.5, case.window, sinks=sinks, kv_scales=bench.scales)
        self.q = torch.randn(case.rows, case.heads, case.dim, device=DEVICE).bfloat16()
        self.out = torch.empty(self.calls, *self.q.shape, dtype=self.q.dtype, device=DEVICE)
        assert shape_of(self.q, bench.k, self.batches[0], case.window) == shape_from(case)

    def call(self, form: Tiling, at: int, q: Tensor | None = None) -> None:
        given = self.q if q is None else q
        attend(form, given, self.bench.k, self.bench.v, self.out[at], self.batches[at], self.options)

    def exact(self) -> Tensor:
        """What the first calls give, in double precision."""
        case, group = self.case, self.case.heads // KV_HEADS
        found = torch.empty(min(self.calls, CHECKED), *self.q.shape, dtype=torch.float64, device=DEVICE)
        places = torch.arange(case.context - case.keys, case.context, device=DEVICE)
        some = max(1, (1 << 26) // (case.keys * KV_HEADS * case.dim))
        for at in range(len(found)):
            for row in range(0, case.rows, some):
                table = self.tables[at, row : row + some].long()
                blocks = table[:, places // BLOCK]
                k, v = (picked(pages, blocks, places % BLOCK) for pages in (self.bench.k, self.bench.v))
                q = self.q[row : row + some].double().view(len(table), KV_HEADS, group, case.dim)
                scores = torch.einsum("rhgd,rkhd->rhgk", q, k) * self.options.scale
                if self.options.sinks is not None:
                    sinks = self.options.sinks.double().view(1, KV_HEADS, group, 1).expand(len(table), -1, -1, -1)
                    scores = torch.cat((scores, sinks), 3)
                weights = scores.softmax(3)[..., : case.keys]
                found[at, row : row + some] = torch.einsum("rhgk,rkhd->rhgd", weights, v).flatten(1, 2)
        return found


def attend(
    form: Tiling, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: AttentionBatch, options: AttentionOptions
) -> None:
    from penstock.kernels.attention_triton import attend_tiles

    attend_tiles(q, k, v, out, batch, options, form)


def first_calls(case: Case, forms: Mapping[str, Tiling]) -> Iterator[Callable[[], object]]:
    """One for each form, which read nothing of the pages that there are not."""
    kind = E4M3 if case.fp8 else torch.bfloat16
    pages = torch.zeros(64, BLOCK, KV_HEADS, case.dim, device=DEVICE).to(kind)
    q = torch.zeros(case.rows, case.heads, case.dim, dtype=torch.bfloat16, device=DEVICE)
    numbers = torch.zeros(case.rows + 1, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(case.rows, case.context // BLOCK, dtype=torch.int32, device=DEVICE)
    sinks = torch.zeros(case.heads, device=DEVICE) if case.sinks else None
    scales = torch.ones(2, KV_HEADS, device=DEVICE) if case.fp8 else None
    options = AttentionOptions(case.dim**-0.5, case.window, sinks=sinks, kv_scales=scales)
    batch = AttentionBatch(numbers, numbers[1:], numbers, table, numbers, 1, case.context)
    for form in forms.values():
        yield partial(attend, form, q, pages, pages, q, batch, options)


def measure(clock: Any, scene: Scene, form: Tiling, exact: Tensor) -> dict[str, Any]:
    """Time and error of one form, or why it has none."""
    from benchmarks.kernels import replayed

    def call(at: int) -> None:
        scene.call(form, at)

    try:
        call(0)
        graph = clock.record(call, scene.calls)
        scene.out.fill_(float("nan"))
        taken = replayed(graph, REPLAYS) / scene.calls
        error = distance(scene.out, exact)
    except Exception as problem:  # guard: a compiler or driver fails in any way, and the others are still wanted
        return {"problem": f"{type(problem).__name__}: {problem}".replace("\n", " ")[:300]}
    return {"us": round(taken, 3), "error": error} if error <= MOST_OFF else {"problem": f"it is {error:.4f} off"}


def distance(found: Tensor, exact: Tensor) -> float:
    """The worst call's."""
    off = (found[: len(exact)].double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    return float(off.nan_to_num(1e9).max())


def behind(clock: Any, scene: Scene, form: Tiling, exact: Tensor) -> dict[str, Any]:
    """Microseconds behind the kernel that writes the last keys of all rows, without that kernel's own; and the error
    where these keys are no number before."""
    from benchmarks.kernels import replayed
    from penstock.kernels.rope import rotate_and_store

    case, bench = scene.case, scene.bench
    last = scene.tables[:, :, (case.context - 1) // BLOCK].long() * BLOCK + (case.context - 1) % BLOCK  # [calls, rows]
    flat = bench.k.flatten(0, 1), bench.v.flatten(0, 1)
    held = [pages[last] for pages in flat]  # [calls, rows, kv_heads, dim]
    ones, zeros = torch.ones(case.rows, 1, case.dim, device=DEVICE), torch.zeros(case.rows, 1, case.dim, device=DEVICE)

    def write(at: int) -> Tensor:
        rotation = Rotation(ones, zeros)  # leaves everything as it is
        return rotate_and_store(scene.q, held[0][at], held[1][at], rotation, bench.k, bench.v, last[at])

    def both(at: int) -> None:
        scene.call(form, at, write(at))

    both(0)
    pairs, alone = (clock.record(call, scene.calls) for call in (both, write))
    taken = replayed(pairs, REPLAYS), replayed(alone, REPLAYS)
    # Poison what one call alone reads, and only as its last key.
    counts = torch.bincount(scene.tables[:, :, -(case.keys // BLOCK) :].flatten().long(), minlength=len(bench.k))
    single = last[counts[last // BLOCK] == 1]
    scene.out.fill_(float("nan"))
    for pages in flat:
        pages[single] = float("nan")
    pairs.replay()
    torch.cuda.synchronize()
    error = distance(scene.out, exact)
    for pages, values in zip(flat, held, strict=True):
        pages[last] = values
    return {
        "us": round((taken[0] - taken[1]) / scene.calls, 3),
        "both_us": round(taken[0] / scene.calls, 3),
        "poisoned": len(single),
        "error": error,
    }


def line(case: Case, name: str, form: Tiling, taken: dict[str, Any], copied: float) -> str:
    size = f"{form.block_n}x{form.warps}x{form.stages}" + f", {form.programs} programs" * (form.programs > 1)
    label = f"  {name}: {size}"
    if "us" not in taken:
        return f"{label:52} {taken['problem']}"
    found = f"{label:52} {taken['us']:8.2f} us {100 * case.bytes / (taken['us'] * 1e-6) / copied:6.1f} %"
    if (written := taken.get("behind")) is None:
        return found
    off = f", {written['error']:.4f} off" * (written["error"] > MOST_OFF)
    return f"{found}, behind writes {written['us']:8.2f} us{off}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.window_kernels")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no other shape is begun")
    options = parser.parse_args(arguments)
    from benchmarks.kernels import compiled, limits
    from benchmarks.linear_kernels import Clock
    from penstock.kernels.chip import chip_of

    began = time.monotonic()
    chip = chip_of(torch.device("cuda", 0))
    asked = [(case, forms_of(case, chip)) for case in CASES]
    count = compiled(call for case, forms in asked for call in first_calls(case, forms))
    seconds = time.monotonic() - began
    print(f"{count} kernels compiled in {seconds:.0f} s, {sum(len(forms) for _, forms in asked)} forms", flush=True)
    copied, _ = limits()
    clock, figures, tables, bench = Clock(), [], [], None
    for case, forms in sorted(asked, key=lambda one: (one[0].fp8, one[0].dim)):
        if time.monotonic() - began > options.seconds:
            tables.append(f"{case.name}: left out, the time is over")
            continue
        if bench is None or bench.k.shape[3] != case.dim or (bench.scales is not None) != case.fp8:
            bench = None
            bench = Bench(case.dim, case.fp8)
        scene = Scene(bench, case)
        exact = scene.exact()
        tables.append(case.name)
        for name, form in forms.items():
            taken = measure(clock, scene, form, exact)
            if "us" in taken and not case.fp8:
                taken["behind"] = behind(clock, scene, form, exact)
            figures.append({"case": case.name, "form": name, "bytes": case.bytes, "tiling": asdict(form), **taken})
            tables.append(line(case, name, form, taken, copied))
            print(case.name, tables[-1], flush=True)
    results = {"copy_bytes_per_second": copied, "compile_seconds": round(seconds, 1), "figures": figures}
    report.write(options.output, "window_kernels", results, arguments)
    print(f"\ncopy {copied / 1e12:.2f} TB/s, {time.monotonic() - began:.0f} s in all")
    print("\n".join(tables))
    wrong = [row for row in figures if "problem" in row or row.get("behind", row)["error"] > MOST_OFF]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
