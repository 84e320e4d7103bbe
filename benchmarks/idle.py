"""What a sleep takes and gives back: `python -m benchmarks.idle`, an 8B shape on one GPU.

Four servers, one after the other: with random weights and with files of them, which are in the page cache, each without
and with --keep-weights. Executors are put to sleep, rest until they have imported what they need, and a request wakes
them. The phases of each wake are those that the executor logs; what is left to the first token is the way there and the
first step. The first sleep with --keep-weights copies the weights, later ones find them copied; the memory for the copy
is reserved while a server is up, so each has been for some seconds before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks import report
from benchmarks.h200 import SMOKE, driver_name
from benchmarks.server import Server, serving
from benchmarks.several_models import memory, operate
from benchmarks.shapes import SHAPES, make_folder
from benchmarks.weight_updates import write_weights

RESULTS = report.ROOT / "benchmarks" / "results" / "h200" / "idle.json"
LIMIT = 300.0  # seconds for one request
TOKENS = 16
PHASE = re.compile(r"([^,\"=]+?) ([0-9.]+) s(?=[,\"])")


class Wake(msgspec.Struct, frozen=True, kw_only=True):
    """A sleep and the request behind it. Times in seconds."""

    sleep: float  # until the GPU's memory was back
    first_token: float
    load: float  # of that, until executors were ready
    phases: dict[str, float]  # of the load
    same: bool  # the answer is that of before the sleep


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One server. Memory of the GPU in MiB, as its driver says; 0 on a CPU."""

    weights: str  # random or files
    keep: bool
    start: float  # seconds
    memory_loaded: int
    memory_asleep: int
    kept_bytes: int  # of the host's memory
    wakes: list[Wake]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    chip: str
    shape: str
    rest: float  # seconds that executors slept
    cases: list[Case]


def ask(server: Server) -> tuple[float, list[int]]:
    """Seconds to the first token of a stream, and all of its tokens."""
    body = {"prompt": "Tell me about the water.", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0,
            "stream": True, "return_token_ids": True}  # fmt: skip
    began, first, ids = time.monotonic(), 0.0, []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and (found := json.loads(line[6:])["choices"][0].get("token_ids")):
                first = first or time.monotonic() - began
                ids += found
    return first, ids


def engine(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:
        return dict(json.load(answer)["engine"] or {})


def phases_of(line: str) -> dict[str, float]:
    """Of an executor's line `ready`."""
    return {name.strip(): float(seconds) for name, seconds in PHASE.findall(line.partition("stages=")[2])}


def wake(server: Server, place: Path, before: list[int], rest: float) -> tuple[Wake, int, int]:
    """The wake, the GPU's memory, and the bytes that were kept."""
    sleep = operate(place, "/sleep")
    time.sleep(rest)
    free, kept = memory(), int(engine(server).get("kept_weight_bytes", 0))
    first, ids = ask(server)
    line = server.lines(" executor-0 ready ")[-1]
    if phases_of(line).get("importing", 0.0) > 1.0:  # not while it slept: its process is a new one
        print(server.tail(), flush=True)
    seconds = re.search(r" seconds=([0-9.e-]+)", line)
    found = Wake(
        sleep=sleep, first_token=round(first, 3), load=round(float(seconds[1]), 3) if seconds else 0.0,
        phases=phases_of(line), same=ids == before,
    )  # fmt: skip
    return found, free, kept


def write_files(folder: Path, kind: str) -> None:
    """In a process of its own, since torch would keep memory of the GPU."""
    process = multiprocessing.get_context("spawn").Process(target=write_weights, args=(folder, kind))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"weights were not written: exit code {process.exitcode}")


def measure(words: Sequence[str], place: Path, weights: str, options: argparse.Namespace, *, keep: bool) -> Case:
    own = [*words, *(("--keep-weights",) if keep else ()), "--admin-address", f"unix:{place}/admin"]
    with serving(own) as server:
        ask(server)
        _, before = ask(server)
        loaded = memory()
        time.sleep(options.up)
        found = [wake(server, place, before, options.rest) for _ in range(options.rounds)]
        case = Case(
            weights=weights, keep=keep, start=round(server.seconds, 2), memory_loaded=loaded,
            memory_asleep=max(free for _, free, _ in found), kept_bytes=found[-1][2],
            wakes=[one for one, _, _ in found],
        )  # fmt: skip
        chip = driver_name(str(engine(server).get("device", "")))
    print(f"{weights}{', kept' if keep else ''}: started in {case.start:.1f} s on {chip}, {loaded} MiB loaded and "
          f"{case.memory_asleep} asleep, {case.kept_bytes / 1e9:.2f} GB kept", flush=True)  # fmt: skip
    for one in case.wakes:
        told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in one.phases.items() if seconds >= 0.01)
        print(f"  asleep in {one.sleep:.2f} s; first token {one.first_token:.2f} s, load {one.load:.2f} s: {told}"
              + ("" if one.same else "; OTHER TOKENS"), flush=True)  # fmt: skip
    options.chip = chip
    return case


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__)
    found.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    found.add_argument("--rounds", type=int, default=3, help="sleeps of each server")
    found.add_argument("--rest", type=float, default=6.0, help="seconds between a sleep and the request")
    found.add_argument("--up", type=float, default=10.0, help="seconds before the first sleep")
    found.add_argument("--server-args", default="", help="further arguments of penstock serve, in one word")
    found.add_argument("--smoke", action="store_true", help="the embedded model's shape on a CPU")
    found.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the figures")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    shape = SHAPES["smoke" if options.smoke else options.shape]
    words = [*(SMOKE[2:] if options.smoke else ("--max-model-len", "16384")), *shlex.split(options.server_args)]
    with tempfile.TemporaryDirectory(prefix="penstock-idle-") as name:
        place = Path(name)
        folder = make_folder(shape, place)
        given = [str(folder), "--load-format", "dummy", *words]
        cases: list[Case] = []
        for weights, keep in (("random", False), ("random", True), ("files", False), ("files", True)):
            if weights == "files" and not keep:
                write_files(folder, "cpu" if options.smoke else "cuda")
                given = [str(folder), "--allow-wrong-output", *words]
            cases.append(measure(given, place, weights, options, keep=keep))
            figures = Figures(chip=options.chip, shape=shape.name, rest=options.rest, cases=cases)
            report.write(options.output, "idle", figures, arguments, options.commit)  # after each: time may run out
    return int(not all(one.same for case in cases for one in case.wakes))


if __name__ == "__main__":
    sys.exit(main())
