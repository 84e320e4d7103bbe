"""litellm as a client of both APIs: answers, tools and vectors, whole and streamed, in a loop and without."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version
from typing import Any

import litellm
from question import ASK, MODEL, SUM, URL, WEATHER, tell


def by(provider: str) -> dict[str, Any]:
    base = URL + ("/v1" if provider == "openai" else "")
    words: dict[str, Any] = {
        "model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 100,
    }  # fmt: skip
    chunks = litellm.completion(messages=SUM, stream=True, **words)
    calls = litellm.completion(messages=ASK, tools=[WEATHER], **words).choices[0].message.tool_calls
    parts = list(litellm.completion(messages=ASK, tools=[WEATHER], stream=True, **words))
    called = litellm.stream_chunk_builder(parts).choices[0].message.tool_calls
    return {
        "whole": litellm.completion(messages=SUM, **words).choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "async": asyncio.run(litellm.acompletion(messages=SUM, **words)).choices[0].message.content,
        "calls": [{"name": call.function.name, "args": json.loads(call.function.arguments)} for call in calls],
        "called": [{"name": call.function.name, "args": json.loads(call.function.arguments)} for call in called],
    }


made = litellm.embedding(model=f"openai/{MODEL}", input=["one", "one"], api_base=URL + "/v1", api_key="none")
first, second = (item["embedding"] for item in made.data)
tell({"version": version("litellm"), "openai": by("openai"), "anthropic": by("anthropic"),
      "vectors": [len(first), first == second]})  # fmt: skip
