"""Derive the limits of stored figures again: `python -m benchmarks.relimit`.

The share of a limit follows from a record's value, its load and the rates in benchmarks/limits.py. When a rate there
changes, this rewrites `limit` and `share_of_limit` of each row below benchmarks/results, and `limit` and `share` of
each kernel's figure. Nothing that was measured changes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import limits, rows
from benchmarks.limits import CHIPS, Chip
from benchmarks.report import ROOT
from benchmarks.rows import ALL, Record
from benchmarks.scaling import CASES, sized
from benchmarks.shapes import SHAPES, Shape, make_folder
from penstock.engine_core.models.spec import ModelSpec, read_spec

RESULTS = ROOT / "benchmarks" / "results"
KERNELS = ("kernels_h200.json", "expert_kernels_h200.json", "expert_kernels_sweep_h200.json")
ROWS = ("h200/8b", "h200/0.6b", "h200/formats/*", "h200/hybrids/*", "h200/invariant/8b", "scaling/*")


def models() -> dict[str, Shape]:
    """The shapes of records by the name of their folder."""
    many = {sized(case.shape, size).name: case.shape for case in CASES.values() for size in case.sizes}
    return {**many, **SHAPES}


def limited(record: Record, spec: ModelSpec) -> Record:
    """The record with the limit of its chip and load; as it is where nothing is known of either."""
    chip = limits.chip(record.environment.get("chip", ""))
    if chip is None or record.workload is None:
        return record
    row = next(row for row in ALL if row.name == record.row)
    limit = limits.limit(record.figure, record.workload, limits.Cost.of(spec, chip))
    return msgspec.structs.replace(
        record, limit=limit and round(limit, 4), share_of_limit=rows.share(row, record.value, limit)
    )


def bounded(figure: dict[str, Any], chip: Chip) -> dict[str, Any]:
    """A kernel's figure with the nearer limit and the share of it."""
    read, multiplied = figure["bytes"] / chip.bytes_per_second, figure["flops"] / chip.flops_per_second
    share = max(read, multiplied) / (figure["microseconds"] * 1e-6)
    return figure | {"limit": "read" if read > multiplied else "matrix", "share": round(share, 4)}


def records(results: Path) -> Iterable[Path]:
    for pattern in ROWS:
        yield from sorted(results.glob(f"{pattern}/*.json"))


def derive(results: Path) -> dict[Path, bytes]:
    """What each file should hold."""
    found: dict[Path, bytes] = {}
    shapes, specs = models(), dict[str, ModelSpec]()
    with tempfile.TemporaryDirectory(prefix="penstock-shapes-") as place:
        for path in records(results):
            stored = json.loads(path.read_bytes())
            record = msgspec.convert(stored, Record)
            shape = shapes[record.model]
            if shape.name not in specs:
                specs[shape.name] = read_spec(make_folder(shape, Path(place)))
            after = limited(record, specs[shape.name])
            found[path] = pretty(stored | {"limit": after.limit, "share_of_limit": after.share_of_limit}) + b"\n"
    for name in KERNELS:
        path = results / name
        report = json.loads(path.read_bytes())
        figures = [bounded(figure, CHIPS["H200"]) for figure in report["figures"]]
        found[path] = pretty(report | {"figures": figures})
    return found


def pretty(report: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relimit", description=__doc__.partition("\n")[0])
    parser.parse_args(arguments)
    for path, content in derive(RESULTS).items():
        path.write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
