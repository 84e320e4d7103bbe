"""Many streams at once, each kept token by token, so that a disturbed run can be held against an undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT = 240.0  # seconds for all of them


@dataclass
class Answer:
    """What one client got: per choice its text, its tokens and its end; and when, for pauses."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: int = 0  # "[DONE]"s
    longest_pause: float = 0.0  # seconds between two events

    @property
    def said(self) -> tuple[dict[int, str], dict[int, list[int]], dict[int, list[str]], dict[str, Any] | None, int]:
        """Everything that must not depend on what died."""
        return self.texts, self.tokens, self.ends, self.error, self.done

    def take(self, event: dict[str, Any]) -> int:
        """One event of the stream; how many tokens it brought."""
        if "error" in event:
            self.error = event["error"]
            return 0
        brought = 0
        for choice in event["choices"]:
            index, ids = choice["index"], choice.get("token_ids") or []
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.tokens.setdefault(index, []).extend(ids)
            if choice["finish_reason"]:
                self.ends.setdefault(index, []).append(choice["finish_reason"])
            brought += len(ids)
        return brought


class Progress:
    """Tokens that all clients together have got. Somebody may wait for a number of them."""

    def __init__(self) -> None:
        self.tokens = 0
        self.running = 0
        self._changed = asyncio.Event()

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self._changed.set()

    async def reach(self, tokens: int) -> bool:
        """Whether so many came before the last stream ended."""
        while self.tokens < tokens and self.running:
            self._changed.clear()
            await self._changed.wait()
        return self.running > 0


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Requests of all kinds, each with its own words."""
    rng, asked = random.Random(7), []
    kinds: Sequence[dict[str, Any]] = (
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"temperature": 0, "stop": [" and then", "QQ"], "ignore_eos": False},
        {"temperature": 0, "n": 2},
        {"temperature": 0, "guided_regex": r"([a-z]+ ){5,40}\.", "ignore_eos": False},
        {"temperature": 0.8, "seed": 5},
    )
    for number in range(count):
        prompt = f"Once upon a time there were {rng.randrange(10, 99)} {rng.choice(('cats', 'ships', 'kings'))} who"
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "return_token_ids": True}
        asked.append({**body, **kinds[number % len(kinds) if number % 2 else 0]})
    return asked


async def stream(url: str, body: dict[str, Any], progress: Progress) -> Answer:
    """One request and its whole answer. HTTP as plain as it gets, so that nothing is retried or buffered here."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer, before = Answer(), 0.0
    try:
        with contextlib.suppress(ConnectionError):  # "[DONE]" is missing then
            writer.write(head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            await writer.drain()
            async for line in reader:
                if line.startswith((b'{"error"', b"data: {")):
                    now = time.monotonic()
                    answer.longest_pause = max(answer.longest_pause, now - before if before else 0.0)
                    before = now
                    progress.add(answer.take(json.loads(line.removeprefix(b"data: "))))
                    await asyncio.sleep(0)  # lines that are here already would keep who waits for progress waiting
                answer.done += line.startswith(b"data: [DONE]")
    finally:
        progress.running -= 1
        progress.add(0)
        writer.close()
    return answer


async def gathered(
    url: str, asked: Sequence[dict[str, Any]], marks: Sequence[int], disturb: Callable[[int], None] | None
) -> list[Answer]:
    progress = Progress()
    progress.running = len(asked)
    tasks = [asyncio.create_task(stream(url, body, progress)) for body in asked]
    for number, mark in enumerate(marks):
        assert disturb is not None
        assert await progress.reach(mark), f"only {progress.tokens} tokens came, {mark} were waited for"
        disturb(number)
    return await asyncio.gather(*tasks)


def answers(
    url: str,
    asked: Sequence[dict[str, Any]],
    marks: Sequence[int] = (),
    disturb: Callable[[int], None] | None = None,
) -> list[Answer]:
    """All answers. `disturb` is called with 0, 1, ... when the clients have got as many tokens as `marks` says."""
    return asyncio.run(asyncio.wait_for(gathered(url, asked, marks, disturb), LIMIT))


def marks(count: int, total: int, seed: int) -> list[int]:
    """So many random places in a run of `total` tokens, not in its last tenth and apart by a few tokens."""
    rng = random.Random(seed)
    return sorted(rng.sample(range(1, max(2, total * 9 // 10), max(1, total // (count * 8))), count))
