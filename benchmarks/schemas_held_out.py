"""Schemas that were never looked at: `python -m benchmarks.schemas_held_out FOLDER` judges a corpus outside the tree.

FOLDER holds one JSON object a file, as MaskBench has them: `schema`, and `tests` with `data` and `valid`. Each schema
is compiled as a request's would be: strict, and lenient where that refuses it. The result has counts alone, so that
the corpus stays held out. An instance counts as wrong where automaton and corpus disagree. A corpus that takes formats
for annotations disagrees by design, which the counts of refused valid instances show."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import signal
from collections import Counter
from collections.abc import Sequence
from multiprocessing import Pool
from pathlib import Path
from types import FrameType

import llguidance

from benchmarks import report
from benchmarks.schema_judge import accepts_value, byte_tokenizer, compiled

OUTPUT = report.ROOT / "benchmarks" / "results" / "schemas_held_out.json"
SECONDS = 20  # for one schema; more count as refused


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One schema: its refusal, empty if it compiles, and the instances on which corpus and automaton disagree."""

    name: str
    strict: str
    lenient: str
    wrong_accepts: int = 0
    wrong_refusals: int = 0  # of strict
    narrower: int = 0  # valid instances that lenient refuses


def on_alarm(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def judged(path: Path, tokenizer: llguidance.LLTokenizer | None = None) -> Verdict:
    """Compile and judge one file."""
    case = json.loads(path.read_bytes())
    instances = [(test["data"], test["valid"]) for test in case["tests"]]
    signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(SECONDS)
    try:
        tokenizer = tokenizer or byte_tokenizer()
        strict = compiled(tokenizer, case["schema"], lenient=False)
        if strict.matcher is not None:
            found = [(accepts_value(strict, value), valid) for value, valid in instances]
            return Verdict(path.name, "", "", found.count((True, False)), found.count((False, True)))
        lenient = compiled(tokenizer, case["schema"], lenient=True)
        if lenient.matcher is None:
            return Verdict(path.name, strict.refusal, lenient.refusal)
        narrower = sum(valid and not accepts_value(lenient, value) for value, valid in instances)
        return Verdict(path.name, strict.refusal, "", narrower=narrower)
    except TimeoutError:
        return Verdict(path.name, "time", "time")
    finally:
        signal.alarm(0)


def summary(verdicts: Sequence[Verdict]) -> dict[str, object]:
    count = len(verdicts)
    counts = Counter[str]()
    for each in verdicts:
        counts["strict"] += not each.strict
        counts["lenient"] += not each.lenient
        counts["with_wrong_accepts"] += each.wrong_accepts > 0
        counts["with_refused_valid_instances"] += each.wrong_refusals > 0
        counts["narrower_lenient"] += each.narrower > 0
    shares = {f"{name}_percent": round(100 * counts[name] / count, 2) for name in ("strict", "lenient")}
    return {"schemas": count, **counts, **shares}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, default=0, help="so many schemas, drawn by seed 1; 0: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--names", action="store_true", help="print which are refused or judged wrong, and why")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    paths = sorted(options.folder.glob("*.json"))
    if options.sample:
        paths = sorted(random.Random(1).sample(paths, options.sample))
    with Pool(options.jobs) as pool:
        verdicts = pool.map(judged, paths, chunksize=16)
    results = summary(verdicts)
    print(json.dumps(results, indent=1))
    if options.names:
        print("\n".join(map(str, (each for each in verdicts if each != Verdict(each.name, "", "")))))
    words = ["FOLDER", *(["--sample", str(options.sample)] if options.sample else [])]
    report.write(options.output, "schemas_held_out", results, words)


if __name__ == "__main__":
    main()
