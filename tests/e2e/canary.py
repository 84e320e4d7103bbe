"""Forty fixed prompts with the embedded model's exact greedy answers: a wrong page, position or mask shows in them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

FILE = Path(__file__).parents[1] / "canary.jsonl"
LONGEST = 400  # tokens of an answer


def prompts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


async def ask(client: httpx.AsyncClient, prompt: dict[str, Any]) -> str:
    """The server's answer. Tools are rendered by /tokenize, since the chat endpoint does not take them yet."""
    fields = {"temperature": 0, "max_tokens": LONGEST}
    if "tools" not in prompt:
        answer = await client.post("/v1/chat/completions", json={"messages": prompt["messages"], **fields})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])
    ids = await client.post("/tokenize", json={"messages": prompt["messages"], "tools": prompt["tools"]})
    ids.raise_for_status()
    answer = await client.post("/v1/completions", json={"prompt": ids.json()["tokens"], **fields})
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


async def ask_all(url: str) -> list[str]:
    """Every answer, all asked at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return await asyncio.gather(*(ask(client, prompt) for prompt in prompts()))
