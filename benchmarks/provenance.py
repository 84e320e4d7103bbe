"""Marks results that do not say what they were measured on: `python -m benchmarks.provenance --write` or `--check`.

A result is to have the commit and the date of its measurement, and the commit is to be that of an unchanged tree. What
lacks any of it is listed with what it lacks in benchmarks/results/provenance.json, until it is measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.relimit import RESULTS

MARKS = "provenance.json"
NO_COMMIT, NO_DATE, CHANGED = "no commit", "no date", "measured in a tree with uncommitted changes"
TRANSCRIPTS = ("claude_code.txt", "codex.txt", "codex_patch.txt")  # of a conversation, without figures


def lacking(path: Path) -> list[str]:
    """What a result does not say of its measurement; text says nothing."""
    reports = headers(json.loads(path.read_bytes())) if path.suffix == ".json" else [{}]
    found = set[str]()
    for report in reports:
        commit = str(report.get("commit") or "")
        found |= {NO_COMMIT} if not commit else {CHANGED} if commit.endswith("+") else set()
        found |= set() if report.get("started") or report.get("date") else {NO_DATE}
    return sorted(found)


def headers(report: Any) -> Iterable[dict[str, Any]]:
    """Where a result, or each of a list of them, has its commit and date."""
    for one in report if isinstance(report, list) else [report]:
        yield one | one.get("environment", {})


def marks(results: Path) -> dict[str, list[str]]:
    """What every result lacks that lacks anything."""
    paths = sorted(path for path in results.rglob("*") if path.is_file() and path.name not in (MARKS, *TRANSCRIPTS))
    found = {str(path.relative_to(results)): lacking(path) for path in paths}
    return {name: reasons for name, reasons in found.items() if reasons}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.provenance", description=__doc__.partition("\n")[0])
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", action="store_true", help="list what lacks something")
    way.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args(arguments)
    found, path = json.dumps(marks(RESULTS), indent=1) + "\n", RESULTS / MARKS
    if options.write:
        path.write_text(found)
        return 0
    if path.read_text() != found:
        print(f"{path} is out of date", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
