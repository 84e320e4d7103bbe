"""Load generator for any OpenAI-compatible server: `python -m benchmarks.serve --base-url http://localhost:8000`.

Workloads are rows of benchmarks/load/workload.py (`--rows bs64,decode_c256` or `--rows all`) or made of options.
Results go to standard output as a table and with `--output` to a JSON file. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.load.workload import ROWS
from penstock.protocol.errors import PenstockError
from penstock.services.bench.client import target
from penstock.services.bench.serve import (
    HEADING,
    add_load,
    line,
    measure,
    read_model_info,
    shared,
    workload_of,
)
from penstock.services.bench.workload import Workload


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.partition("\n")[0])
    server = found.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", help="with or without /v1; plain http")
    server.add_argument("--model", default="", help="empty: the first that the server lists")
    server.add_argument("--api-key", default="", help="sent as bearer token")
    found.add_argument("--rows", default="", help="published rows with commas, or all; lengths are then fixed")
    add_load(found, seed="--seed")
    found.add_argument("--output", type=Path, help="JSON file for the results")
    found.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="recorded: chip=H200")
    return found


def workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    """The workloads that the options ask for. Raises ValueError for an unknown row."""
    if not options.rows:
        return (workload_of(options),)
    rows = {row.name: row for row in ROWS}
    names = list(rows) if options.rows == "all" else options.rows.split(",")
    if unknown := [name for name in names if name not in rows]:
        raise ValueError(f"--rows: {unknown[0]!r} is not allowed; one of {', '.join(rows)}, or all")
    return tuple(msgspec.structs.replace(rows[name], **shared(options)) for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    words = [word.replace(options.api_key, "KEY") for word in words] if options.api_key else words
    try:
        where, rows = target(options.base_url, options.api_key), workloads(options)
        model = options.model or read_model_info(options.base_url, options.api_key)
    except (ValueError, PenstockError) as error:
        print(f"{options.base_url}: {error}", file=sys.stderr)
        return 2
    print(HEADING, flush=True)
    results = []
    for row in rows:
        result = asyncio.run(
            measure(where, row, model=model, extra=options.extra_body, processes=options.processes,
                    timeout=options.timeout)
        )  # fmt: skip
        results.append(result)
        print(line(result), flush=True)
        for kind, count in result.summary.errors.items():
            print(f"  {count} × {kind} {result.summary.error_examples.get(kind, '')}", flush=True)
        if options.output:  # after each row: a long run that is cut short keeps what it has
            labels = dict(label.split("=", 1) for label in options.label)
            found = {"model": model, "extra_body": options.extra_body, "labels": labels, "results": results}
            report.write(options.output, "serve", found, words)
    return int(any(result.summary.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
