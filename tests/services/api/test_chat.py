"""POST /v1/chat/completions, streamed and whole."""

from __future__ import annotations

import json

from tests.services.api.pipe import FakePort, answering, client, service, words

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def events(text: str) -> list[dict]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def test_whole() -> None:
    async with client(service(FakePort(answering(words("Hi", " there"))))) as http:
        answer = await http.post("/v1/chat/completions", json=HELLO)
    print(answer.text)
    assert answer.status_code == 200


async def test_stream() -> None:
    async with client(service(FakePort(answering(words("Hi", " there"))))) as http:
        answer = await http.post("/v1/chat/completions", json=HELLO | {"stream": True, "n": 2, "stream_options": {"include_usage": True}})
    print(answer.text)
    assert answer.status_code == 200
    assert events(answer.text)
    async with client(service(FakePort(answering(words("Hi", " there"))))) as http:
        for path in ("/health", "/metrics", "/openapi.json", "/v1/models", "/version", "/nope", "/health/ready"):
            answer = await http.get(path)
            print(answer.status_code, answer.headers, answer.text[:2000])
