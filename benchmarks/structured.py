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
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from benchmarks.structured_cases import Case, cases
from benchmarks.structured_engine import Answer, Ask, Cell, Engine
from engine_core.embedded import demo_folder
from engine_core.grammar.compilation import compile_grammar
from engine_core.grammar.tokens import GrammarTokens, read_tokens
from engine_core.text.vocabulary import Vocabulary, read_vocabulary
from protocol.errors import InvalidRequest
from protocol.messages import Automaton, Finish, Sampling

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


class RunResult(msgspec.Struct, frozen=True):
    """One model's part of the report."""

    model: str
    tallies: dict[str, Tally]
    tokens: int
    steps: int
    accepted: int  # tokens of forced runs that were taken as drafts
    preemptions: int
    mask_row_microseconds: float  # host time per constrained row of a step
    seconds: float


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


def measure(model: str, served: list[tuple[Case, Automaton]], seeds: int, most: int) -> RunResult:
    """All cases with one model, `seeds` times."""
    vocabulary = read_vocabulary(demo_folder())
    tokens = read_tokens(demo_folder(), vocabulary)
    assert tokens is not None
    tallies: dict[str, Tally] = {}
    totals: Counter[str] = Counter()
    row_seconds = rows = 0.0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = demo_folder() if model == "embedded" else random_model(Path(place))
        engine = Engine(folder, tokens, Cell(), load_format="auto" if model == "embedded" else "dummy")
        for seed in range(seeds):
            for name, group, asks in batches(served, vocabulary, seed, most):
                engine.cell = CELLS[name]
                for (number, _), answer in engine.answer(asks).items():
                    book(tallies, group[number], answer, vocabulary)
                assert engine.scheduled is not None
                assert engine.masked is not None
                totals["tokens"] += engine.scheduled.output_tokens
                totals["steps"] += engine.scheduled.step
                totals["accepted"] += engine.scheduled.accepted_tokens
                totals["preemptions"] += engine.scheduled.preemptions
                row_seconds, rows = row_seconds + engine.masked.seconds, rows + engine.masked.rows
    return RunResult(
        model, tallies, totals["tokens"], totals["steps"], totals["accepted"], totals["preemptions"],
        round(row_seconds / rows * 1e6, 1), round(time.perf_counter() - began, 1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--models", nargs="+", default=["embedded", "random"], choices=["embedded", "random"])
    parser.add_argument("--every", type=int, default=1, help="take every so many-th case")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = cases()
    vocabulary = read_vocabulary(demo_folder())
    tokens = read_tokens(demo_folder(), vocabulary)
    assert tokens is not None
    served = compiled(found, tokens)[:: options.every]
    runs = [measure(model, served, options.seeds, options.max_tokens) for model in options.models]
    kinds = Counter(case.grammar.kind for case, _ in served)
    report = {
        "workload": f"temperature 1.0, n 1 to 4, max_tokens {options.max_tokens}, {options.seeds} seeds, fp32 on a CPU",
        "cells": list(CELLS),
        "cases": dict(kinds),
        "refused": len(found) - len(compiled(found, tokens)) if options.every == 1 else None,
        "generations": sum(tally.generations for run in runs for tally in run.tallies.values()),
        "finished": sum(tally.finished for run in runs for tally in run.tallies.values()),
        "wrong": [line for run in runs for tally in run.tallies.values() for line in tally.wrong],
        "runs": msgspec.to_builtins(runs),
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
