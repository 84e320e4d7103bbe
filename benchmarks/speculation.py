"""What drafts are worth on a CPU: `python -m benchmarks.speculation --output benchmarks/results/speculation_cpu.json`

The embedded model repeats lists of made-up words, one request at a time, greedy. Two servers, with and without prompt
lookup, are asked in turn, so that what else the machine does falls on both: `plain` and `prediction` (the list is sent
along) on the one without, `ngram` on the other. Times are of whole requests, prompt included. The answers are the same
to the last byte, or the measurement fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.cpu_embedded import cpu_model, versions, write
from benchmarks.demo_model.lexicon import pseudo_word
from benchmarks.serve import commit, machine
from benchmarks.server import serving

RESULTS = Path(__file__).parent / "results" / "speculation_cpu.json"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 8}'
ASK = "Please repeat this list: "
LONGEST = 400  # tokens of an answer
GOAL = 2.0  # times the speed without drafts


class Way(msgspec.Struct, frozen=True):
    """One way to ask: of which server, and whether with the answer to be expected."""

    name: str
    lookup: bool
    predicted: bool


WAYS = (Way("plain", False, False), Way("prediction", False, True), Way("ngram", True, False))


class Asked(msgspec.Struct, frozen=True):
    """One answer and what it took."""

    text: str
    seconds: float
    tokens: int
    accepted: int
    rejected: int


class Figures(msgspec.Struct, frozen=True):
    """All answers of one way."""

    way: str
    requests: int
    tokens: int
    seconds: float  # sum over prompts of the median over rounds
    tokens_per_second: float
    speedup: float  # over `plain`
    accepted: int  # drafts, all rounds
    rejected: int


def lists(count: int, words: int, seed: int) -> list[str]:
    """Lists of different made-up words."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        kept: dict[str, None] = {}
        while len(kept) < words:
            kept[pseudo_word(rng)] = None
        found.append("; ".join(kept))
    return found


def ask(url: str, text: str, *, predicted: bool) -> Asked:
    """Have the list repeated, with its text as prediction if wanted."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": ASK + text}], "temperature": 0,
                            "max_tokens": LONGEST}  # fmt: skip
    if predicted:
        body["prediction"] = {"type": "content", "content": text}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    seconds = time.perf_counter() - began
    usage = found["usage"]
    details = usage["completion_tokens_details"]
    return Asked(
        found["choices"][0]["message"]["content"], seconds, usage["completion_tokens"],
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"],
    )  # fmt: skip


def measure(urls: dict[bool, str], texts: Sequence[str], rounds: int) -> dict[str, list[list[Asked]]]:
    """Answers by way, by text, by round. Every way asks for a text before the next text comes; one round is not kept.

    Raises ValueError when two answers to one text differ.
    """
    found: dict[str, list[list[Asked]]] = {way.name: [[] for _ in texts] for way in WAYS}
    for number in range(rounds + 1):
        for place, text in enumerate(texts):
            answers = {way.name: ask(urls[way.lookup], text, predicted=way.predicted) for way in WAYS}
            if len({answer.text for answer in answers.values()}) != 1:
                raise ValueError(f"drafts changed the answer to list {place}: {answers}")
            for name, answer in answers.items():
                if number:
                    found[name][place].append(answer)
    return found


def figures(found: dict[str, list[list[Asked]]]) -> list[Figures]:
    """What each way came to; the first one is what the others are compared with."""
    rows: list[Figures] = []
    for way, texts in found.items():
        seconds = sum(median(answer.seconds for answer in answers) for answers in texts)
        tokens = sum(answers[0].tokens for answers in texts)
        every = [answer for answers in texts for answer in answers]
        rows.append(Figures(
            way=way, requests=len(every), tokens=tokens, seconds=round(seconds, 4),
            tokens_per_second=round(tokens / seconds, 1),
            speedup=round((rows[0].seconds if rows else seconds) / seconds, 2),
            accepted=sum(answer.accepted for answer in every), rejected=sum(answer.rejected for answer in every),
        ))  # fmt: skip
    return rows


def table(rows: Sequence[Figures]) -> str:
    lines = [f"{'way':<12}{'tokens/s':>10}{'speed-up':>10}{'accepted':>10}{'rejected':>10}"]
    lines += [
        f"{row.way:<12}{row.tokens_per_second:>10.1f}{row.speedup:>9.2f}x{row.accepted:>10}{row.rejected:>10}"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lists", type=int, default=8, help="lists to repeat")
    parser.add_argument("--words", type=int, default=16, help="of each list")
    parser.add_argument("--rounds", type=int, default=5, help="times that each list is asked for and measured")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each server")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers are ended, too
    common = ["--device", "cpu", "--cpu-threads", str(options.threads), "--api-processes", "1",
              "--tokenizer-processes", "1", "--kv-cache-memory", str(256 << 20)]  # fmt: skip
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    texts = lists(options.lists, options.words, options.seed)
    with serving(common) as plain, serving([*common, "--speculative-config", NGRAM]) as lookup:
        found = measure({False: plain.url, True: lookup.url}, texts, options.rounds)
    rows = figures(found)
    print(table(rows))
    write(options.output, {
        "started": started, "commit": commit(), "machine": machine() | {"cpu": cpu_model()}, "versions": versions(),
        "model": "embedded", "workload": "lists of made-up words repeated, one request at a time, greedy",
        "lists": options.lists, "words": options.words, "rounds": options.rounds, "threads": options.threads,
        "concurrency": 1, "cache": "prompts are cached from the first round on, which is not counted",
        "speculative_config": NGRAM, "goal": GOAL, "figures": rows,
    })  # fmt: skip
    return int(min(row.speedup for row in rows[1:]) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
