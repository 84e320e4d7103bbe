"""What drafts are worth to the embedded model: `python -m benchmarks.speculation`, and with `--device cuda` on a GPU.

It is asked one request at a time, greedy: to repeat lists of made-up words (`copy`), and the questions of the canary
(`chat`). Servers without drafts, with prompt lookup, with the model's own draft and with its EAGLE head run side by
side and are asked in turn, so that what else the machine does falls on all; `prediction` sends the list along to the
server without drafts. Times are of whole requests, prompt included. On a CPU the answers are the same to the last byte,
or the measurement fails; on a GPU, whose products round by the number of rows, those that differ are counted.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.demo_model.lexicon import pseudo_word
from benchmarks.h200 import device
from benchmarks.report import ROOT
from benchmarks.server import serving
from penstock.engine_core.folder import EMBEDDED_DRAFT, EMBEDDED_EAGLE

RESULTS = Path(__file__).parent / "results"
OUTPUTS: Mapping[str, Path] = {"cpu": RESULTS / "speculation_cpu.json",
                               "cuda": RESULTS / "speculation_h200.json"}  # fmt: skip
SERVERS: Mapping[str, str] = {
    "plain": "",
    "ngram": '{"method": "ngram", "num_speculative_tokens": 8}',
    "draft_model": json.dumps({"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}),
    "eagle": json.dumps({"method": "eagle", "model": EMBEDDED_EAGLE, "num_speculative_tokens": 4}),
}  # options by server
CACHE = 256 << 20  # bytes
ASK = "Please repeat this list: "
LONGEST = 400  # tokens of an answer
GOAL = 2.0  # times the speed without drafts, of prompt lookup on copies
CANARY = ROOT / "tests" / "canary.jsonl"


class Way(msgspec.Struct, frozen=True):
    """One way to ask: which server, whether with the answer to be expected, and what."""

    name: str
    server: str
    predicted: bool = False
    loads: tuple[str, ...] = ("copy", "chat")


WAYS = (
    Way("plain", "plain"),
    Way("prediction", "plain", True, ("copy",)),
    Way("ngram", "ngram"),
    Way("draft_model", "draft_model"),
    Way("eagle", "eagle"),
)


class Asked(msgspec.Struct, frozen=True):
    """One answer and what it took."""

    text: str
    seconds: float
    tokens: int
    accepted: int
    rejected: int


class Figures(msgspec.Struct, frozen=True):
    """All answers of one way to one load."""

    load: str
    way: str
    requests: int
    tokens: int
    seconds: float  # sum over prompts of the median over rounds
    tokens_per_second: float
    speedup: float  # over `plain`
    accepted: int  # drafts, all rounds
    rejected: int
    acceptance: float  # share of drafts
    differing: int = 0  # answers that are not those of the first way


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


def questions(count: int) -> list[str]:
    """Of the canary, those of a single turn, evenly picked."""
    asked = [json.loads(line)["messages"] for line in CANARY.read_text().splitlines()]
    found = [messages[0]["content"] for messages in asked if len(messages) == 1 and messages[0]["role"] == "user"]
    return found[:: max(1, len(found) // count)][:count]


def ask(url: str, text: str, *, predicted: str = "") -> Asked:
    """The answer to a user's message, with what is predicted of it."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": LONGEST}
    if predicted:
        body["prediction"] = {"type": "content", "content": predicted}
    found, seconds = post(url + "/v1/chat/completions", body)
    usage = found["usage"]
    details = usage["completion_tokens_details"]
    return Asked(
        found["choices"][0]["message"]["content"], seconds, usage["completion_tokens"],
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"],
    )  # fmt: skip


def post(url: str, body: Mapping[str, Any]) -> tuple[Any, float]:
    """The answer to a request, and the seconds that it took."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    return found, time.perf_counter() - began


def measure(
    urls: Mapping[str, str], ways: Sequence[Way], loads: Mapping[str, Sequence[str]], rounds: int
) -> dict[tuple[str, str], list[list[Asked]]]:
    """Answers by load and way, by text, by round. Every way asks for a text before the next text comes; one round is
    not kept."""
    found: dict[tuple[str, str], list[list[Asked]]] = {
        (load, way.name): [[] for _ in texts] for load, texts in loads.items() for way in ways if load in way.loads
    }
    for number in range(rounds + 1):
        for load, texts in loads.items():
            for place, text in enumerate(texts):
                for way in ways:
                    if load in way.loads:
                        asked = ASK + text if load == "copy" else text
                        answer = ask(urls[way.server], asked, predicted=text if way.predicted else "")
                        if number:
                            found[load, way.name][place].append(answer)
    return found


def figures(found: Mapping[tuple[str, str], Sequence[Sequence[Asked]]]) -> list[Figures]:
    """What each way came to; the first one of a load is what the others are compared with."""
    rows: list[Figures] = []
    first: dict[str, Figures] = {}
    said: dict[str, list[str]] = {}
    for (load, way), texts in found.items():
        seconds = sum(median(answer.seconds for answer in answers) for answers in texts)
        tokens = sum(answers[0].tokens for answers in texts)
        every = [answer for answers in texts for answer in answers]
        expected = said.setdefault(load, [answers[0].text for answers in texts])
        accepted, rejected = sum(answer.accepted for answer in every), sum(answer.rejected for answer in every)
        row = Figures(
            load=load, way=way, requests=len(every), tokens=tokens, seconds=round(seconds, 4),
            tokens_per_second=round(tokens / seconds, 1),
            speedup=round((first[load].seconds if load in first else seconds) / seconds, 2),
            accepted=accepted, rejected=rejected, acceptance=round(accepted / max(1, accepted + rejected), 4),
            differing=sum(
                answer.text != text for answers, text in zip(texts, expected, strict=True) for answer in answers
            ),
        )  # fmt: skip
        first.setdefault(load, row)
        rows.append(row)
    return rows


def table(rows: Sequence[Figures]) -> str:
    lines = [f"{'load':<6}{'way':<13}{'tokens/s':>10}{'speed-up':>10}{'accepted':>10}{'rejected':>10}{'differ':>8}"]
    lines += [
        f"{row.load:<6}{row.way:<13}{row.tokens_per_second:>10.1f}{row.speedup:>9.2f}x{row.accepted:>10}"
        f"{row.rejected:>10}{row.differing:>8}"
        for row in rows
    ]
    return "\n".join(lines)


def arguments_of(device: str, threads: int, cache: int) -> list[str]:
    """Of each server. cache: bytes of its KV cache"""
    common = ["--device", device, "--api-processes", "1", "--tokenizer-processes", "1",
              "--kv-cache-memory", str(cache)]  # fmt: skip
    return [*common, "--cpu-threads", str(threads)] if device == "cpu" else common


@contextmanager
def served(
    names: Iterable[str], options: argparse.Namespace, model: Sequence[str] = (), cache: int = CACHE
) -> Iterator[tuple[dict[str, str], str]]:
    """These of SERVERS side by side: the address of each, and what they run on. SIGTERM ends them, too.

    model: arguments that name one; none: the embedded one. cache: bytes of each one's KV cache.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ExitStack() as running:
        urls, chip = {}, ""
        for name in names:
            extra = ["--speculative-config", SERVERS[name]] if SERVERS[name] else []
            arguments = [*model, *arguments_of(options.device, options.threads, cache), *extra]
            server = running.enter_context(serving(arguments))
            urls[name], chip = server.url, chip or device(server)
        yield urls, chip


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options of a measurement of drafts."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--device", choices=tuple(OUTPUTS), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each server on a CPU")
    parser.add_argument("--output", type=Path, help="default: by the device, in benchmarks/results")
    parser.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    return parser


def setting(options: argparse.Namespace, urls: Iterable[str], chip: str) -> dict[str, Any]:
    """The chip, the servers and their load."""
    return {
        "chip": chip, "model": "embedded", "threads": options.threads, "concurrency": 1,
        "speculative_config": {name: json.loads(SERVERS[name]) for name in urls if SERVERS[name]},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ways", default=",".join(way.name for way in WAYS), help="with commas; plain is always there")
    parser.add_argument("--lists", type=int, default=8, help="lists to repeat")
    parser.add_argument("--words", type=int, default=16, help="of each list")
    parser.add_argument("--questions", type=int, default=12, help="of the canary")
    parser.add_argument("--rounds", type=int, default=5, help="times that each text is asked and measured")
    parser.add_argument("--seed", type=int, default=6)
    options = parser.parse_args(arguments)
    ways = [way for way in WAYS if way.name in ("plain", *options.ways.split(","))]
    loads = {"copy": lists(options.lists, options.words, options.seed), "chat": questions(options.questions)}
    with served(dict.fromkeys(way.server for way in ways), options) as (urls, chip):
        found = measure(urls, ways, loads, options.rounds)
    rows = figures(found)
    print(table(rows))
    report.write(options.output or OUTPUTS[options.device], "speculation", {
        **setting(options, urls, chip),
        "workload": "copy: lists of made-up words repeated; chat: the canary's questions; one at a time, greedy",
        "lists": options.lists, "words": options.words, "questions": options.questions, "rounds": options.rounds,
        "cache": "prompts are cached from the first round on, which is not counted", "goal": GOAL,
        "figures": rows,
    }, arguments, options.commit)  # fmt: skip
    if options.device == "cpu" and any(row.differing for row in rows):
        print("drafts changed an answer", file=sys.stderr)
        return 1
    return int(any(row.speedup < GOAL for row in rows if (row.load, row.way) == ("copy", "ngram")))


if __name__ == "__main__":
    sys.exit(main())
