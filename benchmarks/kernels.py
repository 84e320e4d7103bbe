"""Each device kernel alone, on one GPU: `python -m benchmarks.kernels`.

Prints time, bytes, FLOPs and the share of the chip's limit: the larger of the least time that the bytes need at the
speed of a read-only stream and that which the products need at the speed of a large matrix product, over the time
taken. Every input is counted once. Calls stand in a CUDA graph, each with pages of its own as far as there are enough,
so that neither launches nor the cache are measured. `--sweep` times other tilings of attention beside the product's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
from torch import Tensor

from benchmarks import report
from benchmarks.limits import CHIPS
from penstock.engine_core.execution.compilation import load_all, prewarm
from penstock.kernels.activation import activate
from penstock.kernels.attention_device import attend_pages, chunk_attention, launches, shape_of
from penstock.kernels.attention_tiling import Tiling
from penstock.kernels.attention_triton import attend_tiles
from penstock.kernels.chip import chip_of
from penstock.kernels.norm import add_norm
from penstock.kernels.records import AttentionBatch, AttentionOptions, Rotation
from penstock.kernels.rope import rotate_and_store

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16  # Llama-3.1-8B
HIDDEN, INTERMEDIATE = 4096, 14336
READ = CHIPS["H200"].bytes_per_second
MATRIX = CHIPS["H200"].flops_per_second
CACHE = 256 << 20  # bytes that calls go through before one repeats: several times the second-level cache
CALLS = 12  # in a graph, at least
REPLAYS = 3
PROCESSES = 14  # that compile
DECODES = [(batch, context) for batch in (1, 8, 64, 256) for context in (128, 512, 2048, 8192)]
DIMS = (64, 80, 96, 192, 256, 512)  # of other heads; decoding alone, but for those that TALL has too
TALL = (128, 256)
WINDOWS = (128, 1024, 4096)
PREFILLS = [(1024, 1024), (8192, 8192), (32768, 32768), (512, 8192)]  # new tokens, context
RAGGED = [(1, 16 + (3001 * row) % 2000) for row in range(64)]
MIXED = [(1, 1024)] * 64 + [(2048, 2048)]
PREFIXES: dict[str, list[tuple[int, int]]] = {  # rows that begin with so many keys of their own tenant's
    "64 behind 4096": [(64, 4096)],
    "256 behind 4096": [(256, 4096)],
    "2 x 32 behind 2048": [(32, 2048)] * 2,
    "2 x 32 behind 8192": [(32, 8192)] * 2,
    "8 x 8 behind 1024, 64 alone": [(8, 1024)] * 8 + [(1, 768)] * 64,
}

Rows = Sequence[tuple[int, int]]  # queries and context of each row


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel at one shape."""

    kernel: str
    shape: str
    form: str = ""
    chosen: bool = True  # by the product
    microseconds: float
    bytes: int
    flops: int
    limit: str  # the nearer one: read or matrix
    share: float  # of it


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and on what."""

    chip: str
    torch: str
    triton: str
    copy_bytes_per_second: float  # measured in the same run
    matrix_flops_per_second: float
    figures: list[Figure]


def figure(kernel: str, shape: str, microseconds: float, work: tuple[int, int], **more: Any) -> Figure:
    """The figure of a kernel that does so many bytes and FLOPs of work."""
    size, flops = work
    limit = "read" if size / READ > flops / MATRIX else "matrix"
    share = max(size / READ, flops / MATRIX) / (microseconds * 1e-6)
    return Figure(
        kernel=kernel, shape=shape, microseconds=round(microseconds, 2), bytes=size, flops=flops, limit=limit,
        share=round(share, 4), **more,
    )  # fmt: skip


def compiled(calls: Iterable[Callable[[], object]]) -> int:
    """Compile all kernels that these would launch, in processes, and load them. How many there are."""
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        with prewarm(pool) as found:
            for call in calls:
                with suppress(Exception):  # guard: the compiler's; it fails again when it is measured
                    call()
        load_all(found, torch.device("cuda", torch.cuda.current_device()))
    return len(found)


def timed(call: Callable[[int], object], copies: int) -> float:
    """Microseconds of one call, of which `copies` may be told apart by their number."""
    calls = max(copies, CALLS)
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(calls):
            call(at % copies)
    return replayed(graph, REPLAYS) / calls


def replayed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Microseconds of one replay: the median of so many, after one that is not timed."""
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    taken: list[float] = [a.elapsed_time(b) for a, b in pairwise(marks)]  # milliseconds
    return statistics.median(taken) * 1e3


class Pages:
    """Random keys and values, enough for the largest shape, and the order in which their blocks are handed out."""

    def __init__(self, slots: int, dim: int = DIM) -> None:
        shape = slots // BLOCK + 1, BLOCK, KV_HEADS, dim
        self.k, self.v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
        self.order = torch.randperm(slots // BLOCK, device="cuda").int() + 1

    def batches(self, rows: Rows, tenants: Sequence[tuple[int, int]] = (), window: int = 0) -> list[AttentionBatch]:
        """As many batches of these rows, over blocks of their own, as there are blocks or as outlast the cache.

        tenants: how many rows begin with the same keys, and with how many, in the order of the rows. Batches of a
        window, which is little of the keys, share pages of which each reads others.
        """
        wide = -(-max(context for _, context in rows) // BLOCK)
        held, _ = attention_work(rows, tenants, self.k.shape[3], window)
        copies = max(1, min(len(self.order) // (wide * len(rows)), -(-CACHE // held)))
        starts = torch.tensor([0, *accumulate(count for count, _ in rows)], dtype=torch.int32, device="cuda")
        context = torch.tensor([context for _, context in rows], dtype=torch.int32, device="cuda")
        tables = self.order[: copies * wide * len(rows)].view(copies, len(rows), wide).clone()
        first = 0
        for count, prefix in tenants:
            tables[:, first : first + count, : prefix // BLOCK] = tables[:, first : first + 1, : prefix // BLOCK]
            first += count
        if window:
            tables = torch.stack([tables[0].flatten().roll(at * 5003).view_as(tables[0]) for at in range(CALLS)])
        longest = max(count for count, _ in rows), max(context for _, context in rows)
        slots = torch.arange(len(rows), dtype=torch.int32, device="cuda")
        return [AttentionBatch(starts, context, slots, table, starts, *longest) for table in tables]


def attention_work(
    rows: Rows, tenants: Sequence[tuple[int, int]] = (), dim: int = DIM, window: int = 0
) -> tuple[int, int]:
    """Bytes and FLOPs of one layer's attention: keys below the diagonal and within the window count, those that rows
    share once as bytes.
    """
    reach = window or 1 << 30
    keys = sum(min(context, reach + count - 1) for count, context in rows)
    keys -= sum((count - 1) * prefix for count, prefix in tenants)
    queries = sum(count for count, _ in rows)
    pairs = sum(min(place + 1, reach) for count, context in rows for place in range(context - count, context))
    return 4 * keys * KV_HEADS * dim + 4 * queries * HEADS * dim, 4 * pairs * HEADS * dim


def tilings(rows: Rows) -> list[Tiling]:
    """Forms of the general kernel worth trying for these rows, all of them by one launch."""
    if max(count for count, _ in rows) > 1:
        forms = [(128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4)]
        return [Tiling(lines, keys, n, warps, stages) for n in (1, 33) for lines, keys, warps, stages in forms]
    most = max(1, max(context for _, context in rows) // 64)
    splits = sorted({min(most, splits) for splits in (1, 2, 4, 8, 16, 32, 64)})
    forms = [(16, 64, 2, 4), (16, 64, 4, 4), (16, 128, 4, 3), (16, 128, 2, 3)]
    return [
        Tiling(lines, keys, count, warps, stages, by_row=True, min_split_keys=64)
        for count in splits
        for lines, keys, warps, stages in forms
    ]


def name_of(tiling: Tiling) -> str:
    kind = "by row" if tiling.by_row else "tiles"
    size = f"{tiling.block_m}x{tiling.block_n}"
    return f"{kind} {size} split {tiling.programs} warps {tiling.warps} stages {tiling.stages}"


def attention(pages: Pages, name: str, rows: Rows, sweep: bool, window: int = 0) -> Iterator[Figure]:
    """The product's choice, the same held invariant, for rows that share keys the kernel that reads them for each row,
    and in a sweep other forms.
    """
    tenants, dim = PREFIXES.get(name, []), pages.k.shape[3]
    options = AttentionOptions(dim**-0.5, window)
    counters = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")  # a sweep cuts more tiles than the product does
    batches = [replace(batch, arrivals=counters) for batch in pages.batches(rows, tenants, window)]
    fixed = [replace(batch, invariant=True) for batch in batches]
    q = torch.randn(sum(count for count, _ in rows), HEADS, dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    for batch in (*batches, *fixed):
        attend_pages(q, pages.k, pages.v, batch, options)  # what a step finds out for all of its layers is not timed
    calls: dict[str, Callable[[int], object]] = {
        "own": lambda at: attend_pages(q, pages.k, pages.v, batches[at], options),
        "invariant": lambda at: attend_pages(q, pages.k, pages.v, fixed[at], options),
    }
    by_row = launches(shape_of(q, pages.k, batches[0], window), invariant=False, chip=chip_of(q.device))[0]
    if tenants and by_row is not None:
        calls["each row for itself"] = lambda at: attend_tiles(q, pages.k, pages.v, out, batches[at], options, by_row)
    if sweep:
        chunks = chunk_attention(q, pages.k, options)
        if chunks is not None:
            calls["Hopper"] = lambda at: chunks(q, pages.k, pages.v, out, batches[at], options, 1)
        for tiling in tilings(rows):

            def call(at: int, tiling: Tiling = tiling) -> None:
                attend_tiles(q, pages.k, pages.v, out, batches[at], options, tiling)

            calls[name_of(tiling)] = call
    for form, attend in calls.items():
        try:
            taken = timed(attend, len(batches))
        except triton.runtime.errors.OutOfResources:  # more shared memory than the chip has
            continue
        yield figure(
            "attention", name, taken, attention_work(rows, tenants, dim, window), chosen=form == "own", form=form
        )


def pointwise(pages: Pages, tokens: int) -> Iterator[Figure]:
    """The fused kernels around the matrix products, on inputs larger together than the cache."""
    shape = f"{tokens} tokens"
    wide = (HEADS + 2 * KV_HEADS) * DIM
    copies = max(1, min(64, -(-CACHE // (4 * tokens * HIDDEN))))

    def many(width: int) -> Tensor:
        return torch.randn(copies, tokens, width, dtype=torch.bfloat16, device="cuda")

    x, residual, weight, gates = many(HIDDEN), many(HIDDEN), many(HIDDEN)[0, 0], many(2 * INTERMEDIATE)
    fused = many(wide).view(copies, tokens, -1, DIM)
    slots = torch.randperm(len(pages.order) * BLOCK, device="cuda")[:tokens] + BLOCK
    rotation = Rotation(*(torch.rand(tokens, 1, DIM, device="cuda") for _ in range(2)))
    last = HEADS + KV_HEADS
    q, k, v = fused[:, :, :HEADS], fused[:, :, HEADS:last], fused[:, :, last:]
    calls: dict[str, tuple[Callable[[int], object], int]] = {
        "rope and page write": (
            lambda at: rotate_and_store(q[at], k[at], v[at], rotation, pages.k, pages.v, slots),
            tokens * (4 * wide + 4 * DIM),
        ),
        "residual and norm": (lambda at: add_norm(x[at], residual[at], weight, 1e-5), 8 * tokens * HIDDEN),
        "silu and product": (lambda at: activate(gates[at]), 6 * tokens * INTERMEDIATE),
    }
    for name, (call, size) in calls.items():
        yield figure(name, shape, timed(call, copies), (size, 0))


def limits() -> tuple[float, float]:
    """Bytes per second of a copy and FLOP per second of a bf16 product, here and now."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copied = timed(lambda at: torch.neg(source, out=target), 1)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    multiplied = timed(lambda at: a @ b, 1)
    return 8 * source.numel() / (copied * 1e-6), 2 * 8192**3 / (multiplied * 1e-6)


def shapes() -> dict[str, Rows]:
    """Batches of attention by name."""
    found: dict[str, Rows] = {f"decode {batch} x {context}": [(1, context)] * batch for batch, context in DECODES}
    found |= {f"prefill {count} of {context}": [(count, context)] for count, context in PREFILLS}
    found |= {
        name: [(1, prefix + 1 + 37 * row % 255) for count, prefix in tenants for row in range(count)]
        for name, tenants in PREFIXES.items()
    }
    return found | {"decode 64, 16 to 2015": RAGGED, "64 decodes at 1024, prefill 2048": MIXED}


def other_heads(sweep: bool) -> Iterator[Figure]:
    """Attention of heads of other sizes, and of windows: 64 rows whose keys fill no cache."""
    for dim in sorted({*DIMS, *TALL}):
        pages = Pages(64 * 8192, dim)
        for context in (2048, 8192) if dim != DIM else ():
            yield from attention(pages, f"decode 64 x {context}, heads of {dim}", [(1, context)] * 64, sweep)
        for window in WINDOWS if dim in TALL else ():
            name = f"decode 64 x 8192, heads of {dim}, window {window}"
            yield from attention(pages, name, [(1, 8192)] * 64, sweep, window)
        if dim in TALL and dim != DIM:
            yield from attention(pages, f"prefill 8192 of 8192, heads of {dim}", [(8192, 8192)], sweep)


def line(found: Figure) -> str:
    mark = "*" if found.chosen else " "
    return (
        f"{mark} {found.kernel:20} {found.shape:32} {found.form:40} {found.microseconds:10.1f} us"
        f" {found.bytes / 1e6:9.1f} MB {found.flops / 1e9:9.1f} GFLOP {100 * found.share:6.1f} % of {found.limit}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("--sweep", action="store_true", help="other tilings of attention too")
    parser.add_argument("--only", default="", help="shapes of attention whose name begins so, and nothing else")
    parser.add_argument("--heads", action="store_true", help="heads of other sizes and windows too")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/kernels.json"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    asked = {name: rows for name, rows in shapes().items() if name.startswith(options.only)}
    pages = Pages(max(len(rows) * max(context for _, context in rows) for rows in asked.values()))
    figures: list[Figure] = []
    for name, rows in asked.items():
        figures += attention(pages, name, rows, options.sweep)
    for tokens in (1, 64, 256, 8192) if not options.only else ():
        figures += pointwise(pages, tokens)
    del pages
    if options.heads:
        figures += other_heads(options.sweep)
    copied, multiplied = limits()
    results = Report(
        chip=torch.cuda.get_device_name(), torch=str(torch.__version__), triton=triton.__version__,
        copy_bytes_per_second=copied, matrix_flops_per_second=multiplied, figures=figures,
    )  # fmt: skip
    report.write(options.output, "kernels", results, arguments)
    print(f"copy {copied / 1e12:.2f} TB/s, matrix product {multiplied / 1e12:.0f} TFLOP/s; * the product's own choice")
    print("\n".join(line(found) for found in figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
