"""Two trees under the same loads, in turns on one device: `python -m benchmarks.in_turns OLD_TREE --old-commit X`.

A server of each tree runs with half of the device's memory. Each row's load goes to both, one after the other and the
other way round in the next turn, with fresh prompts each turn; the server without a load is idle. The load generator
is this tree's for both. Says by how much this tree is better, in percent, at the median of its turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks import report, rows
from benchmarks.h200 import CLIENTS, ROW_LIMIT, SERVE, SMOKE, attempt, device, prepared
from benchmarks.rows import FEATURES, SERVING, WORKLOADS, Row
from benchmarks.server import Server, serving
from benchmarks.shapes import SHAPES, Shape, make_folder

ROWS = {row.name: row for row in (*SERVING, *FEATURES)}
OUTPUT = report.ROOT / "benchmarks" / "results" / "in_turns.json"
MEMORY = ("0.42", "0.86")  # --gpu-memory-utilization of the first server, and of both together


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """One row of one model: a value for each turn."""

    model: str
    row: str
    unit: str
    old: list[float]
    new: list[float]
    better: float  # percent


def better(row: Row, old: Sequence[float], new: Sequence[float]) -> float:
    """By how many percent the new tree's median is better."""
    ratio = statistics.median(new) / statistics.median(old)
    return round(100 * (1 - ratio if rows.lower_is_better(row) else ratio - 1), 2)


def value(server: Server, row: Row, shape: Shape, turn: int, *, smoke: bool) -> float:
    """The row's figure for one load. Raises RuntimeError where there is none."""
    load = msgspec.structs.replace(prepared(WORKLOADS[row.load], shape, smoke=smoke), seed=turn)
    result, error = attempt(server, load, CLIENTS, ROW_LIMIT)
    found = rows.figure(row, result) if result is not None and not error else None
    if found is None:
        raise RuntimeError(f"{row.name}: {error or 'nothing was measured'}\n{server.tail()}")
    return found


def compared(
    shape: Shape, old_tree: Path, chosen: Sequence[Row], turns: int, *, smoke: bool
) -> tuple[list[Turns], str]:
    """Every row in turns, and the device's name."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-in-turns-")))
        folder = str(make_folder(shape, place))
        servers = []
        for root, share in zip((old_tree, report.ROOT), MEMORY, strict=True):
            options = SMOKE if smoke else (*SERVE, "--gpu-memory-utilization", share)  # of two equal options the last
            servers.append(stack.enter_context(serving([folder, *options], {"PYTHONPATH": path_of(root)}, root)))
        found = []
        for row in chosen:
            values: tuple[list[float], list[float]] = ([], [])
            for turn in range(turns):
                for side in (0, 1) if turn % 2 == 0 else (1, 0):
                    values[side].append(round(value(servers[side], row, shape, turn, smoke=smoke), 4))
            found.append(Turns(model=shape.name, row=row.name, unit=rows.UNITS[row.figure], old=values[0],
                               new=values[1], better=better(row, *values)))  # fmt: skip
            print(line(found[-1]), flush=True)
        return found, device(servers[1])


def path_of(root: Path) -> str:
    """The module path with which the packages of `root` come before installed ones."""
    return os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))


def line(found: Turns) -> str:
    def told(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"

    return f"{found.model} {found.row}: {told(found.old)} → {told(found.new)} {found.unit}, {found.better:+.2f} %"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.in_turns", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("old", type=Path, help="the other tree")
    found.add_argument("--old-commit", required=True, help="its commit")
    found.add_argument("--new-commit", default="", help="this tree's, where git cannot tell: in a copy")
    found.add_argument("--rows", default="lat_bs1,bs64,decode_c256", help="with commas")
    found.add_argument("--models", default="8b,0.6b", help="shapes with commas")
    found.add_argument("--turns", type=int, default=5)
    found.add_argument("--smoke", action="store_true", help="tiny loads on a CPU")
    found.add_argument("--output", type=Path, default=OUTPUT)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    found: list[Turns] = []
    named = ""
    for name in options.models.split(","):
        chosen = [ROWS[row] for row in options.rows.split(",")]
        measured, named = compared(SHAPES[name], options.old.absolute(), chosen, options.turns, smoke=options.smoke)
        found += measured
        results = {"chip": named, "old_commit": options.old_commit, "rows": found}
        report.write(options.output, "in_turns", results, arguments, options.new_commit)  # after each: time may run out
    return 0


if __name__ == "__main__":
    sys.exit(main())
