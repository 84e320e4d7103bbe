"""Random clients against a small server for a while: `python -m benchmarks.soak --seconds 1200 --output soak.json`.

A first part at capacity (as many streams as the server takes) gives the time to first token to compare with. Then
three times as many clients come: some leave, some read slowly, some send nonsense, some give little time. What was
admitted must not have waited much longer than at capacity, nothing may be a 500, memory must stay flat and every block
come back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks.server import Server, serving

CAPACITY = 8  # requests that the server takes
CACHE = 64 << 20  # bytes, small enough for every page of it to have been used soon
FLOOD = 3  # times as many clients
SHARE = 0.2  # of the time is spent at capacity
KINDS = {"whole": 40, "stream": 30, "leaves": 10, "slow": 5, "nonsense": 10, "hurried": 5}  # clients in a hundred
SAMPLE = 2.0  # seconds between looks at the memory
SETTLE = 120.0  # seconds after which memory has to be flat; a tenth of a run that is shorter than 20 minutes
LIMIT = 120.0  # seconds for one request
GROWTH = 1.05  # of memory after it has settled, and 8 MiB
WORDS = ("list", "seven", "ships", "add", "128", "story", "about", "the", "sea", "and", "457")


class Outcome(msgspec.Struct, frozen=True):
    """What became of one request; seconds from its sending."""

    kind: str
    status: int  # 0: nothing came
    first: float = 0.0  # until the first token of a stream


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a soak showed. Times in seconds, memory in MiB."""

    seconds: float
    requests: int
    statuses: dict[int, int]
    kinds: dict[str, int]
    p99_at_capacity: float
    p99_in_flood: float
    memory: dict[str, tuple[float, float]]  # of each process: once settled, at the end
    blocks_back: bool  # nothing runs, and every block is free or idle
    faults: int  # lines about wrong block accounts

    def against(self) -> list[str]:
        """What it shows that may not be."""
        found = [f"{count} answers of {status}" for status, count in self.statuses.items() if status == 500]
        if self.p99_in_flood > 2 * self.p99_at_capacity:
            found.append(f"first tokens took {self.p99_in_flood:.3f} s, {self.p99_at_capacity:.3f} s at capacity")
        found += [
            f"{name} grew from {settled:.0f} to {end:.0f} MiB"
            for name, (settled, end) in self.memory.items()
            if end > settled * GROWTH + 8
        ]
        if not self.blocks_back:
            found.append("blocks are missing")
        if self.faults:
            found.append(f"{self.faults} faults in the accounts of blocks")
        return found


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, nearest rank; 0 of nothing."""
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)] if values else 0.0


def body_of(kind: str, dice: random.Random) -> bytes:
    """A request of this kind; nonsense is one with some bytes changed or lost."""
    fields: dict[str, Any] = {"prompt": " ".join(dice.choices(WORDS, k=dice.randint(3, 60))), "ignore_eos": True}
    fields |= {"max_tokens": dice.randint(4, 48), "stream": kind != "whole", "temperature": dice.choice([0, 0.7])}
    if kind == "hurried":
        fields["timeout"] = 0.05
    body = bytearray(json.dumps(fields).encode())
    if kind == "nonsense":
        for _ in range(dice.randint(1, 8)):
            body[dice.randrange(len(body))] = dice.randrange(256)
        del body[dice.randint(len(body) // 2, len(body)) :]
    return bytes(body)


async def ask(address: tuple[str, int], kind: str, dice: random.Random) -> Outcome:
    """One request on a connection of its own, as a client of this kind behaves."""
    body = body_of(kind, dice)
    reader, writer = await asyncio.open_connection(*address)
    head = "POST /v1/completions HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Type: application/json\r\n"
    sent = time.monotonic()
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, first = 0, 0.0
        while data := await asyncio.wait_for(reader.read(256 if kind == "slow" else 65536), LIMIT):
            if not status:
                status = int(data[9:12])
            if not first and b"data: " in data:
                first = time.monotonic() - sent
            if kind == "leaves" and dice.random() < 0.3:
                break
            if kind == "slow":
                await asyncio.sleep(0.05)
        return Outcome(kind, status, first)
    except ConnectionError:
        return Outcome(kind, 0)
    finally:
        writer.close()


async def clients(
    address: tuple[str, int], count: int, seconds: float, kinds: dict[str, int], seed: int
) -> list[Outcome]:
    """So many clients, one request after the other, for so long; who is refused pauses a little."""
    outcomes: list[Outcome] = []
    end = time.monotonic() + seconds

    async def one(number: int) -> None:
        dice = random.Random(seed * 1000 + number)
        while time.monotonic() < end:
            (kind,) = dice.choices(list(kinds), list(kinds.values()))
            outcome = await ask(address, kind, dice)
            outcomes.append(outcome)
            if outcome.status == 429:
                await asyncio.sleep(dice.uniform(0.05, 0.5))

    await asyncio.gather(*(one(number) for number in range(count)))
    return outcomes


def memory_of(pid: int) -> dict[str, float]:
    """Resident MiB of a process and all below it, by role and pid."""
    found = {}
    for number in [pid, *below(pid)]:
        try:
            words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
            pages = int(Path(f"/proc/{number}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
        role = next(
            (word.decode() for word in words if word in (b"api", b"tokenizer", b"scheduler", b"executor")), "other"
        )
        found[f"{role}-{number}"] = pages * 4096 / 2**20
    return found


def below(pid: int) -> list[int]:
    """Pids of all living descendants."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [number for child in children for number in (child, *below(child))]


async def watched(pid: int, samples: list[tuple[float, dict[str, float]]]) -> None:
    while True:
        samples.append((time.monotonic(), memory_of(pid)))
        await asyncio.sleep(SAMPLE)


async def health(address: tuple[str, int]) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /health HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), LIMIT)
    writer.close()
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


async def soak(server: Server, pid: int, seconds: float, seed: int) -> Summary:
    """The whole run against a server that is ready."""
    parts = urlsplit(server.url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    samples: list[tuple[float, dict[str, float]]] = []
    watch = asyncio.create_task(watched(pid, samples))
    begun = time.monotonic()
    calm = await clients(address, CAPACITY, seconds * SHARE, {"stream": 1}, seed)
    flood = await clients(address, FLOOD * CAPACITY, seconds * (1 - SHARE), KINDS, seed + 1)
    lasted = time.monotonic() - begun
    watch.cancel()
    capacity: dict[str, int] = {}
    for _ in range(100):
        capacity = (await health(address))["capacity"]
        if not capacity["unfinished_requests"] and capacity["tokens"] == capacity["tokens_free"]:
            break
        await asyncio.sleep(0.1)
    settled = next(sample for at, sample in samples if at - begun >= min(SETTLE, seconds / 10))
    log = server.tail()
    return Summary(
        seconds=lasted,
        requests=len(calm) + len(flood),
        statuses=dict(Counter(outcome.status for outcome in calm + flood)),
        kinds=dict(Counter(outcome.kind for outcome in calm + flood)),
        p99_at_capacity=p99([outcome.first for outcome in calm if outcome.first]),
        p99_in_flood=p99([outcome.first for outcome in flood if outcome.first and outcome.kind == "stream"]),
        memory={name: (settled[name], samples[-1][1][name]) for name in settled if name in samples[-1][1]},
        blocks_back=not capacity["unfinished_requests"] and capacity["tokens"] == capacity["tokens_free"],
        faults=log.count("block_accounts_wrong"),
    )


def run(seconds: float, seed: int, arguments: Sequence[str] = ()) -> Summary:
    """Start a server, soak it, end it."""
    size = ("--max-num-seqs", str(CAPACITY), "--max-queued-requests", str(CAPACITY), "--kv-cache-memory", str(CACHE))
    one_each = ("--api-processes", "1", "--tokenizer-processes", "1")
    with serving([*size, *one_each, *arguments]) as server:
        return asyncio.run(soak(server, server.pid, seconds, seed))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options, rest = parser.parse_known_args(words)
    summary = run(options.seconds, options.seed, rest)
    text = msgspec.json.format(msgspec.json.encode(summary)).decode()
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    for fault in summary.against():
        print("against:", fault)
    return 1 if summary.against() else 0


if __name__ == "__main__":
    sys.exit(main())
