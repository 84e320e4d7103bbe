"""What more GPUs are worth, in one go: `python -m benchmarks.scaling`.

Each model shape is served with 1, 2 and 4 GPUs (as far as it fits and they are there), and gets the rows of the
reference page. One JSON file per row goes to benchmarks/results/scaling/SHAPE-tpN/, written as soon as the row is done;
`--table` prints the published table from them, `--smoke` tries all of it on a CPU with tiny loads over gloo.

The share is of what that many chips could do if they shared all work and exchanged nothing. The gain is against the
fewest GPUs that served the shape.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks import h200, rows
from benchmarks.report import ROOT
from benchmarks.rows import ALL, UNITS, Record, Row, lower_is_better
from benchmarks.shapes import EIGHT, HALF_SEVENTY, SEVENTY, SMOKE, Shape

RESULTS = ROOT / "benchmarks" / "results" / "scaling"
SERVED = ("lat_bs1", "ttft_1024", "ttft_8192", "bs8", "bs64", "thr_c256", "decode_c256", "prefix4k")
STAGES = "--pipeline-parallel-size"
ROW_LIMIT = 240.0  # seconds: a row of 512 requests takes the 70B shape 100 and more on two GPUs
GOAL = ("70b-40", "lat_bs1", 1, 2, 1.6)  # shape, row, from and to so many GPUs, times


def in_stages(shape: Shape) -> Shape:
    """The same model under the name that it has where its layers, not their width, are spread over the GPUs."""
    return Shape(f"{shape.name}-stages", f"{shape.title}, in stages", shape.config)


class Case(msgspec.Struct, frozen=True):
    """One shape, the sizes that serve it, and the rows that it is for."""

    shape: Shape
    sizes: tuple[int, ...]
    rows: tuple[str, ...] = SERVED
    option: str = "--tensor-parallel-size"


CASES: Mapping[str, Case] = {
    case.shape.name: case
    for case in (
        Case(EIGHT, (1, 2, 4)),
        Case(SEVENTY, (2, 4)),
        Case(HALF_SEVENTY, (1, 2, 4), ("lat_bs1", "bs8", "bs64")),
        Case(in_stages(EIGHT), (2,), option=STAGES),
        Case(in_stages(SEVENTY), (2, 4), option=STAGES),
        Case(SMOKE, (1, 2), ("lat_bs1", "bs8")),
    )
}
Found = Mapping[tuple[str, int, str], Record]  # by shape, size, row


def sized(shape: Shape, size: int) -> Shape:
    """The shape under the name that its records of so many GPUs have."""
    return Shape(f"{shape.name}-tp{size}", f"{shape.title}, {size} GPUs", shape.config)


def options_of(case: Case, size: int, given: argparse.Namespace) -> argparse.Namespace:
    """What `benchmarks.h200` is told for one size of a case."""
    wanted = [name for name in case.rows if not given.rows or name in given.rows.split(",")]
    words = ["--rows", ",".join(wanted), "--skip-start", "--clients", str(given.clients), "--output", str(given.output),
             "--commit", given.commit, "--row-limit", str(ROW_LIMIT),
             f"--server-args={case.option} {size} {given.server_args}"]  # fmt: skip
    return h200.parser().parse_args([*words, *(["--smoke"] if given.smoke else [])])


def read(folder: Path) -> Found:
    """Every record below a folder."""
    found = {}
    for case in CASES.values():
        for size in case.sizes:
            for path in sorted(folder.glob(f"{sized(case.shape, size).name}/*.json")):
                record = msgspec.json.decode(path.read_bytes(), type=Record)
                found[case.shape.name, size, record.row] = record
    return found


def gain(row: Row, before: Record | None, after: Record | None) -> float | None:
    """How many times as good a row is."""
    if before is None or after is None or not before.value or not after.value:
        return None
    return before.value / after.value if lower_is_better(row) else after.value / before.value


def table(found: Found) -> str:
    """The table of docs/performance.md, in Markdown: a line for each shape and row, a cell for each number of GPUs."""
    sizes = sorted({size for _, size, _ in found})
    heads = [f"{size} GPU{'s' * (size > 1)}" for size in sizes]
    lines = [f"| Shape | Row | figure | {' | '.join(heads)} |", "|---|---|---" + "|---" * len(sizes) + "|"]
    for case in CASES.values():
        for row in (row for row in ALL if row.name in case.rows):
            records = {size: found.get((case.shape.name, size, row.name)) for size in sizes}
            first = next((record for record in records.values() if record is not None), None)
            if first is not None:
                cells = [cell(row, first, records[size]) for size in sizes]
                lines.append(f"| {case.shape.title} | {row.name} | {UNITS[row.figure]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", verdict(found)])


def cell(row: Row, first: Record, record: Record | None) -> str:
    """A figure, its share of the limit, and its gain over the fewest GPUs."""
    if record is None:
        return ""
    if record.value is None:
        return "failed"
    share = f", {100 * record.share_of_limit:.0f} %" if record.share_of_limit is not None else ""
    times = gain(row, first, record) if record is not first else None
    return f"{rows.number(record.value)}{share}" + (f", {times:.2f} times" if times is not None else "")


def verdict(found: Found) -> str:
    """The goal that issue 10 set, held against the records."""
    shape, name, few, many, goal = GOAL
    row = next(row for row in ALL if row.name == name)
    times = gain(row, found.get((shape, few, name)), found.get((shape, many, name)))
    told = "not measured" if times is None else f"{times:.2f} times, {'met' if times >= goal else 'missed'}"
    return f"{name} of {shape} with {many} GPUs against {few}, goal {goal} times: {told}"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--models", default="", help="shapes with commas, of " + ", ".join(CASES) + "; empty: all")
    found.add_argument("--sizes", default="", help="only with so many GPUs, with commas")
    found.add_argument("--rows", default="", help="only these rows, with commas")
    found.add_argument("--server-args", default="", help="further arguments of penstock serve, in one word")
    found.add_argument("--clients", type=int, default=h200.CLIENTS, help="client processes")
    found.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    found.add_argument("--table", action="store_true", help="print the table of the records that are there, and end")
    found.add_argument("--smoke", action="store_true", help="the embedded model's shape on a CPU, tiny loads")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.table:
        print(table(read(options.output)))
        return 0
    plain = [name for name in CASES if (name == SMOKE.name) == options.smoke]
    names = options.models.split(",") if options.models else plain
    for word, allowed in [(name, set(CASES)) for name in names] + [
        (name, set(SERVED)) for name in options.rows.split(",") if name
    ]:
        if word not in allowed:
            print(f"{word!r} is not allowed; one of {', '.join(sorted(allowed))}", file=sys.stderr)
            return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is ended, too
    failed = 0
    for case in (CASES[name] for name in names):
        for size in (size for size in case.sizes if not options.sizes or str(size) in options.sizes.split(",")):
            shape = sized(case.shape, size)
            print(f"\n{shape.title}", flush=True)
            run = h200.Run(options_of(case, size, options))
            with tempfile.TemporaryDirectory(prefix="penstock-scaling-") as place:
                try:
                    run.model(shape, Path(place))
                except TimeoutError as error:  # of one size; the others may yet be served
                    failed += 1
                    print(f"{shape.name}: {error}", file=sys.stderr, flush=True)
            failed += run.failed
    print("\n" + table(read(options.output)), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
