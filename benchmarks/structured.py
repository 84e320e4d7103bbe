"""Every finished output follows its grammar: `python -m benchmarks.structured --out benchmarks/results/structured.json`

Generations at temperature 1.0 from the embedded model and from one of random weights with its tokenizer, over all cases
of `structured_cases`, several seeds, 1 to 4 choices each, in cells that must not matter: with and without overlap, with
and without forced runs as drafts, with a pool of blocks that forces preemption. An independent validator judges each
output that ended by itself; one that met max_tokens is counted and not judged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path

import msgspec
import torch

from benchmarks import report
from benchmarks.structured_cases import Case, cases
from benchmarks.structured_engine import Answer, Ask, Cell, Engine
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.grammar.compilation import compile_grammar
from penstock.engine_core.grammar.tokens import GrammarTokens, read_tokens
from penstock.engine_core.tokenizer.vocabulary import Vocabulary, read_vocabulary
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Automaton, Finish, Sampling

CELLS = {
    "overlap, forced runs": Cell(),
    "overlap": Cell(drafts=False),
    "one at a time, forced runs": Cell(depth=1),
    "one at a time": Cell(depth=1, drafts=False),
    "tiny pool, forced runs": Cell(blocks=48, expected_share=0.0, max_num_seqs=24),
}
PROMPTS = (
    "Extract the person as JSON: Tom is 5 years old and lives in Rome.",
    "Give me a list of three things.",
    "Answer in the form that I asked for.",
)
ENDS = (4089, 4087)  # of the embedded model
TOGETHER = 40  # cases in one batch of requests


@dataclasses.dataclass
class Tally:
    """What one kind of grammar came to with one model."""

    generations: int = 0
    finished: int = 0
    length: int = 0
    errors: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


class Unit(msgspec.Struct, frozen=True):
    """A piece of the work: one model, one seed, every `parts`-th case from `part` on."""

    model: str
    seed: int
    part: int
    parts: int
    most: int  # max_tokens


@dataclasses.dataclass
class Outcome:
    """What units of one model came to."""

    tallies: dict[str, Tally] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    steps: int = 0
    accepted: int = 0  # tokens of forced runs that were taken as drafts
    preemptions: int = 0
    masked_rows: int = 0
    mask_seconds: float = 0.0  # of host time
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        for kind, tally in other.tallies.items():
            mine = self.tallies.setdefault(kind, Tally())
            for field in dataclasses.fields(Tally):
                setattr(mine, field.name, getattr(mine, field.name) + getattr(tally, field.name))
        for field in dataclasses.fields(Outcome)[1:]:
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def random_model(folder: Path) -> Path:
    """A folder with the embedded model's tokenizer and a configuration for random weights."""
    for path in demo_folder().iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compiled(found: list[Case], tokens: GrammarTokens) -> list[tuple[Case, Automaton]]:
    """The cases that are served; what has no exact form is refused and not among them."""
    served = []
    for case in found:
        try:
            served.append((case, Automaton(source=compile_grammar(case.grammar, tokens).source)))
        except InvalidRequest:
            continue
    return served


def batches(
    served: list[tuple[Case, Automaton]], vocabulary: Vocabulary, seed: int, most: int
) -> Iterator[tuple[str, list[Case], list[Ask]]]:
    """Cells in turn, each with some of the cases and their requests."""
    rng = random.Random(seed)
    prompts = [tuple(vocabulary.encode(prompt, add_special_tokens=False)) for prompt in PROMPTS]
    order = rng.sample(served, len(served))
    names = list(CELLS)
    for number, start in enumerate(range(0, len(order), TOGETHER)):
        part = order[start : start + TOGETHER]
        asks = []
        for _, automaton in part:
            sampling = Sampling(temperature=1.0, max_tokens=most, eos_token_ids=ENDS, seed=rng.getrandbits(60))
            prompt, n = rng.choice(prompts), rng.randrange(1, 5)
            asks.append(Ask(token_ids=prompt, sampling=sampling, automaton=automaton, n=n))
        yield names[(seed + number) % len(names)], [case for case, _ in part], asks


def book(tallies: dict[str, Tally], case: Case, answer: Answer, vocabulary: Vocabulary) -> None:
    tally = tallies.setdefault(case.grammar.kind, Tally())
    tally.generations += 1
    if answer.finish == Finish.LENGTH:
        tally.length += 1
    elif answer.finish == Finish.STOP:
        tally.finished += 1
        text = vocabulary.decode(answer.token_ids, skip_special_tokens=True)
        if why := case.wrong(text):
            tally.wrong.append(f"{case.name}: {text[:200]!r}: {why[:200]}")
    else:
        tally.errors += 1
        tally.wrong.append(f"{case.name}: {answer.error}")


def measure(unit: Unit) -> Outcome:
    """One unit of the work."""
    torch.set_num_threads(1)
    vocabulary = read_vocabulary(demo_folder())
    tokens = read_tokens(demo_folder(), vocabulary)
    assert tokens is not None
    served = compiled(cases()[unit.part :: unit.parts], tokens)
    outcome = Outcome()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        embedded = unit.model == "embedded"
        folder = demo_folder() if embedded else random_model(Path(place))
        engine = Engine(folder, tokens, Cell(), load_format="auto" if embedded else "dummy")
        for name, group, asks in batches(served, vocabulary, unit.seed * unit.parts + unit.part, unit.most):
            engine.cell = CELLS[name]
            for (number, _), answer in engine.answer(asks).items():
                book(outcome.tallies, group[number], answer, vocabulary)
            assert engine.scheduled is not None
            assert engine.masked is not None
            outcome.tokens += engine.scheduled.output_tokens
            outcome.steps += engine.scheduled.step
            outcome.accepted += engine.scheduled.accepted_tokens
            outcome.preemptions += engine.scheduled.preemptions
            outcome.masked_rows += engine.masked.rows
            outcome.mask_seconds += engine.masked.seconds
    outcome.seconds = time.perf_counter() - began
    return outcome


def results(units: list[Unit], outcomes: list[Outcome]) -> dict[str, object]:
    """All outcomes as one record."""
    runs: dict[str, Outcome] = {}
    for unit, outcome in zip(units, outcomes, strict=True):
        runs.setdefault(unit.model, Outcome()).add(outcome)
    tallies = [tally for run in runs.values() for tally in run.tallies.values()]
    return {
        "workload": f"temperature 1.0, n 1 to 4, max_tokens {units[0].most}, fp32 on a CPU",
        "cells": list(CELLS),
        "cases": dict(Counter(case.grammar.kind for case in cases())),
        "seeds": len({unit.seed for unit in units}),
        "generations": sum(tally.generations for tally in tallies),
        "finished": sum(tally.finished for tally in tallies),
        "wrong": [line for tally in tallies for line in tally.wrong],
        "mask_microseconds_per_row": {
            model: round(run.mask_seconds / run.masked_rows * 1e6, 1) for model, run in runs.items()
        },
        "runs": {model: dataclasses.asdict(run) for model, run in runs.items()},
    }


def together(units: list[Unit], jobs: int, limit: float | None) -> tuple[list[Unit], list[Outcome]]:
    """Units that were done within the limit, in processes of their own, and what they came to; what failed is told."""
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    futures = {pool.submit(measure, unit): unit for unit in units}
    done, late = wait(futures, limit)
    for process in pool._processes.values() if late else ():
        process.kill()
    pool.shutdown(wait=not late, cancel_futures=True)
    for future in done:
        if (error := future.exception()) is not None:
            print(f"{futures[future]}: {error!r}", file=sys.stderr)
    sound = [future for future in done if future.exception() is None]
    return [futures[future] for future in sound], [future.result() for future in sound]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--models", nargs="+", default=["embedded", "random"], choices=["embedded", "random"])
    parser.add_argument("--parts", type=int, default=4, help="pieces of the cases, each a process's work at a time")
    parser.add_argument("--only", type=int, help="take this piece alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, help="seconds after which the units that are done make the report")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts = range(options.parts) if options.only is None else [options.only]
    units = [
        Unit(model, seed, part, options.parts, options.max_tokens)
        for seed in range(options.seeds)
        for part in parts
        for model in options.models
    ]
    if options.jobs == 1:
        outcomes = [measure(unit) for unit in units]
    else:
        units, outcomes = together(units, options.jobs, options.limit)
    found = results(units, outcomes)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if options.out:
        report.write(options.out, "structured", found)


if __name__ == "__main__":
    main()
