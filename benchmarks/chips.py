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
from typing import Any

import triton
from triton import knobs
from triton.runtime.driver import driver

from benchmarks.chip_launches import ChipDriver, Launch, launches
from benchmarks.chip_table import FILE, Row, Rows, Source, Table, exceeded, read, write
from penstock.kernels.chip import CHIPS, Chip

THREADS = re.compile(r"\.(?:req|max)ntid\s+(\d+)")
USED = re.compile(r"REG:(\d+) STACK:(\d+)")
SAMPLE = 8
KEPT = 50  # rows after which the file is written, so that a run that is cut off leaves what it found


Launches = Mapping[str, Mapping[str, Launch]]  # by chip, then by name and label


@functools.cache
def kernel_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@functools.cache
def digest(kernel: Any) -> str:
    """Of the source of a kernel, of those that it calls, and of the constants that they read. Unlike Triton's own it
    depends neither on the line at which a kernel stands nor on comments."""
    seen: dict[str, str] = {}
    kernels = [kernel]
    while kernels:
        one = kernels.pop()
        place = f"{one.fn.__module__}.{one.fn.__name__}"
        if place in seen:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(one.fn)))
        function = tree.body[0]
        if isinstance(function, ast.FunctionDef) and ast.get_docstring(function) is not None:
            del function.body[0]
        seen[place] = ast.unparse(tree)
        for name in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
            used = one.fn.__globals__.get(name)
            if isinstance(used, triton.language.constexpr):
                seen[f"{place}.{name}"] = repr(used.value)
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


def name_of(launch: Launch) -> str:
    return f"{launch.module.removeprefix('penstock.kernels.')}.{launch.name}"


def digests(every: Launches) -> dict[str, str]:
    kernels = {name_of(launch): launch for found in every.values() for launch in found.values()}
    return {name: digest(kernel_of(launch.module, launch.name)) for name, launch in sorted(kernels.items())}


def problems(every: Launches, table: Table) -> Iterator[str]:
    """What the file lacks or has of other sources, and what a chip cannot run."""
    for name, now in digests(every).items():
        if name not in table.sources or table.sources[name].digest != now:
            yield f"{name}: its source has changed since it was compiled: run python -m benchmarks.chips"
    for chip, found in every.items():
        for launch in found.values():
            row = table.rows.get(name_of(launch), {}).get(launch.label, {}).get(chip)
            if row is None:
                yield f"{name_of(launch)} {launch.label}: not compiled for {chip}: run python -m benchmarks.chips"
            elif text := exceeded(CHIPS[chip], row):
                yield f"{name_of(launch)} {launch.label}: {text}"
            elif launch.most and row.shared > launch.most:
                reckoned = f"{row.shared} bytes of shared memory, and shared_bytes() reckons with {launch.most}"
                yield f"{name_of(launch)} {launch.label}: takes {reckoned} on {chip}"


def sample(every: Launches, count: int) -> list[tuple[Launch, str]]:
    """Some launches of different kernels, spread over the chips; others once a kernel has changed."""
    pairs = {name_of(launch): (launch, chip) for chip, found in every.items() for launch in found.values()}
    ordered = sorted(pairs, key=lambda name: digest(kernel_of(*pairs[name][0][:2])))
    names, chips = ordered[:count], list(every)
    picked = []
    for at, name in enumerate(names):
        own = [(launch, chip) for chip in chips for launch in every[chip].values() if name_of(launch) == name]
        picked.append(own[at * len(own) // len(names)])
    return picked


def check(every: Launches, path: Path, count: int) -> list[str]:
    table = read(path)
    found = list(problems(every, table))
    for launch, chip, row in compiled(sample(every, count), len(os.sched_getaffinity(0))):
        before = table.rows.get(name_of(launch), {}).get(launch.label, {}).get(chip)
        if isinstance(row, str):
            found.append(f"{name_of(launch)} {launch.label}: does not compile for {chip}: {row}")
        elif text := exceeded(CHIPS[chip], row):
            found.append(f"{name_of(launch)} {launch.label}: {text}")
        elif before not in (None, row) and table.sources[name_of(launch)].triton == triton.__version__:
            found.append(f"{name_of(launch)} {launch.label}: takes {row} on {chip}, and {before} in the file")
    return found


def update(every: Launches, path: Path, anew: bool, only: str, jobs: int) -> list[str]:
    """Write the file anew. Rows of kernels that `only` leaves out stay as they are; a kernel has rows of one Triton."""
    before = read(path)
    sources = {name: Source(held, triton.__version__) for name, held in digests(every).items()}
    pairs = [(launch, chip) for chip, own in every.items() for launch in own.values()]

    def row_of(launch: Launch, chip: str) -> Row | None:
        return before.rows.get(name_of(launch), {}).get(launch.label, {}).get(chip)

    lacking = {name_of(launch) for launch, chip in pairs if row_of(launch, chip) is None}
    wanted = {name for name in sources if fnmatch.fnmatch(name, only)}
    stale = {name for name in wanted if before.sources.get(name) != sources[name]}
    for name in sources:
        found = before.sources.get(name)
        if found is not None and (name not in wanted or (found.digest == sources[name].digest and name not in lacking)):
            sources[name] = found
            stale -= {name}
    kept: Rows = {}
    missing, problem = [], []
    for launch, chip in pairs:
        name, row = name_of(launch), row_of(launch, chip)
        if name in wanted and (anew or row is None or name in stale):
            missing.append((launch, chip))
        elif row is not None:
            kept.setdefault(name, {}).setdefault(launch.label, {})[chip] = row
    table = Table(sources, kept)
    for done, (launch, chip, taken) in enumerate(compiled(missing, jobs)):
        if isinstance(taken, str):
            problem.append(f"{name_of(launch)} {launch.label}: does not compile for {chip}: {taken}")
        else:
            kept.setdefault(name_of(launch), {}).setdefault(launch.label, {})[chip] = taken
        if done % KEPT == 0:
            write(path, table)
    write(path, table)
    return problem + list(problems(every, table))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compile a sample alone, and write nothing")
    parser.add_argument("--all", action="store_true", help="compile everything anew")
    parser.add_argument("--only", default="*", help="kernels to compile, as a pattern of the shell: attention*")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--sample", type=int, default=SAMPLE, help="kernels that --check compiles")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    options = parser.parse_args(arguments)
    every = {name: launches(chip) for name, chip in CHIPS.items()}
    if options.check:
        found = check(every, options.file, options.sample)
    else:
        found = update(every, options.file, options.all, options.only, options.jobs)
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
