"""langchain-openai over chats and over Responses: answers, tools and structures, whole and streamed."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import langchain_openai
import pydantic
from question import ASK, MODEL, SUM, TOM, URL, WEATHER, tell


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


def calls(message: Any) -> list[dict[str, Any]]:
    return [{"name": call["name"], "args": call["args"]} for call in message.tool_calls]


def joined(chunks: list[Any]) -> Any:
    return sum(chunks[1:], chunks[0])


def made(*, responses: bool) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=URL + "/v1", api_key="none", model=MODEL, temperature=0, timeout=60, use_responses_api=responses
    )


async def in_a_loop() -> list[str]:
    both = [made(responses=responses) for responses in (False, True)]
    return [found.text for found in await asyncio.gather(*(model.ainvoke(SUM[0]["content"]) for model in both))]


def over(*, responses: bool) -> dict[str, Any]:
    model = made(responses=responses)
    question, tools = SUM[0]["content"], model.bind_tools([WEATHER])
    structured = model.with_structured_output(Person, method="json_schema")
    return {
        "whole": model.invoke(question).text,
        "stream": "".join(chunk.text for chunk in model.stream(question)),
        "calls": calls(tools.invoke(ASK[0]["content"])),
        "called": calls(joined(list(tools.stream(ASK[0]["content"])))),
        "structure": structured.invoke(TOM[0]["content"]).model_dump(),
    }


vectors = langchain_openai.OpenAIEmbeddings(
    base_url=URL + "/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
)
first, second = vectors.embed_documents(["one", "one"])
tell({"version": version("langchain-openai"), "chat": over(responses=False), "responses": over(responses=True),
      "async": asyncio.run(in_a_loop()), "vectors": [len(first), first == second]})  # fmt: skip
