"""Forty fixed prompts with the embedded model's exact greedy answers: a wrong page, position or mask shows in them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

FILE = Path(__file__).parents[1] / "canary.jsonl"
LONGEST = 400  # tokens of an answer


def prompts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


@dataclass(frozen=True)
class Answer:
    """What the server said, how long the prompt was, and how many of its tokens were cached."""

    text: str
    prompt_tokens: int
    cached_tokens: int


async def ask(client: httpx.AsyncClient, prompt: dict[str, Any]) -> Answer:
    """The server's answer. Tools are rendered by /tokenize, since the chat endpoint does not take them yet."""
    fields = {"temperature": 0, "max_tokens": LONGEST}
    if "tools" not in prompt:
        answer = await client.post("/v1/chat/completions", json={"messages": prompt["messages"], **fields})
        answer.raise_for_status()
        body = answer.json()
        return read(body, body["choices"][0]["message"]["content"])
    ids = await client.post("/tokenize", json={"messages": prompt["messages"], "tools": prompt["tools"]})
    ids.raise_for_status()
    answer = await client.post("/v1/completions", json={"prompt": ids.json()["tokens"], **fields})
    answer.raise_for_status()
    body = answer.json()
    return read(body, body["choices"][0]["text"])


def read(body: dict[str, Any], text: str) -> Answer:
    usage = body["usage"]
    return Answer(text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


async def ask_all(url: str) -> list[Answer]:
    """Every answer, all asked at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return await asyncio.gather(*(ask(client, prompt) for prompt in prompts()))
