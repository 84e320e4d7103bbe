"""Several models behind one endpoint: `python -m benchmarks.several_models`, two 8B shapes on one GPU, dummy weights.

Two servers, one after the other. In the first the models do not fit together: requests in turns, each for the other
model than the one before it; then streams for both at once, whose models leave when their turns are over; then all
asleep. In the second each model has less than half of the GPU, and nothing switches. Every request must end with all
its tokens.

Dummy weights are made on the device: what reading files takes is not in these figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import subprocess
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
from benchmarks.shapes import SHAPES, make_folder

RESULTS = report.ROOT / "benchmarks" / "results" / "h200" / "several_models.json"
NAMES = ("one", "other")
TOKENS = 128  # of a stream among many
LIMIT = 600.0  # seconds for one request
PROMPT = "Tell me about the water in the old house by the river. "
SECONDS = re.compile(r" seconds=([0-9.e-]+)")


class Turns(msgspec.Struct, frozen=True):
    """Requests one after the other. Seconds to the first token."""

    loaded: list[float]  # of a model that is loaded
    switched: list[float]  # of one that is not
    left: list[float]  # that a model took to give its memory back
    load: list[float]  # that a model took to be loaded


class Mixed(msgspec.Struct, frozen=True, kw_only=True):
    """Streams for both models at once."""

    seconds: float
    clients: int  # of each model
    turn: float  # --model-turn
    requests: dict[str, int]
    lost: dict[str, int]  # by what went wrong
    tokens_per_second: float
    longest: float  # seconds of a request
    switches: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in MiB of the GPU, as its driver says; 0 on a CPU."""

    chip: str
    shape: str
    start_seconds: float
    turns: Turns
    mixed: Mixed
    memory_loaded: int
    memory_asleep: int
    wake_seconds: float  # of the operator's POST /wake_up
    together: dict[str, Any]


def memory() -> int:
    """MiB in use."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(told.split()[0])


class Clients:
    """Requests to one server, and what was lost of them."""

    def __init__(self, server: Server) -> None:
        self.lost: dict[str, int] = {}
        self.tokens = 0
        self.longest = 0.0
        self._http = httpx.AsyncClient(base_url=server.url, timeout=LIMIT, limits=httpx.Limits(max_connections=None))

    async def ask(self, model: str, tokens: int, number: int = 0) -> float:
        """Seconds to the first token of a stream, which is read to its end."""
        body = {"model": model, "prompt": f"{number}. {PROMPT}", "max_tokens": tokens, "ignore_eos": True,
                "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        began, first, found = time.monotonic(), 0.0, 0
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    return self._lose(f"{answer.status_code} {answer.text[:200]}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        first = first or time.monotonic() - began
                        data = json.loads(line[6:])
                        if "error" in data:
                            return self._lose(str(data["error"]))
                        found = (data.get("usage") or {}).get("completion_tokens", found)
        except httpx.HTTPError as error:
            return self._lose(repr(error))
        self.tokens += found
        self.longest = max(self.longest, time.monotonic() - began)
        return first if found == tokens else self._lose(f"{found} of {tokens} tokens")

    async def close(self) -> None:
        await self._http.aclose()

    def _lose(self, why: str) -> float:
        self.lost[why] = self.lost.get(why, 0) + 1
        print(f"  LOST {why}", flush=True)
        return float("nan")


def logged_seconds(server: Server, event: str) -> list[float]:
    """`seconds` of every line of an event."""
    found = [SECONDS.search(line) for line in server.lines(f" {event} ")]
    return [round(float(each[1]), 3) for each in found if each]


async def in_turns(server: Server, clients: Clients, rounds: int) -> Turns:
    """A model is asked twice: when it is not loaded, and when it is."""
    await clients.ask(NAMES[0], 8)
    left, load = (len(logged_seconds(server, event)) for event in ("model_left", "model_loaded"))
    loaded, switched = [], []
    for number in range(rounds):
        for name in reversed(NAMES):
            switched.append(await clients.ask(name, 8, number))
            loaded.append(await clients.ask(name, 8, number))
            print(f"  {name}: first token after {switched[-1]:.2f} s, loaded {loaded[-1]:.3f} s", flush=True)
    return Turns(loaded, switched, logged_seconds(server, "model_left")[left:],
                 logged_seconds(server, "model_loaded")[load:])  # fmt: skip


async def at_once(server: Server, clients: Clients, count: int, seconds: float, turn: float) -> Mixed:
    """So many clients for each model, each with one stream after the other for `seconds`, then to its end."""
    began, switches = time.monotonic(), server.logged(" model_loaded ")
    done = dict.fromkeys(NAMES, 0)
    clients.tokens, clients.longest = 0, 0.0

    async def stay(name: str, number: int) -> None:
        while time.monotonic() < began + seconds:
            await clients.ask(name, TOKENS, number)
            done[name] += 1

    await asyncio.gather(*(stay(name, number) for name in NAMES for number in range(count)))
    passed = time.monotonic() - began
    return Mixed(
        seconds=round(passed, 1), clients=count, turn=turn, requests=done, lost=dict(clients.lost),
        tokens_per_second=round(clients.tokens / passed, 1), longest=round(clients.longest, 2),
        switches=server.logged(" model_loaded ") - switches,
    )  # fmt: skip


def config(place: Path, folders: Sequence[Path], share: float) -> Path:
    file = place / f"share-{share}.toml"
    tables = [f'[models.{name}]\npath = "{folder}"\n' for name, folder in zip(NAMES, folders, strict=True)]
    file.write_text("\n".join([f"gpu_memory_utilization = {share}", *tables]))
    return file


def operate(place: Path, path: str) -> float:
    """Seconds that a POST at the operator's address took."""
    began = time.monotonic()
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(place / "admin")), timeout=LIMIT) as http:
        http.post(f"http://admin{path}").raise_for_status()
    return round(time.monotonic() - began, 3)


def models(server: Server) -> dict[str, str]:
    with urllib.request.urlopen(server.url + "/v1/models", timeout=30) as answer:
        return {each["id"]: each["state"] for each in json.load(answer)["data"]}


def device(server: Server) -> str:
    """What the loaded model runs on."""
    with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:
        return driver_name(str((json.load(answer)["engine"] or {}).get("device", "")))


async def apart(server: Server, options: argparse.Namespace) -> tuple[Turns, Mixed]:
    clients = Clients(server)
    turns = await in_turns(server, clients, options.rounds)
    mixed = await at_once(server, clients, options.clients, options.seconds, options.turn)
    await clients.close()
    print(f"  mixed: {mixed}", flush=True)
    return turns, mixed


async def together(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """The same load where both fit."""
    clients = Clients(server)
    mixed = await at_once(server, clients, options.clients, min(options.seconds, 20.0), options.turn)
    await clients.close()
    print(f"  together: {mixed}", flush=True)
    return {"states": models(server), "memory": memory(), "mixed": mixed}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.several_models", description=__doc__)
    found.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    found.add_argument("--rounds", type=int, default=4, help="switches to each model, in turns")
    found.add_argument("--clients", type=int, default=32, help="of each model, of requests that are mixed")
    found.add_argument("--seconds", type=float, default=90.0, help="of requests that are mixed")
    found.add_argument("--turn", type=float, default=10.0, help="--model-turn")
    found.add_argument("--server-args", default="", help="further arguments of penstock serve, in one word")
    found.add_argument("--smoke", action="store_true", help="the embedded model's shape on a CPU")
    found.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the figures")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    shape = SHAPES["smoke" if options.smoke else options.shape]
    words = [*(SMOKE if options.smoke else ("--load-format", "dummy", "--max-model-len", "16384")),
             *shlex.split(options.server_args)]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="penstock-models-") as name:
        place = Path(name)
        folders = []
        for model in NAMES:
            (place / model).mkdir()
            folders.append(make_folder(shape, place / model))
        admin = ("--admin-address", f"unix:{place}/admin", "--model-turn", str(options.turn))
        with serving(["--config", str(config(place, folders, 0.9)), *admin, *words]) as server:
            print(f"started in {server.seconds:.1f} s: {models(server)}", flush=True)
            chip, loaded = device(server), memory()
            turns, mixed = asyncio.run(apart(server, options))
            operate(place, "/sleep")
            asleep = memory()
            wake = operate(place, f"/wake_up?model={NAMES[0]}")
            print(f"  memory {loaded} MiB loaded, {asleep} asleep; woken in {wake:.2f} s", flush=True)
            start = server.seconds
            if mixed.lost:
                print(server.tail(), flush=True)
        with serving(["--config", str(config(place, folders, 0.45)), *words]) as server:
            both = asyncio.run(together(server, options))
    figures = Figures(
        chip=chip, shape=shape.name, start_seconds=round(start, 2), turns=turns, mixed=mixed, memory_loaded=loaded,
        memory_asleep=asleep, wake_seconds=wake, together=both,
    )  # fmt: skip
    report.write(options.output, "several_models", figures, arguments, options.commit)
    return int(bool(mixed.lost or both["mixed"].lost))


if __name__ == "__main__":
    sys.exit(main())
