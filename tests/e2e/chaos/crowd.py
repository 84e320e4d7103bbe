"""A crowd of streams of every kind, and what each one's client saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = 60  # tokens
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"temperature": 0, "ignore_eos": True}),
    (CHAT, {"temperature": 0}),
    (COMPLETIONS, {"temperature": 1.0, "seed": 7, "n": 2, "ignore_eos": True}),
    (CHAT, {"temperature": 0, "response_format": FORMAT}),
    (COMPLETIONS, {"temperature": 0.8, "seed": 3, "logprobs": 2, "echo": True, "ignore_eos": True}),
    (COMPLETIONS, {"temperature": 0, "stop": [" the", "ing "], "min_tokens": 20}),
    (CHAT, {"temperature": 1.0, "seed": 11, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "n": 2}),
    (COMPLETIONS, {"temperature": 0, "return_token_ids": True, "ignore_eos": True}),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the crowd."""

    path: str
    body: dict[str, Any]
    stream: bool


@dataclass(slots=True)
class Heard:
    """What the client of one request was told, choice by choice."""

    status: int = 0
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    error: Any = None

    def take(self, answer: dict[str, Any]) -> int:
        """One chunk of a stream, or all of an answer; how many characters it brought."""
        self.error = answer.get("error", self.error)
        brought = 0
        for choice in answer.get("choices", ()):
            index = choice["index"]
            said = choice.get("delta") or choice.get("message") or choice
            text = said.get("content") or said.get("text") or ""
            self.text[index] = self.text.get(index, "") + text
            brought += len(text)
            if choice.get("finish_reason"):
                assert index not in self.finish, "a choice ends once"
                self.finish[index] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["tokens"])
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
        if answer.get("usage"):
            self.usage = (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
        return brought


def crowd(size: int, start: str = "Once upon a time, ") -> list[Ask]:
    """Requests of all kinds in turns, one in four of them not streamed. start: the beginning of their prompts."""
    asks = []
    for number in range(size):
        path, options = KINDS[number % len(KINDS)]
        words = f"{start}{number} "
        prompt = {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"prompt": words}
        stream = number // len(KINDS) % 4 != 3
        body = {"max_tokens": LONG, **options, **prompt, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        asks.append(Ask(path, body, stream))
    return asks


async def ask(client: httpx.AsyncClient, request: Ask, came: Callable[[int], None]) -> Heard:
    """`came` is called with the characters of each chunk that comes."""
    heard = Heard()
    try:
        async with client.stream("POST", request.path, json=request.body) as answer:
            heard.status = answer.status_code
            if not request.stream:
                came(heard.take(json.loads(await answer.aread())))
                return heard
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    came(heard.take(json.loads(line[6:])))
    except httpx.TransportError as error:
        heard.error = type(error).__name__
    return heard


async def play(url: str, asks: list[Ask], moments: dict[int, Callable[[], None]]) -> list[Heard]:
    """Ask all at once. What stands under a number in `moments` is done when so many characters have come in all.

    How many chunks they come in is the machine's: deltas of a client that is late are merged.
    """
    seen, due = 0, sorted(moments)

    def came(characters: int) -> None:
        nonlocal seen
        seen += characters
        while due and due[0] <= seen:
            moments[due.pop(0)]()

    limits = httpx.Limits(max_connections=len(asks))
    async with httpx.AsyncClient(base_url=url, timeout=150, limits=limits) as client:
        return await asyncio.gather(*(ask(client, request, came) for request in asks))


def characters(found: Sequence[Heard]) -> int:
    """Of all that was said."""
    return sum(len(text) for heard in found for text in heard.text.values())


def calm(url: str, asks: list[Ask]) -> list[Heard]:
    """What all hear when nobody is killed."""
    found = asyncio.run(play(url, asks, {}))
    assert all(heard.status == 200 and heard.error is None and heard.usage for heard in found)
    return found
