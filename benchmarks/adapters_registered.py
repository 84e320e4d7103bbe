"""What many registered LoRA adapters cost a start: `python -m benchmarks.adapters_registered`, with the embedded model.

Each round starts four servers: without LoRA (`off`), with it and no adapter (`on`), with all adapters as --lora-modules
(`modules`), and with their folder as --lora-dir (`directory`). Each tells the seconds until it was ready, those of CPU
that all its processes took, and their memory. Those with adapters then have some of them asked for twice, one request
after the other: the first waits for an adapter that was never seen. Times are from the request to its first text, over
HTTP. Of the rounds the least start counts, since others share the machine; first tokens are told by median and worst of
all. `--out` records a result."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.adapters import write_adapters
from benchmarks.cpu_seconds import memory
from benchmarks.schema_first_token import ASK, first_token
from benchmarks.server import Server, serving
from benchmarks.shapes import SMOKE

RANK = 16
ASKED = 20  # adapters, of those that have first tokens measured
FOLDER = "adapters"
Times = Mapping[str, list[float]]


def ways(modules: Sequence[tuple[str, Path]], place: Path) -> dict[str, list[str]]:
    """Arguments of each server."""
    given = [f"--lora-modules={name}={path}" for name, path in modules]
    on = ["--enable-lora", "--max-lora-rank", str(RANK)]
    return {"off": [], "on": on, "modules": [*on, *given], "directory": [*on, "--lora-dir", str(place)]}


def body(model: str) -> bytes:
    words = {"model": model, "messages": ASK, "max_tokens": 4, "temperature": 0, "stream": True}
    return json.dumps(words).encode()


def first_tokens(server: Server, names: Sequence[str]) -> dict[str, list[float]]:
    """Milliseconds of each adapter's first request and its second; and of the model's own beside them."""
    model = [first_token(server.url, body("penstock-demo")) for _ in names]
    pairs = [[first_token(server.url, body(name)) for _ in range(2)] for name in names]
    return {"model": model[1:], "never seen": [one for one, _ in pairs], "seen": [other for _, other in pairs]}


def summary(times: Times) -> dict[str, dict[str, float]]:
    return {
        kind: {"median": round(statistics.median(found), 1), "worst": round(max(found), 1)}
        for kind, found in times.items()
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--adapters", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    mebibytes: dict[str, dict[str, float]] = {}
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        (Path(place) / FOLDER).mkdir()
        found = write_adapters(SMOKE, Path(place) / FOLDER, RANK, chosen.adapters)
        for number in range(chosen.rounds):
            names = [name for name, _ in found][number * ASKED : (number + 1) * ASKED]
            for way, arguments in ways(found, Path(place) / FOLDER).items():
                with serving(["--device", "cpu", *arguments]) as server:
                    seconds[way].append(server.seconds)
                    cpu[way].append(sum(server.cpu_seconds().values()))
                    mebibytes[way] = {role: round(size / (1 << 20), 1) for role, size in memory(server.pid).items()}
                    if way in ("modules", "directory"):
                        for kind, milliseconds in first_tokens(server, names).items():
                            times[way][kind] += milliseconds
    result: dict[str, Any] = {
        "adapters": chosen.adapters,
        "rank": RANK,
        "rounds": chosen.rounds,
        "load_average": round(os.getloadavg()[0], 1),
        "start_seconds": {way: round(min(each), 2) for way, each in seconds.items()},
        "start_cpu_seconds": {way: round(min(each), 2) for way, each in cpu.items()},
        "memory_mib": mebibytes,
        "first_token_ms": {way: summary(each) for way, each in times.items()},
    }
    print(json.dumps(result, indent=1))
    if chosen.out:
        report.write(chosen.out, "adapters_registered", result)


if __name__ == "__main__":
    main()
