"""Clients that stand on top of others, each against the embedded model: instructor, langchain-openai, litellm.

They are the extra `clients` of pyproject.toml; where one is not installed its tests are skipped.
"""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

from tests.e2e.server import Server
from tests.e2e.test_tools import ASK, HELLO, MODEL, WEATHER

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
ABSENT = "not installed; pip install penstock[clients]"


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor(server: Server, mode: str) -> None:
    instructor: Any = pytest.importorskip("instructor", reason=f"instructor is {ABSENT}")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60) as inner:
        client = instructor.from_openai(inner, mode=instructor.Mode[mode])
        messages = [{"role": "user", "content": "Tom is 5 years old."}]
        words = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 300}
        found = client.chat.completions.create(response_model=Person, **words)
        assert isinstance(found, Person)
        assert mode == "TOOLS" or found.age == 5
        *_, last = client.chat.completions.create_partial(response_model=Person, **words)
        assert last.model_dump() == found.model_dump()


def test_langchain(server: Server) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason=f"langchain-openai is {ABSENT}")
    model = langchain.ChatOpenAI(base_url=server.url + "/v1", api_key="none", model=MODEL, temperature=0, timeout=60)
    assert "585" in model.invoke(HELLO[0]["content"]).content
    assert "585" in "".join(chunk.content for chunk in model.stream(HELLO[0]["content"]))
    tools = model.bind_tools([WEATHER])
    called = [{"name": "get_weather", "args": {"city": "Rome"}}]
    assert [{k: call[k] for k in ("name", "args")} for call in tools.invoke(ASK[0]["content"]).tool_calls] == called
    chunks = list(tools.stream(ASK[0]["content"]))
    whole = sum(chunks[1:], chunks[0])
    assert [{k: call[k] for k in ("name", "args")} for call in whole.tool_calls] == called
    structured = model.with_structured_output(Person, method="json_schema")
    assert structured.invoke("Tom is 5 years old.").age == 5


def test_langchain_over_responses(server: Server) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason=f"langchain-openai is {ABSENT}")
    model = langchain.ChatOpenAI(
        base_url=server.url + "/v1", api_key="none", model=MODEL, temperature=0, timeout=60, use_responses_api=True
    )
    assert "585" in str(model.invoke(HELLO[0]["content"]).content)
    assert "585" in "".join(chunk.text for chunk in model.stream(HELLO[0]["content"])).replace("\n", "")
    (call,) = model.bind_tools([WEATHER]).invoke(ASK[0]["content"]).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(server: Server, provider: str) -> None:
    litellm: Any = pytest.importorskip("litellm", reason=f"litellm is {ABSENT}")
    base = server.url + ("/v1" if provider == "openai" else "")
    words = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 100}
    answer = litellm.completion(messages=HELLO, **words)
    assert "585" in answer.choices[0].message.content
    chunks = litellm.completion(messages=HELLO, stream=True, **words)
    assert "585" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    called = litellm.completion(messages=ASK, tools=[WEATHER], **words)
    (call,) = called.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments.replace(" ", "")) == ("get_weather", '{"city":"Rome"}')
