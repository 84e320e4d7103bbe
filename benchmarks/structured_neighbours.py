"""What a stream notices of bombs: `python -m benchmarks.structured_neighbours --device cpu`

Gaps between the tokens of one free stream, alone and while clients send grammars that nobody can compile, one after the
other. Each bomb must be answered with a 400 or be served; the stream's p99 is held against its own without them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.server import serving

CLIENTS = 2  # that send bombs at a time
PROMPT = "Tell me a long story."


def bomb(number: int) -> dict[str, Any]:
    """A grammar that no cache has seen."""
    kinds: list[dict[str, Any]] = [
        {"regex": f"((a{{100}}){{100}}){{10{number}}}"},
        {"regex": "(a|aa|aaa|a*)*b" * 20 + str(number)},
        {"regex": f"(([a-z]{{1,200}}){{1,200}}){{1,{200 + number}}}"},
        {"guided_choice": [f"{number}-{each:06}" for each in range(60_000)]},
        {"guided_json": {"enum": [f"{number}-{each:06}" for each in range(60_000)]}},
        {"ebnf": f'root ::= "{number}" root'},
        {"guided_json": {"type": "object", "properties": {f"p{number}-{each}": {} for each in range(2_000)}}},
        {"guided_json": {"type": "array", "minItems": 10**9 + number, "items": {"type": "integer"}}},
    ]
    return kinds[number % len(kinds)]


@contextmanager
def posted(url: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """The response to a completion request, read within the block."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response


def gaps(url: str, tokens: int) -> list[float]:
    """Milliseconds between the chunks of one stream."""
    found, last = [], 0.0
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    with posted(url, body) as response:
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    found.append((now - last) * 1e3)
                last = now
    return found


class Bombers:
    """Clients that send bombs until they are stopped."""

    def __init__(self, url: str) -> None:
        self.statuses: list[int] = []
        self._url = url
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _send(self, number: int) -> None:
        while not self._stopped.is_set():
            with posted(self._url, {"prompt": PROMPT, "max_tokens": 8, **bomb(number)}) as response:
                response.read()
                self.statuses.append(response.status)
            number += CLIENTS


def summary(found: list[float]) -> dict[str, float]:
    ordered = sorted(found)
    return {
        "tokens": len(found),
        "median_ms": round(statistics.median(ordered), 3),
        "p99_ms": round(ordered[len(ordered) * 99 // 100], 3),
        "max_ms": round(ordered[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    alone: list[float] = []
    among: list[float] = []
    statuses: list[int] = []
    with serving(["--device", options.device]) as server:
        gaps(server.url, 100)
        for _ in range(options.rounds):
            alone += gaps(server.url, options.tokens)
            bombers = Bombers(server.url)
            among += gaps(server.url, options.tokens)
            bombers.stop()
            statuses += bombers.statuses
    report = {
        "device": options.device,
        "alone": summary(alone),
        "among_bombs": summary(among),
        "p99_ratio": round(summary(among)["p99_ms"] / summary(alone)["p99_ms"], 3),
        "bombs": {str(status): statuses.count(status) for status in sorted(set(statuses))},
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
