"""instructor over OpenAI's client: a schema and a tool, whole and streamed, in a loop and without."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import instructor
import openai
import pydantic
from question import MODEL, TOM, URL, tell


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


def words() -> dict[str, Any]:
    return {"model": MODEL, "messages": [dict(message) for message in TOM], "temperature": 0, "max_tokens": 300}


def by_mode(mode: str) -> dict[str, Any]:
    with openai.OpenAI(base_url=URL + "/v1", api_key="none", timeout=60) as inner:
        client = instructor.from_openai(inner, mode=instructor.Mode[mode])
        whole = client.chat.completions.create(response_model=Person, **words())
        *_, last = client.chat.completions.create_partial(response_model=Person, **words())
    return {"whole": whole.model_dump(), "stream": last.model_dump()}


async def in_a_loop() -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none", timeout=60) as inner:
        client = instructor.from_openai(inner, mode=instructor.Mode.JSON_SCHEMA)
        found = await client.chat.completions.create(response_model=Person, **words())
        return dict(found.model_dump())


tell({"version": version("instructor"), "schema": by_mode("JSON_SCHEMA"), "tools": by_mode("TOOLS"),
      "async": asyncio.run(in_a_loop())})  # fmt: skip
