"""How much later the first token of a first schema comes than a plain one's: `python -m benchmarks.schema_first_token`.

Each round starts a server with the embedded model. It asks for a plain chat and for one with a schema, in turns which
of them is the server's first request; then for another schema; then for a grammar whose compile worker is ended by its
time limit, and right after that for a third schema. Times are from the request to its first text, over HTTP. Of the
rounds the least counts, since others share the machine. `--out` records a result."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import report
from benchmarks.server import serving

COMPILE_LIMIT = 1  # seconds of CPU
ENDLESS = "root ::= " + " ".join([f'"x{number}"' for number in range(90_000)])  # compiles for longer
ASK = [{"role": "user", "content": "Extract the person as JSON: Tom is 5 years old."}]
KINDS = ("plain", "schema", "second schema", "schema after a worker was ended")


def schema(name: str) -> dict[str, Any]:
    """A schema that no other of this name is."""
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}, name: {"type": "string", "format": "date"}}
    return {"type": "object", "properties": properties, "required": ["name", "age"], "additionalProperties": False}


def body(format_of: dict[str, Any] | None) -> bytes:
    words: dict[str, Any] = {"messages": ASK, "max_tokens": 8, "temperature": 0, "stream": True}
    if format_of is not None:
        words["response_format"] = {"type": "json_schema", "json_schema": {"name": "person", "schema": format_of}}
    return json.dumps({"model": "penstock-demo", **words}).encode()


def answer(url: str, request: bytes) -> Iterator[bytes]:
    """Lines of a chat's answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", request, {"Content-Type": "application/json"})
        yield from connection.getresponse()
    finally:
        connection.close()


def first_token(url: str, request: bytes) -> float:
    """Milliseconds until the first text. Raises ValueError where none comes."""
    began, found, last = time.perf_counter(), 0.0, b""
    for line in answer(url, request):
        last = line if line.strip() else last
        if not found and line.startswith(b"data: {"):
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            if choices and choices[0]["delta"].get("content"):
                found = time.perf_counter() - began
    if not found:
        raise ValueError(f"no text came: {last[:300]!r}")
    return found * 1000


def measured(number: int) -> dict[str, float]:
    """The times of one fresh server, by kind."""
    found: dict[str, float] = {}
    with serving(["--grammar-compile-timeout", str(COMPILE_LIMIT)]) as server:
        first = ("plain", "schema")[:: 1 if number % 2 else -1]
        for kind in (*first, *KINDS[2:]):
            if kind == KINDS[-1]:
                ended = json.loads(body(None)) | {"structured_outputs": {"grammar": ENDLESS}}
                if b"takes more than" not in b"".join(answer(server.url, json.dumps(ended).encode())):
                    raise ValueError("the compile worker was not ended by its time limit")
            found[kind] = first_token(server.url, body(None if kind == "plain" else schema(f"{kind} {number}")))
    return found


def result(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """The least time of each kind, first requests of fresh servers apart, and how much later than plain it is."""
    least: dict[str, float] = {}
    for found in rounds:
        for place, (kind, milliseconds) in enumerate(found.items()):
            name = kind if place else f"{kind}, first on a fresh server"
            least[name] = min(milliseconds, least.get(name, milliseconds))
    plain = {name: value for name, value in least.items() if name.startswith("plain")}
    later = {
        name: value - plain[name.replace("schema", "plain")] if "fresh" in name else value - plain["plain"]
        for name, value in least.items()
        if name not in plain
    }
    return {
        "rounds": len(rounds),
        "load_average": round(os.getloadavg()[0], 1),
        "first_token_ms": {name: round(value, 1) for name, value in sorted(least.items())},
        "later_than_plain_ms": {name: round(value, 1) for name, value in sorted(later.items())},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=6, help="fresh servers, at least 2")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    found = result([measured(number) for number in range(max(2, chosen.rounds))])
    print(json.dumps(found, indent=1))
    if chosen.out:
        report.write(chosen.out, "schema_first_token", found)


if __name__ == "__main__":
    main()
