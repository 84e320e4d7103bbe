"""Compiles every kernel for every chip, on a CPU: `python -m benchmarks.chips`.

What is compiled is what the product would launch on each chip of `kernels.chip.CHIPS` for the models and steps of
`benchmarks.chip_launches`. `benchmarks/results/chips.json` holds shared memory, registers, threads and the bytes of
stack (spilled registers, mostly) of each, and a digest of each kernel's source. Only what is new is compiled, or of a
kernel whose source has changed; `--all` compiles everything, `--only` some kernels.

`--check` writes nothing: it holds the file against the code and each chip's limits, and compiles a sample anew.
Problems are printed, and make the exit code 1.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime.driver import driver

from benchmarks.chip_launches import ChipDriver, Launch, launches
from benchmarks.report import ROOT
from penstock.kernels.chip import CHIPS, Chip

FILE = ROOT / "benchmarks" / "results" / "chips.json"
REGISTERS = 1 << 16  # of a multiprocessor, in any of these chips
THREADS = re.compile(r"\.(?:req|max)ntid\s+(\d+)")
USED = re.compile(r"REG:(\d+) STACK:(\d+)")
SAMPLE = 8


class Row(NamedTuple):
    """What a compiled kernel takes."""

    shared: int  # bytes of a program
    registers: int  # of a thread
    threads: int  # of a program
    stack: int  # bytes of a thread


Launches = Mapping[str, Mapping[str, Launch]]  # by chip, then by name and label
Rows = dict[str, dict[str, dict[str, Row]]]  # by kernel, label and chip


@functools.cache
def kernel_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def digest(kernel: Any) -> str:
    """Of the source of a kernel, of those that it calls, and of the constants that they read. Unlike Triton's own it
    does not depend on the line at which a kernel stands."""
    seen: dict[str, str] = {}
    kernels = [kernel]
    while kernels:
        one = kernels.pop()
        place = f"{one.fn.__module__}.{one.fn.__name__}"
        if place in seen:
            continue
        seen[place] = text = textwrap.dedent(inspect.getsource(one.fn))
        for node in ast.walk(ast.parse(text)):
            used = one.fn.__globals__.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(used, triton.language.constexpr):
                seen[f"{place}.{node.id}"] = repr(used.value)
            elif isinstance(used, triton.JITFunction):
                kernels.append(used)
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]


def compile_launch(launch: Launch, chip: Chip) -> Row | str:
    """What it takes, or why it does not compile."""
    driver.set_active(ChipDriver(chip))
    try:
        kernel = kernel_of(launch.module, launch.name).preload(launch.specialization)
    except Exception as error:  # the compiler's, of whatever kind
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        used = USED.search(subprocess.run(tool, check=True, capture_output=True, text=True).stdout)
    threads = THREADS.search(kernel.asm["ptx"])
    assert used is not None and threads is not None  # noqa: PT018
    return Row(kernel.metadata.shared, int(used[1]), int(threads[1]), int(used[2]))


def compiled(wanted: Sequence[tuple[Launch, str]], jobs: int) -> Iterator[tuple[Launch, str, Row | str]]:
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        futures = {pool.submit(compile_launch, launch, CHIPS[name]): (launch, name) for launch, name in wanted}
        for done, future in enumerate(as_completed(futures), start=1):
            yield *futures[future], future.result()
            if done % 100 == 0:
                print(f"{done} of {len(futures)} compiled", file=sys.stderr, flush=True)


def exceeded(chip: Chip, row: Row) -> str:
    """Which limit of the chip a kernel exceeds, if any. Registers are given out by 8 to a thread (CUDA programming
    guide)."""
    if row.shared > chip.shared_memory:
        return f"takes {row.shared} bytes of shared memory, and {chip.name} has {chip.shared_memory}"
    taken = -(-row.registers // 8) * 8 * row.threads
    if taken > REGISTERS:
        return f"takes {taken} registers, and a multiprocessor has {REGISTERS}"
    return ""


def name_of(launch: Launch) -> str:
    return f"{launch.module.removeprefix('penstock.kernels.')}.{launch.name}"


def digests(every: Launches) -> dict[str, str]:
    kernels = {name_of(launch): launch for found in every.values() for launch in found.values()}
    return {name: digest(kernel_of(launch.module, launch.name)) for name, launch in sorted(kernels.items())}


def read(path: Path) -> tuple[str, dict[str, str], Rows]:
    """Triton's version, the kernels' digests, and the rows."""
    if not path.exists():
        return "", {}, {}
    found = json.loads(path.read_text())
    rows = {
        name: {label: {chip: Row(*row) for chip, row in taken.items()} for label, taken in kernel["rows"].items()}
        for name, kernel in found["kernels"].items()
    }
    return found["triton"], {name: kernel["digest"] for name, kernel in found["kernels"].items()}, rows


def write(path: Path, held: Mapping[str, str], rows: Rows) -> None:
    """One row a line."""
    kernels = []
    for name in sorted(rows):
        lines = [f"    {json.dumps(label)}: {json.dumps(rows[name][label])}" for label in sorted(rows[name])]
        kernels.append(f'  {json.dumps(name)}: {{"digest": "{held[name]}", "rows": {{\n' + ",\n".join(lines) + "}}")
    path.write_text(f'{{"triton": "{triton.__version__}", "kernels": {{\n' + ",\n".join(kernels) + "}}\n")


def problems(every: Launches, held: Mapping[str, str], rows: Rows) -> Iterator[str]:
    """What the file lacks or has of other sources, and what a chip cannot run."""
    for name, now in digests(every).items():
        if held.get(name) != now:
            yield f"{name}: its source has changed since it was compiled: run python -m benchmarks.chips"
    for chip, found in every.items():
        for launch in found.values():
            row = rows.get(name_of(launch), {}).get(launch.label, {}).get(chip)
            if row is None:
                yield f"{name_of(launch)} {launch.label}: not compiled for {chip}: run python -m benchmarks.chips"
            elif text := exceeded(CHIPS[chip], row):
                yield f"{name_of(launch)} {launch.label}: {text}"


def sample(every: Launches) -> list[tuple[Launch, str]]:
    """Some launches of different kernels, spread over the chips; others once a kernel has changed."""
    pairs = {name_of(launch): (launch, chip) for chip, found in every.items() for launch in found.values()}
    ordered = sorted(pairs, key=lambda name: digest(kernel_of(*pairs[name][0][:2])))
    names, chips = ordered[:SAMPLE], list(every)
    picked = []
    for at, name in enumerate(names):
        own = [(launch, chip) for chip in chips for launch in every[chip].values() if name_of(launch) == name]
        picked.append(own[at * len(own) // len(names)])
    return picked


def check(every: Launches) -> list[str]:
    version, held, rows = read(FILE)
    found = list(problems(every, held, rows))
    for launch, chip, row in compiled(sample(every), len(os.sched_getaffinity(0))):
        before = rows.get(name_of(launch), {}).get(launch.label, {}).get(chip)
        if isinstance(row, str):
            found.append(f"{name_of(launch)} {launch.label}: does not compile for {chip}: {row}")
        elif before is not None and version == triton.__version__ and row != before:
            found.append(f"{name_of(launch)} {launch.label}: {chip} takes {row}, and the file has {before}")
    return found


def update(every: Launches, path: Path, anew: bool, only: str, jobs: int) -> list[str]:
    """Write the file anew; of kernels that `only` leaves out the rows stay as they are."""
    version, held, rows = read(path)
    now = digests(every)
    anew = anew or version != triton.__version__
    kept: Rows = {}
    missing, found = [], []
    for chip, own in every.items():
        for launch in own.values():
            name = name_of(launch)
            row = rows.get(name, {}).get(launch.label, {}).get(chip)
            if fnmatch.fnmatch(name, only) and (row is None or anew or held.get(name) != now[name]):
                missing.append((launch, chip))
            elif row is not None:
                kept.setdefault(name, {}).setdefault(launch.label, {})[chip] = row
    for launch, chip, taken in compiled(missing, jobs):
        if isinstance(taken, str):
            found.append(f"{name_of(launch)} {launch.label}: does not compile for {chip}: {taken}")
        else:
            kept.setdefault(name_of(launch), {}).setdefault(launch.label, {})[chip] = taken
    now |= {name: held[name] for name in kept if not fnmatch.fnmatch(name, only)}
    write(path, now, kept)
    return found + list(problems(every, now, kept))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compile a sample alone, and write nothing")
    parser.add_argument("--all", action="store_true", help="compile everything anew")
    parser.add_argument("--only", default="*", help="kernels to compile, as a pattern of the shell: attention*")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    options = parser.parse_args(arguments)
    every = {name: launches(chip) for name, chip in CHIPS.items()}
    found = check(every) if options.check else update(every, options.output, options.all, options.only, options.jobs)
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
