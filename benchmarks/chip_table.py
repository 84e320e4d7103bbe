"""benchmarks/results/chips.json: what each kernel takes on each chip, as `benchmarks.chips` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import ROOT
from penstock.kernels.chip import Chip

FILE = ROOT / "benchmarks" / "results" / "chips.json"
REGISTERS = 1 << 16  # of a multiprocessor, in any of these chips


class Row(NamedTuple):
    """What a compiled kernel takes."""

    shared: int  # bytes of a program
    registers: int  # of a thread
    threads: int  # of a program
    stack: int  # bytes of a thread: registers that were spilled, mostly


Rows = dict[str, dict[str, dict[str, Row]]]  # by kernel, by label, by chip


class Source(NamedTuple):
    """What a kernel's rows were compiled from, and by which Triton."""

    digest: str
    triton: str


class Table(NamedTuple):
    sources: Mapping[str, Source]  # by kernel
    rows: Rows


def read(path: Path = FILE) -> Table:
    """An empty table where there is no file."""
    kernels = json.loads(path.read_text()) if path.exists() else {}
    rows = {
        name: {label: {chip: Row(*row) for chip, row in taken.items()} for label, taken in kernel["rows"].items()}
        for name, kernel in kernels.items()
    }
    return Table({name: Source(kernel["digest"], kernel["triton"]) for name, kernel in kernels.items()}, rows)


def write(path: Path, table: Table) -> None:
    """One label a line, in order."""
    kernels = []
    for name, rows in sorted(table.rows.items()):
        digest, triton = table.sources[name]
        lines = [f"  {json.dumps(label)}: {json.dumps(rows[label])}" for label in sorted(rows)]
        head = f'{json.dumps(name)}: {{"digest": "{digest}", "triton": "{triton}", "rows": {{\n'
        kernels.append(head + ",\n".join(lines) + "}}")
    path.write_text("{" + ",\n".join(kernels) + "}\n")


def exceeded(chip: Chip, row: Row) -> str:
    """Which limit of the chip a kernel exceeds, if any. Registers are given out by 8 to a thread (CUDA programming
    guide)."""
    if row.shared > chip.shared_memory:
        return f"takes {row.shared} bytes of shared memory, and {chip.name} has {chip.shared_memory}"
    taken = -(-row.registers // 8) * 8 * row.threads
    if taken > REGISTERS:
        return f"takes {taken} registers, and a multiprocessor of {chip.name} has {REGISTERS}"
    return ""
