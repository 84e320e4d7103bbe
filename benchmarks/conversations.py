"""Conversations over HTTP: `python -m benchmarks.conversations --load chat --url http://localhost:8000`.

What share of repeated prompt tokens does a server find in its cache, and what is a hit worth? Each turn sends all that
was said before, as clients do. `chat`: 64 conversations of 8 turns behind one system prompt. `agent`: sessions behind a
long system prompt and tools, each of which forks halfway. Without `--url` a server is started: its options stand
behind `--`.

- Hit rate: cached prompt tokens of those that an earlier request began with, in its prompt or its answer. Token ids
  decide that, so the server has to know `return_token_ids` (Penstock and vLLM do).
- Hit against cold: after the load, some conversations are asked once more, one at a time; then the same under a
  `cache_salt` that is new. Medians of time to first token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.h200 import device
from benchmarks.server import serving
from penstock.protocol.errors import PenstockError
from penstock.services.bench.client import Chunk, Connection, Tally, Target, judge, target
from penstock.services.bench.serve import Summary, read_model_info, summarize
from penstock.services.bench.workload import WORDS, Record, Request

Message = dict[str, str]
TOOL_TOKENS = 200  # of one tool's description
FIRST = {"max_tokens": 1, "min_tokens": 1}  # one token is all that is awaited
SCALE = 100  # words by which the tokens of a word are found


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the conversations are like; lengths in tokens, about."""

    conversations: int
    turns: int
    system: int
    tools: int
    user: int  # each message
    answer: int
    forks: int  # branches that leave each conversation halfway
    open: int  # requests at once


LOADS = {
    "chat": Load(conversations=64, turns=8, system=2000, tools=0, user=200, answer=300, forks=0, open=64),
    "agent": Load(conversations=16, turns=8, system=2000, tools=8000, user=300, answer=200, forks=3, open=16),
}


class Asked(msgspec.Struct, frozen=True):
    """One request: what was measured, with the turn as index, its prompt, and what was answered."""

    record: Record
    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    text: str = ""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a load came to."""

    repeated_tokens: int  # of prompts: those that an earlier request had
    cached_tokens: int
    hit_rate: float
    hit_rate_by_turn: tuple[float, ...]  # 0 for a turn that repeats nothing
    hits: int  # requests that were asked alone and found at least half of their prompt
    hit_ttft_ms: float
    colds: int  # those that found nothing
    cold_ttft_ms: float
    summary: Summary  # of the load


class Listener(Connection):
    """One request's connection, which keeps what it hears."""

    def __init__(self) -> None:
        super().__init__(Tally())
        self.prompt: tuple[int, ...] = ()
        self.answer: list[int] = []
        self.text: list[str] = []

    def take_chunk(self, chunk: Chunk, now: float) -> None:
        super().take_chunk(chunk, now)
        self.prompt = chunk.prompt_token_ids or self.prompt
        for choice in chunk.choices:
            self.answer += choice.token_ids or ()
            self.text.append((choice.delta and choice.delta.content) or "")


class Talk:
    """Everything that is asked of one server."""

    def __init__(self, where: Target, load: Load, fields: Mapping[str, Any], seed: int, timeout: float) -> None:
        self.asked: list[Asked] = []
        self.told: dict[str, list[Message]] = {}  # each conversation that went well, by its name
        self._where, self._load, self._fields, self._seed, self._timeout = where, load, dict(fields), seed, timeout
        self._open = asyncio.Semaphore(load.open)
        self._per_word = 1.0  # tokens

    def words(self, name: str, tokens: float) -> str:
        """A text of about so many tokens, always the same under one name."""
        return " ".join(random.Random(f"{name} {self._seed}").choices(WORDS, k=max(1, round(tokens / self._per_word))))

    def user(self, name: str) -> Message:
        return {"role": "user", "content": self.words(name, self._load.user)}

    async def ask(self, messages: Sequence[Message], turn: int, **more: Any) -> Asked:
        """The answer to a chat, of the load's length. Its record tells of errors, and of what is missing."""
        body = {
            "messages": messages, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
            "max_tokens": self._load.answer, "min_tokens": self._load.answer, "return_token_ids": True,
            **self._fields, **more,
        }  # fmt: skip
        request = Request(turn, 0, 0.0, -1, -1, msgspec.json.encode(body))
        encoded = self._where.encode(request.body, "chat")
        async with self._open:
            loop, start = asyncio.get_running_loop(), time.monotonic()
            try:
                _, heard = await loop.create_connection(Listener, self._where.host, self._where.port)
            except OSError as error:
                end = time.monotonic()
                return Asked(Record(turn, 0, start, end=end, error="no connection", detail=str(error)))
            finished = heard.ask(request, encoded, start)
            timer = loop.call_later(self._timeout, heard.fail, "timeout")
            await finished
            timer.cancel()
            heard.close()
        record = heard.take()
        judge(record, request)
        if not record.error and not (heard.prompt and heard.answer):
            record.error = "no token ids"
        return Asked(record, heard.prompt, tuple(heard.answer), "".join(heard.text))

    async def calibrate(self) -> None:
        """Find how many tokens a word has. Raises ConnectionError when the server does not answer so."""
        sizes = []
        for count in (1, 1 + SCALE):
            text = " ".join(random.Random(f"scale {count}").choices(WORDS, k=count))
            found = await self.ask([{"role": "user", "content": text}], 0, **FIRST)
            if found.record.error:
                raise ConnectionError(f"{found.record.error}: {found.record.detail}")
            sizes.append(len(found.prompt))
        self._per_word = max(1, sizes[1] - sizes[0]) / SCALE

    async def hold(self) -> None:
        """Every conversation, with what forks from it."""
        load = self._load
        names = [f"tool_{number}" for number in range(-(-load.tools // TOOL_TOKENS))]
        tools = [{"name": name, "description": self.words(name, TOOL_TOKENS)} for name in names]
        if tools:
            self._fields["tools"] = [{"type": "function", "function": tool} for tool in tools]
        system = {"role": "system", "content": self.words("system", load.system)}
        async with asyncio.TaskGroup() as group:

            async def converse(name: str, messages: list[Message], first: int) -> None:
                for turn in range(first, load.turns):
                    messages = [*messages, self.user(f"{name} turn {turn}")]
                    found = await self.ask(messages, turn)
                    self.asked.append(found)
                    if found.record.error:
                        return
                    messages = [*messages, {"role": "assistant", "content": found.text}]
                    if not first and turn + 1 == load.turns // 2:
                        for fork in range(load.forks):
                            group.create_task(converse(f"{name} fork {fork}", messages, turn + 1))
                self.told[name] = messages

            for number in range(load.conversations):
                group.create_task(converse(f"{number:04}", [system], 0))

    async def pairs(self, count: int) -> list[tuple[Asked, Asked]]:
        """The next turn of some conversations as it is, and under a salt, one request at a time: their first token."""
        names = sorted(self.told)
        found = []
        for name in names[:: max(1, len(names) // max(1, count))][:count]:
            messages = [*self.told[name], self.user(f"{name} pair")]
            hit = await self.ask(messages, self._load.turns, **FIRST)
            salt = f"cold {self._seed} {name}"
            found.append((hit, await self.ask(messages, self._load.turns, cache_salt=salt, **FIRST)))
        return found


def repeated(asked: Sequence[Asked]) -> list[int]:
    """Of each request's prompt, how many tokens an earlier request began with: a prompt once it was sent, an answer
    once it has ended."""
    known: set[int] = set()
    ends: dict[int, int] = {}
    found = [0] * len(asked)
    times = [(one.record.start, at, True) for at, one in enumerate(asked)]
    for _, at, begins in sorted(times + [(one.record.end, at, False) for at, one in enumerate(asked)]):
        chain = ends.get(at, 0)
        for token in asked[at].prompt if begins else asked[at].answer:
            chain = hash((chain, token))
            found[at] += begins and chain in known
            known.add(chain)
        ends[at] = chain
    return found


def figures(asked: Sequence[Asked], pairs: Sequence[tuple[Asked, Asked]]) -> Figures:
    """What was found in the cache, and what that was worth. Failed requests count as failed alone."""
    good = [one for one in asked if not one.record.error]
    turns: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for one, again in zip(good, repeated(good), strict=True):
        before = turns[one.record.index]
        turns[one.record.index] = before[0] + one.record.cached_tokens, before[1] + again
    cached, again = (sum(column) for column in zip(*turns.values(), strict=True)) if turns else (0, 0)
    every = [one.record for pair in pairs for one in pair if not one.record.error]
    hits = [one.first - one.start for one in every if one.cached_tokens * 2 >= one.prompt_tokens]
    colds = [one.first - one.start for one in every if not one.cached_tokens]
    return Figures(
        repeated_tokens=again, cached_tokens=cached, hit_rate=round(cached / max(1, again), 4),
        hit_rate_by_turn=tuple(round(found / max(1, most), 4) for _, (found, most) in sorted(turns.items())),
        hits=len(hits), hit_ttft_ms=round(1000 * median(hits or [0.0]), 3),
        colds=len(colds), cold_ttft_ms=round(1000 * median(colds or [0.0]), 3),
        summary=summarize([one.record for one in asked]),
    )  # fmt: skip


def lines(found: Figures) -> str:
    summary, turns = found.summary, " ".join(f"{rate:.0%}" for rate in found.hit_rate_by_turn)
    told = [
        f"{summary.completed} requests, {summary.output_tokens_per_second:.1f} output tokens/s, "
        f"{summary.total_tokens_per_second:.0f} with prompts",
        f"{found.hit_rate:.1%} of {found.repeated_tokens} repeated prompt tokens were cached; by turn {turns}",
        f"first token of {found.hits} hits after {found.hit_ttft_ms:.1f} ms, of {found.colds} cold ones after "
        f"{found.cold_ttft_ms:.1f} ms",
    ]
    told += [f"{count} × {kind} {summary.error_examples.get(kind, '')}" for kind, count in summary.errors.items()]
    if found.cached_tokens > found.repeated_tokens:
        told.append("more was cached than these requests repeat: begin with an empty cache, or with another --seed")
    return "\n".join(told)


async def measure(talk: Talk, pairs: int) -> Figures:
    """Hold all conversations, then ask the pairs. Raises ConnectionError."""
    await talk.calibrate()
    await talk.hold()
    return figures(talk.asked, await talk.pairs(pairs))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.conversations", description=__doc__.partition("\n")[0])
    found.add_argument("--load", choices=tuple(LOADS), default="chat")
    for name in Load.__struct_fields__:
        found.add_argument(f"--{name}", type=int, metavar="N",
                           help=" ".join(f"[{load}: {getattr(LOADS[load], name)}]" for load in LOADS))  # fmt: skip
    found.add_argument("--pairs", type=int, default=8, metavar="N", help="conversations to compare hit and cold by")
    found.add_argument("--seed", type=int, default=0, help="of the texts")
    found.add_argument("--url", default="", help="of a running server; plain http")
    found.add_argument("--model", default="", help="empty: the first that the server lists")
    found.add_argument("--api-key", default="", help="sent as bearer token")
    found.add_argument("--timeout", type=float, default=600.0, metavar="X", help="seconds that a request may take")
    found.add_argument("--output", type=Path, help="JSON file for the result")
    found.add_argument("--chip", default="", help="what the running server computes on, for the result")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    found.add_argument("rest", nargs="*", help="model and options of the server to start, behind --")
    return found


def load_of(options: argparse.Namespace) -> Load:
    """The named load with what the options change. Raises ValueError for a number that is too small."""
    given = {name: getattr(options, name) for name in Load.__struct_fields__ if getattr(options, name) is not None}
    for name, value in given.items():
        if value < (least := int(name not in ("tools", "forks"))):
            raise ValueError(f"--{name}: {value} is not allowed; at least {least}")
    return msgspec.structs.replace(LOADS[options.load], **given)


@contextmanager
def served(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The address of the server, and what it computes on."""
    if options.url:
        yield options.url, options.chip
        return
    with serving(options.rest) as server:
        yield server.url, device(server)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        load = load_of(options)
        with served(options) as (url, chip):
            where, model = target(url, options.api_key), options.model or read_model_info(url, options.api_key)
            talk = Talk(where, load, {"model": model} if model else {}, options.seed, options.timeout)
            found = asyncio.run(measure(talk, options.pairs))
    except (ValueError, OSError, PenstockError) as error:
        print(error, file=sys.stderr)
        return 2
    print(lines(found))
    if options.output:
        words = [word.replace(options.api_key, "KEY") for word in words] if options.api_key else words
        told = {"chip": chip, "model": model, "server": options.rest, "load": load, "seed": options.seed}
        report.write(options.output, "conversations", {**told, "figures": found}, words, options.commit)
    return int(bool(found.summary.failed))


if __name__ == "__main__":
    sys.exit(main())
