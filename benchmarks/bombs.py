"""What a stream notices of bombs: `python -m benchmarks.bombs` prints it and writes `benchmarks/results/bombs.json`.

Gaps between the tokens of one free stream, alone and while clients send what `bomb_cases` lists, each as soon as its
last one was answered. The stream's p99 among bombs is held against its own without them. On a CPU the workers that
compile compete with the executor for cores, which on a GPU they do not. `--shape 8b --device cuda` serves dummy weights
of a shape of `benchmarks/shapes.py` in place of the embedded model.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.bomb_cases import cases, texts
from benchmarks.server import serving
from benchmarks.shapes import SHAPES, make_folder

CLIENTS = 2  # that send bombs at a time
DUMMY = ("--load-format", "dummy", "--max-model-len", "4096")
ONE_EACH = ("--api-processes", "1", "--tokenizer-processes", "1")
RESULTS = Path(__file__).resolve().parent / "results" / "bombs.json"
PROMPT = "Tell me a long story."
BEGUN = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1.0}
KINDS = len(cases(0)) + len(texts(0))
SALTS = 3  # times all bombs, for which no stream is long enough


def bombs(salt: int) -> Iterator[tuple[str, bytes]]:
    """Name and body of every bomb; no cache has seen those of a salt that has not been used."""
    begun = {**BEGUN, "seed": salt}
    for name, fields in cases(salt).items():
        yield name, json.dumps({**begun, **fields}).encode()
    for name, made in texts(salt).items():
        yield name, made(json.dumps(begun).removesuffix("}"))


def deck(salt: int) -> list[bytes]:
    """Their bodies in an order by chance, so that a stream that is too short for all meets some of each sort."""
    found = [body for _, body in bombs(salt)]
    random.Random(salt).shuffle(found)
    return found


@contextmanager
def posted(url: str, body: bytes) -> Iterator[http.client.HTTPResponse]:
    """The response to a completion request, read within the block."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    with closing(connection):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response


def gaps(url: str, tokens: int) -> list[float]:
    """Milliseconds between the chunks of one stream."""
    found, last = [], 0.0
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    with posted(url, json.dumps(body).encode()) as response:
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    found.append((now - last) * 1e3)
                last = now
    return found


class Bombers:
    """Clients that send these bodies, each one after the other, until they are stopped or everything was sent."""

    def __init__(self, url: str, bodies: Iterable[bytes], clients: int = CLIENTS) -> None:
        self.statuses: list[int] = []
        self._url = url
        self._bodies = iter(bodies)
        self._lock = threading.Lock()  # of the bodies
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                body = next(self._bodies, None)
            if body is None:
                return
            with posted(self._url, body) as response:
                response.read()
                self.statuses.append(response.status)


def summary(found: list[float]) -> dict[str, float]:
    ordered = sorted(found)
    return {
        "tokens": len(found),
        "median_ms": round(statistics.median(ordered), 3),
        "p99_ms": round(ordered[len(ordered) * 99 // 100], 3),
        "max_ms": round(ordered[-1], 3),
    }


def measured(url: str, tokens: int, rounds: int) -> dict[str, Any]:
    """The stream's gaps alone, among as many plain requests, and among bombs; by turns, so that a machine's moods meet
    all of them."""
    alone: list[float] = []
    plain: list[float] = []
    among: list[float] = []
    statuses: list[int] = []
    salts = itertools.count(1)
    bodies: list[bytes] = []
    gaps(url, 100)
    for _ in range(rounds):
        while len(bodies) < SALTS * KINDS:  # made beforehand: making them takes time too
            bodies += deck(next(salts))
        alone += gaps(url, tokens)
        plain += attended(url, itertools.repeat(json.dumps(BEGUN).encode()), tokens, [])
        left = iter(bodies)
        among += attended(url, left, tokens, statuses)
        bodies = list(left)  # the next round goes on where this one ended
    own = summary(alone)["p99_ms"]
    return {
        "alone": summary(alone),
        "among_plain_requests": summary(plain),
        "among_bombs": summary(among),
        "p99_ratio_plain": round(summary(plain)["p99_ms"] / own, 3),
        "p99_ratio_bombs": round(summary(among)["p99_ms"] / own, 3),
        "answers": {str(status): statuses.count(status) for status in sorted(set(statuses))},
    }


def attended(url: str, bodies: Iterable[bytes], tokens: int, statuses: list[int]) -> list[float]:
    """The stream's gaps while these are sent."""
    bombers = Bombers(url, bodies)
    try:
        return gaps(url, tokens)
    finally:
        bombers.stop()
        statuses += bombers.statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="", choices=["", *SHAPES], help="dummy weights; empty: the embedded model")
    parser.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with ExitStack() as stack:
        arguments = ["--device", options.device, *ONE_EACH]
        if options.shape:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bombs-")))
            arguments = [str(make_folder(SHAPES[options.shape], place)), *DUMMY, *arguments]
        server = stack.enter_context(serving(arguments, {"OMP_NUM_THREADS": "1"}))
        found = measured(server.url, options.tokens, options.rounds)
        print(server.tail(), file=sys.stderr)
    about = {
        "model": options.shape or "embedded", "device": options.device, "cores": len(os.sched_getaffinity(0)),
        "clients": CLIENTS,
    }  # fmt: skip
    report.write(options.out, "bombs", {**about, **found}, known_commit=options.commit)
    print(options.out.read_text(), end="")


if __name__ == "__main__":
    main()
