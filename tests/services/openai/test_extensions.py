"""What requests ask for beyond OpenAI's parameters (query.py, frames.py, answers.py): streaming by the query, usage in
every chunk, token ids, tokens called by their ids, truncated prompts; the same told in a stream and in one piece."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from penstock.protocol.messages import Finish, SubmitText
from penstock.services.openai.answers import unpacked
from tests.services.client.fake_engine import (
    MAX_MODEL_LEN,
    FakeLink,
    Row,
    answering,
    app_state,
    client,
    position,
    silent,
    words,
)
from tests.services.openai.shapes import check_error, events

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
TEXT = ("/v1/completions", {"prompt": "Hello"})
BOTH = pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])


def packed(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def with_ids(request: SubmitText) -> list[list[Row]]:
    """Two choices at most, whose tokens are told; the second token has no text yet."""
    assert request.with_token_ids
    rows: list[list[Row]] = []
    for choice in range(request.n):
        first: dict[str, Any] = {"prompt_tokens": 3}
        if choice == 0:
            first["prompt_token_ids"] = packed(1, 2, 3)
        rows.append([Row(text="a", choice=choice, token_ids=packed(11), extra=first)])
        rows.append([Row(text="", choice=choice, token_ids=packed(12))])
        rows.append([Row(text="bc", choice=choice, tokens=2, token_ids=packed(13, 14))])
        rows.append([Row(text="", choice=choice, finish=Finish.STOP, token_ids=packed(2))])
    return rows


async def ask(port: FakeLink, path: str, body: dict[str, Any]) -> str:
    async with client(app_state(port)) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.text


@BOTH
@pytest.mark.parametrize(
    ("query", "stream", "streamed"),
    [
        ("?stream=true", None, True), ("?stream=1", None, True), ("?stream", None, True), ("?stream=True", None, True),
        ("?stream=false", None, False), ("?stream=0", None, False), ("?a=b", None, False), ("", None, False),
        ("?stream=true", False, False), ("?stream=false", True, True), ("?stream=true&a=1", None, True),
    ],
)  # fmt: skip
async def test_stream_by_the_query(
    path: str, body: dict[str, Any], query: str, stream: bool | None, streamed: bool
) -> None:
    """What the body says counts more."""
    port = FakeLink(answering(words("ok")))
    text = await ask(port, path + query, body | ({} if stream is None else {"stream": stream}))
    assert text.startswith("data: ") == streamed
    assert port.of(SubmitText)[0].stream == streamed


@BOTH
@pytest.mark.parametrize("query", ["stream=perhaps", "stream=2", "stream=true&stream=true", "stream=%00"])
async def test_a_query_that_makes_no_sense(path: str, body: dict[str, Any], query: str) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post(f"{path}?{query}", json=body)
    assert answer.status_code == 400
    check_error(answer.json(), "invalid_request_error", "stream")


@BOTH
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"return_token_ids": True}])
async def test_usage_in_every_chunk_counts_what_was_told(path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    port = FakeLink(answering(words("a", "b", "c")))
    chunks = events(await ask(port, path, body | more | {"stream": True, "stream_options": options}))
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert told[-1] == 3 * more.get("n", 1)
    assert all(chunk["usage"]["prompt_tokens"] == 5 for chunk in chunks)
    assert chunks[-1]["choices"] == []
    counted = 0
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        said = choice.get("text") or choice.get("delta", {}).get("content")
        counted += len(said or "")
        assert chunk["usage"]["completion_tokens"] == counted, "a letter is a token here"


@BOTH
@pytest.mark.parametrize("included", [False, None])
async def test_usage_that_is_not_included_is_in_no_chunk(
    path: str, body: dict[str, Any], included: bool | None
) -> None:
    options = {"continuous_usage_stats": True, "include_usage": included}
    port = FakeLink(answering(words("a", "b")))
    chunks = events(await ask(port, path, body | {"stream": True, "stream_options": options}))
    assert all("usage" not in chunk for chunk in chunks)


@BOTH
async def test_token_ids_whole_and_streamed(path: str, body: dict[str, Any]) -> None:
    asked = body | {"return_token_ids": True, "n": 2}
    answer = json.loads(await ask(FakeLink(answering(with_ids)), path, asked))
    chunks = events(await ask(FakeLink(answering(with_ids)), path, asked | {"stream": True}))
    assert [choice["token_ids"] for choice in answer["choices"]] == [[11, 12, 13, 14, 2]] * 2
    streamed: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    for chunk in chunks:
        prompts += [chunk["prompt_token_ids"]] if "prompt_token_ids" in chunk else []
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
            prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert list(streamed.values()) == [[11, 12, 13, 14, 2]] * 2
    assert prompts == [[1, 2, 3]] * 2
    if path.endswith("chat/completions"):
        assert answer["prompt_token_ids"] == [1, 2, 3]
        text = "".join(choice["delta"].get("content", "") for c in chunks for choice in c["choices"])
    else:
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[1, 2, 3]] * 2
        text = "".join(choice["text"] for c in chunks for choice in c["choices"])
    assert text == "abc" * 2


@BOTH
@pytest.mark.parametrize("value", [None, False])
async def test_no_ids_unless_asked_for(path: str, body: dict[str, Any], value: bool | None) -> None:
    port = FakeLink(answering(words("ok")))
    text = await ask(port, path, body | {"return_token_ids": value, "return_tokens_as_token_ids": value})
    assert "token_ids" not in text
    assert not port.of(SubmitText)[0].with_token_ids


def with_logprobs(request: SubmitText) -> list[list[Row]]:
    extra = {"prompt_tokens": 1, "logprobs": (position("a", 11, 0, top=2),), "prompt_token_ids": packed(7)}
    if request.sampling.prompt_logprobs >= 0:
        extra["prompt_logprobs"] = (None,)
    return [[Row(text="a", finish=Finish.STOP, extra=extra)]]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_called_by_their_ids(stream: bool) -> None:
    asked = {"return_tokens_as_token_ids": True, "stream": stream}
    path, body = CHAT
    text = await ask(FakeLink(answering(with_logprobs)), path, body | asked | {"logprobs": True, "top_logprobs": 2})
    found = [chunk["choices"][0]["logprobs"] for chunk in (events(text) if stream else [json.loads(text)])]
    (entry,) = next(each for each in found if each)["content"]
    assert entry["token"] == "token_id:11"
    assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:11", "token_id:901"]
    assert entry["bytes"] == [97]
    path, body = TEXT
    text = await ask(FakeLink(answering(with_logprobs)), path, body | asked | {"logprobs": 2, "echo": True})
    found = [chunk["choices"][0]["logprobs"] for chunk in (events(text) if stream else [json.loads(text)])]
    logprobs = next(each for each in found if each)
    assert logprobs["tokens"] == ["token_id:7", "token_id:11"]
    assert set(logprobs["top_logprobs"][1]) == {"token_id:11", "token_id:901"}
    assert "token_ids" not in text


@BOTH
async def test_truncation_reaches_the_tokenizer(path: str, body: dict[str, Any]) -> None:
    for value, arrives in ((None, 0), (-1, -1), (7, 7)):
        port = FakeLink(answering(words("ok")))
        await ask(port, path, body | {"truncate_prompt_tokens": value})
        assert port.of(SubmitText)[0].truncate == arrives
    async with client(app_state(FakeLink(silent))) as http:
        for wrong in (0, -2, 1.5, "7"):
            answer = await http.post(path, json=body | {"truncate_prompt_tokens": wrong})
            assert answer.status_code == 400
            check_error(answer.json(), "invalid_request_error", "truncate_prompt_tokens")


async def test_ids_that_are_to_be_truncated_may_be_many() -> None:
    port = FakeLink(answering(words("ok")))
    await ask(port, "/v1/completions", {"prompt": [1] * 600, "truncate_prompt_tokens": 5})
    assert len(port.of(SubmitText)[0].prompt_ids) == 4 * MAX_MODEL_LEN  # as many as any truncation keeps


@BOTH
@pytest.mark.parametrize(("side", "first"), [("left", False), ("right", True), (None, False)])
async def test_the_side_of_a_truncation(path: str, body: dict[str, Any], side: str | None, first: bool) -> None:
    port = FakeLink(answering(words("a")))
    await ask(port, path, body | {"truncate_prompt_tokens": 5, "truncation_side": side})
    assert (port.of(SubmitText)[0].truncate, port.of(SubmitText)[0].keep_first) == (5, first)
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post(path, json=body | {"truncation_side": "middle"})
    assert answer.status_code == 400
    check_error(answer.json(), "invalid_request_error", "truncation_side")


async def test_many_ids_are_cut_on_the_side_that_is_asked_for() -> None:
    port = FakeLink(answering(words("a")))
    given = [1] * 600 + [2] * 600
    await ask(port, "/v1/completions", {"prompt": given, "truncate_prompt_tokens": 5, "truncation_side": "right"})
    assert set(unpacked(port.of(SubmitText)[0].prompt_ids)) == {1}
    await ask(port, "/v1/completions", {"prompt": given, "truncate_prompt_tokens": 5})
    assert set(unpacked(port.of(SubmitText)[1].prompt_ids)) == {2}
