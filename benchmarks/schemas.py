"""The schema table: `python -m benchmarks.schemas` prints it and writes `benchmarks/results/schemas.json`.

Two bodies of schemas go through the front and llguidance's compiler: the official JSON Schema test suite (2020-12,
read from `../shared/jsonschema/suite`, skipped where it is absent) and the project's own in `benchmarks/schemas/`. A
group is right when its schema compiles and the automaton judges every instance as the suite, or jsonschema, does."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import report
from benchmarks.schema_judge import Compiled, accepts_value, byte_tokenizer, compiled

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT.parent / "shared" / "jsonschema" / "suite"
OWN = ROOT / "benchmarks" / "schemas"
RESULTS = ROOT / "benchmarks" / "results" / "schemas.json"


@dataclasses.dataclass(frozen=True)
class Group:
    """One schema and its instances, each with whether it is valid."""

    name: str
    schema: object
    instances: tuple[tuple[object, bool], ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one group fared."""

    name: str
    refusal: str
    wrong_accepts: int
    wrong_refusals: int
    instances: int
    rewrite_seconds: float
    compile_seconds: float


def suite_groups(folder: Path = SUITE) -> Iterator[Group]:
    """The official suite's groups."""
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            instances = tuple((test["data"], test["valid"]) for test in group["tests"])
            yield Group(f"{path.stem}: {group['description']}", group["schema"], instances)


def own_groups(folder: Path = OWN) -> Iterator[Group]:
    """The project's schemas."""
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            valid = [(value, True) for value in case["valid"]]
            yield Group(case["name"], case["schema"], (*valid, *((value, False) for value in case["invalid"])))


def judged(group: Group, made: Compiled) -> Verdict:
    """Compare the automaton's word on each instance with the one given."""
    accepts = refusals = 0
    if made.matcher is not None:
        for value, valid in group.instances:
            found = accepts_value(made, value)
            accepts += found and not valid
            refusals += valid and not found
    return Verdict(
        group.name, made.refusal, accepts, refusals, len(group.instances), made.rewrite_seconds, made.compile_seconds
    )


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(verdicts: list[Verdict]) -> dict[str, object]:
    """One row of the table, times in milliseconds."""
    passed = [v for v in verdicts if not v.refusal]
    right = [v for v in passed if not v.wrong_accepts and not v.wrong_refusals]
    out: dict[str, object] = {
        "schemas": len(verdicts),
        "compiled": len(passed),
        "right": len(right),
        "refused": len(verdicts) - len(passed),
        "with_wrong_accepts": sum(v.wrong_accepts > 0 for v in passed),
        "with_wrong_refusals": sum(v.wrong_refusals > 0 for v in passed),
        "instances": sum(v.instances for v in passed),
    }
    for name, values in (
        ("rewrite", [v.rewrite_seconds * 1e3 for v in verdicts]),
        ("compile", [v.compile_seconds * 1e3 for v in passed]),
    ):
        if values:
            out[f"{name}_ms"] = {
                "p50": round(statistics.median(values), 2),
                "p95": round(percentile(values, 0.95), 2),
                "max": round(max(values), 2),
            }
    return out


def lines(name: str, verdicts: list[Verdict]) -> Iterator[str]:
    """What is printed of one body of schemas."""
    row = summary(verdicts)
    total = len(verdicts)
    yield f"{name}: {total} schemas, {row['instances']} instances judged"
    for key in ("compiled", "right", "refused", "with_wrong_accepts", "with_wrong_refusals"):
        yield f"  {key.replace('_', ' '):<22}{row[key]:>6}  {100 * int(str(row[key])) / max(total, 1):5.1f} %"
    for key in ("rewrite_ms", "compile_ms"):
        if key in row:
            yield f"  {key.replace('_', ' '):<22}{row[key]}"
    for verdict in verdicts:
        if verdict.wrong_accepts or verdict.wrong_refusals:
            yield f"  {verdict.wrong_accepts} wrong accepts, {verdict.wrong_refusals} wrong refusals: {verdict.name}"


def run(groups: Iterable[Group]) -> list[Verdict]:
    """Compile and judge. The first compile warms llguidance up and is not kept."""
    tokenizer = byte_tokenizer()
    compiled(tokenizer, {"type": "object"})
    return [judged(group, compiled(tokenizer, group.schema)) for group in groups]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--refusals", action="store_true", help="print why each refused schema was refused")
    chosen = options.parse_args()
    results: dict[str, object] = {}
    for name, groups in (("suite", list(suite_groups())), ("own", list(own_groups()))):
        if not groups:
            print(f"{name}: skipped, no schemas found")
            continue
        verdicts = run(groups)
        print("\n".join(lines(name, verdicts)))
        if chosen.refusals:
            print("\n".join(f"  refused: {v.name}: {v.refusal}" for v in verdicts if v.refusal))
        wrong = [v.name for v in verdicts if v.wrong_accepts or v.wrong_refusals]
        results[name] = {**summary(verdicts), "wrong": wrong, "refusals": [v.name for v in verdicts if v.refusal]}
    report.write(RESULTS, "schemas", results)


if __name__ == "__main__":
    main()
