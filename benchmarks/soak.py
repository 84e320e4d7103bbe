"""Random clients against a small server for 20 minutes: `python -m benchmarks.soak` prints a table of what was judged
and writes `benchmarks/results/soak_cpu.json`; it needs a machine that does nothing else.

At the beginning and at the end there are as many streams as the server takes, which gives the time to first token to
compare with. Between them three times as many clients come: some leave, some read slowly, some send nonsense, some want
structure, some give little time. What was admitted must not have waited much longer than at capacity, nothing may be a
500 or break off, memory must stay flat, no process may die and every block come back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks import report
from benchmarks.server import Server, serving

CAPACITY = 8  # requests that the server takes
CACHE = 64 << 20  # bytes, small enough for every page of it to have been used soon
FLOOD = 3  # times as many clients
SHARES = (0.08, 0.8, 0.12)  # of the time: at capacity, flooded, at capacity again
KINDS = {  # clients in a hundred
    "whole": 32, "stream": 30, "leaves": 10, "slow": 5, "nonsense": 10, "hurried": 5, "structured": 8
}  # fmt: skip
SINGLE = ("whole", "structured")  # answers in one piece
ALLOWED = frozenset((200, 400, 429, 504))  # what a client may hear, nothing at all if it left
TAIL = 512  # bytes of an answer's end that are looked at
SAMPLE = 2.0  # seconds between looks at the memory
SETTLE = 120.0  # seconds after which memory has to be flat; a tenth of a run that is shorter than 20 minutes
RATIO = 2.0  # of the times to first token
LIMIT = 120.0  # seconds for one request
GROWTH, SLACK = 1.05, 8.0  # of memory after it has settled, and MiB
RESULTS = Path(__file__).resolve().parent / "results" / "soak_cpu.json"
WORDS = ("list", "seven", "ships", "add", "128", "story", "about", "the", "sea", "and", "457")


class Outcome(msgspec.Struct, frozen=True):
    """What became of one request; seconds from its sending."""

    kind: str
    status: int  # 0: nothing came
    first: float = 0.0  # until the first token of a stream
    whole: bool = True  # what began with 200 had an end, as far as the client stayed for it


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a soak showed. Times in seconds, memory in MiB."""

    seconds: float
    cores: int
    requests: int
    statuses: dict[int, int]
    kinds: dict[str, int]
    broken: int  # answers that began well and broke off
    p99_at_capacity: float
    p99_in_flood: float
    memory: dict[str, tuple[float, float]]  # of each process: once settled, at the end
    blocks_back: bool  # nothing runs, and every block is free or idle
    faults: int  # lines about wrong block accounts: free + idle + held = total does not hold
    deaths: int  # of processes


class Judgment(msgspec.Struct, frozen=True):
    """One thing that a soak is to show."""

    what: str
    found: str
    limit: str
    holds: bool


def judged(found: Summary) -> list[Judgment]:
    """Everything that a soak is to show, held against what it showed."""
    ratio = found.p99_in_flood / found.p99_at_capacity if found.p99_at_capacity else float("inf")
    strange = {status: count for status, count in found.statuses.items() if status not in ALLOWED}
    grown = max((end - settled * GROWTH, name) for name, (settled, end) in found.memory.items())
    name = grown[1]
    settled, end = found.memory[name]
    times = f"{found.p99_in_flood:.3f} s, {found.p99_at_capacity:.3f} s at capacity: {ratio:.2f} times"
    return [
        Judgment("p99 time to first token, admitted in the flood", times, f"{RATIO:g} times", ratio <= RATIO),
        Judgment("answers of 500", str(found.statuses.get(500, 0)), "0", not found.statuses.get(500)),
        Judgment("answers that nobody should get", str(strange or 0), "0", not strange),
        Judgment("answers that broke off", str(found.broken), "0", found.broken == 0),
        Judgment(
            "memory of the process that grew most", f"{name}: {settled:.0f} to {end:.0f} MiB",
            f"{settled * GROWTH + SLACK:.0f} MiB", end <= settled * GROWTH + SLACK,
        ),
        Judgment("faults in the accounts of blocks", str(found.faults), "0", found.faults == 0),
        Judgment("blocks back at the end", "all" if found.blocks_back else "not all", "all", found.blocks_back),
        Judgment("processes that died", str(found.deaths), "0", found.deaths == 0),
    ]  # fmt: skip


def table(judgments: Sequence[Judgment]) -> str:
    """A line for each, as markdown."""
    rows = [f"| {each.what} | {each.found} | {each.limit} | {'yes' if each.holds else 'NO'} |" for each in judgments]
    return "\n".join(["| judged | found | limit | holds |", "|---|---|---|---|", *rows])


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, nearest rank; 0 of nothing."""
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)] if values else 0.0


def body_of(kind: str, dice: random.Random) -> bytes:
    """A request of this kind; nonsense is one with some bytes changed or lost."""
    fields: dict[str, Any] = {"prompt": " ".join(dice.choices(WORDS, k=dice.randint(3, 60))), "ignore_eos": True}
    fields |= {"max_tokens": dice.randint(4, 48), "stream": kind not in SINGLE, "temperature": dice.choice([0, 0.7])}
    if kind == "hurried":
        fields["timeout"] = 0.05
    if kind == "structured":
        fields |= {"guided_regex": f"[a-z]{{1,{dice.randint(2, 12)}}}", "ignore_eos": False}
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
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    sent = time.monotonic()
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, first, last, left = 0, 0.0, b"", False
        while data := await asyncio.wait_for(reader.read(256 if kind == "slow" else 65536), LIMIT):
            if not status:
                status = int(data[9:12])
            if not first and b"data: " in data:
                first = time.monotonic() - sent
            last = (last + data)[-TAIL:]
            if kind == "leaves" and dice.random() < 0.3:
                left = True
                break
            if kind == "slow":
                await asyncio.sleep(0.05)
        return Outcome(kind, status, first, left or status != 200 or ended(last, streamed=first > 0))
    except ConnectionError:
        return Outcome(kind, 0)
    finally:
        writer.close()


def ended(last: bytes, *, streamed: bool) -> bool:
    """Whether these are the last bytes of an answer: of a stream its last event, or the error that a hurried client's
    ends with; of a body its brace."""
    if not streamed:
        return last.rstrip().endswith(b"}")
    return b"data: [DONE]" in last or b'"deadline_exceeded"' in last


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
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
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
    first, middle, last = (seconds * share for share in SHARES)
    calm = await clients(address, CAPACITY, first, {"stream": 1}, seed)
    flood = await clients(address, FLOOD * CAPACITY, middle, KINDS, seed + 1)
    calm += await clients(address, CAPACITY, last, {"stream": 1}, seed + 2)
    lasted = time.monotonic() - begun
    watch.cancel()
    capacity: dict[str, int] = {}
    for _ in range(100):
        capacity = (await health(address))["capacity"]
        if not capacity["unfinished_requests"] and capacity["tokens"] == capacity["tokens_free"]:
            break
        await asyncio.sleep(0.1)
    settled = next(sample for at, sample in samples if at - begun >= min(SETTLE, seconds / 10))
    return Summary(
        seconds=lasted,
        cores=len(os.sched_getaffinity(0)),
        requests=len(calm) + len(flood),
        statuses=dict(Counter(outcome.status for outcome in calm + flood)),
        kinds=dict(Counter(outcome.kind for outcome in calm + flood)),
        broken=sum(not outcome.whole for outcome in calm + flood),
        p99_at_capacity=p99([outcome.first for outcome in calm if outcome.first]),
        p99_in_flood=p99([outcome.first for outcome in flood if outcome.first and outcome.kind == "stream"]),
        memory={name: (settled[name], samples[-1][1][name]) for name in settled if name in samples[-1][1]},
        blocks_back=not capacity["unfinished_requests"] and capacity["tokens"] == capacity["tokens_free"],
        faults=server.logged("block_accounts_wrong"),
        deaths=server.logged("process_died"),
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
    parser.add_argument("--output", type=Path, default=RESULTS)
    options, rest = parser.parse_known_args(words)
    summary = run(options.seconds, options.seed, rest)
    judgments = judged(summary)
    report.write(options.output, "soak", {"summary": summary, "judged": judgments}, words)
    print(table(judgments))
    return 0 if all(each.holds for each in judgments) else 1


if __name__ == "__main__":
    sys.exit(main())
