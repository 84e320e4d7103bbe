"""How fast one GPU reads memory: `python -m benchmarks.read_bandwidth`.

A kernel reads a buffer of several gibibytes once and keeps one sum for each piece of it, so next to nothing is written;
the fastest of several piece sizes counts. A device copy of the same size stands beside it. The rate belongs into
benchmarks/limits.py, after which `python -m benchmarks.relimit` derives the stored limits again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import triton
from torch import Tensor
from triton import language as tl

from benchmarks import report
from benchmarks.kernels import timed
from benchmarks.report import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "read_bandwidth.json"
SIZES = ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (16384, 8))  # numbers of a piece, warps
ROUNDS = 16  # pieces that one program reads


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(source, target, count, ROUNDS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One sum for each run of pieces."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((SIZE,), tl.float32)
    for turn in range(ROUNDS):
        at = (program * ROUNDS + turn) * SIZE + tl.arange(0, SIZE)
        total += tl.load(source + at, mask=at < count, other=0.0)
    tl.store(target + program, tl.sum(total))


def read(source: Tensor, size: int, warps: int) -> Tensor:
    """Sums of consecutive parts of a tensor of fp32, every number read once."""
    programs = triton.cdiv(source.numel(), size * ROUNDS)
    target = torch.empty(programs, dtype=torch.float32, device=source.device)
    read_kernel[(programs,)](source, target, source.numel(), ROUNDS=ROUNDS, SIZE=size, num_warps=warps)
    return target


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One way to read."""

    size: int
    warps: int
    bytes_per_second: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    bytes: int
    read_bytes_per_second: float  # of the fastest way
    copy_bytes_per_second: float  # read and written together
    figures: list[Figure]


def measure(gibibytes: int) -> tuple[list[Figure], float]:
    """Every way to read, and the rate of a copy."""
    source = torch.randn(gibibytes << 28, device="cuda")
    figures = []
    for size, warps in SIZES:
        seconds = timed(lambda at, size=size, warps=warps: read(source, size, warps), 1) * 1e-6  # type: ignore[misc]
        figures.append(Figure(size=size, warps=warps, bytes_per_second=source.nbytes / seconds))
    target = torch.empty_like(source)
    return figures, 2 * source.nbytes / (timed(lambda at: target.copy_(source), 1) * 1e-6)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.read_bandwidth",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--gibibytes", type=int, default=8, help="of the buffer; far more than any cache holds")
    parser.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("a GPU is needed", file=sys.stderr)
        return 2
    figures, copied = measure(options.gibibytes)
    result = Result(
        bytes=options.gibibytes << 30, read_bytes_per_second=max(figure.bytes_per_second for figure in figures),
        copy_bytes_per_second=copied, figures=figures,
    )  # fmt: skip
    report.write(options.output, "read_bandwidth", result, arguments, options.commit)
    for figure in figures:
        print(f"{figure.size:6} numbers, {figure.warps} warps: {figure.bytes_per_second / 1e12:.2f} TB/s")
    print(f"read {result.read_bytes_per_second / 1e12:.2f} TB/s, copy {copied / 1e12:.2f} TB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
