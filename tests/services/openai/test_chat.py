"""POST /v1/chat/completions, streamed and whole (chat.py, generation.py)."""

from __future__ import annotations

import json
from typing import Any

import openai.types.chat as chat
import pytest

from penstock.engine_core.folder import Generation
from penstock.protocol.messages import Finish, SubmitText
from tests.services.client.fake_engine import FakeLink, Row, answering, app_state, client, position, silent, words
from tests.services.openai.shapes import check, check_chat_chunks, check_error, events, texts

PATH = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


async def post(port: FakeLink, body: dict[str, Any], generation: Generation | None = None) -> tuple[int, str]:
    async with client(app_state(port, generation=generation)) as http:
        answer = await http.post(PATH, json=body)
        return answer.status_code, answer.text


async def submitted(body: dict[str, Any], generation: Generation | None = None) -> SubmitText:
    """What the tokenizer receives for `body`."""
    port = FakeLink(answering(words("ok")))
    code, text = await post(port, HELLO | body, generation)
    assert code == 200, text
    (request,) = port.of(SubmitText)
    assert isinstance(request, SubmitText)
    return request


async def test_the_whole_answer() -> None:
    code, text = await post(FakeLink(answering(words("Hi", " there"))), HELLO)
    answer = json.loads(text)
    check(chat.ChatCompletion, answer)
    assert code == 200
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "demo"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hi there", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
                                      "reasoning_tokens": 0},
    }  # fmt: skip


async def test_a_stream() -> None:
    _, text = await post(FakeLink(answering(words("Hi", " there"))), HELLO | {"stream": True})
    chunks = events(text)
    check_chat_chunks(chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "Hi"}, {"content": " there"}, {}
    ]  # fmt: skip
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_usage_comes_last_in_a_stream() -> None:
    body = HELLO | {"stream": True, "n": 3, "stream_options": {"include_usage": True}}
    _, text = await post(FakeLink(answering(words("a", "b"))), body)
    chunks = events(text)
    check_chat_chunks(chunks, usage=True)
    assert texts(chunks) == {0: "ab", 1: "ab", 2: "ab"}
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)


async def test_choices_keep_their_index() -> None:
    def steps(request: SubmitText) -> list[list[Row]]:
        first = Row(text="b", choice=1, extra={"prompt_tokens": 5})
        return [[first, Row(text="a", choice=0)], [Row(text="B", choice=1, finish=Finish.LENGTH)],
                [Row(text="A", choice=0, finish=Finish.STOP)]]  # fmt: skip

    _, text = await post(FakeLink(answering(steps)), HELLO | {"n": 2})
    answer = json.loads(text)
    check(chat.ChatCompletion, answer)
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "aA", "stop"), (1, "bB", "length")
    ]  # fmt: skip
    _, text = await post(FakeLink(answering(steps)), HELLO | {"n": 2, "stream": True})
    check_chat_chunks(events(text))
    assert texts(events(text)) == {0: "aA", 1: "bB"}


def with_logprobs(request: SubmitText) -> list[list[Row]]:
    top = request.sampling.logprobs
    return [
        [Row(text="Hé", tokens=2, extra={"prompt_tokens": 3, "logprobs": (
            position("H", 10, 0, top), position("é", 11, 1, top))})],
        [Row(text="!", finish=Finish.LENGTH, extra={"logprobs": (position("!", 12, 2, top, float("-inf")),)})],
    ]  # fmt: skip


@pytest.mark.parametrize("top", [None, 0, 2])
async def test_logprobs(top: int | None) -> None:
    body = HELLO | {"logprobs": True, **({} if top is None else {"top_logprobs": top})}
    _, text = await post(FakeLink(answering(with_logprobs)), body)
    answer = json.loads(text)
    check(chat.ChatCompletion, answer)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "é", "!"]
    assert content[1]["bytes"] == list("é".encode())
    assert [len(entry["top_logprobs"]) for entry in content] == [top or 0] * 3
    assert content[2]["logprob"] == -9999.0  # JSON has no minus infinity
    _, text = await post(FakeLink(answering(with_logprobs)), body | {"stream": True})
    chunks = events(text)
    check_chat_chunks(chunks)
    streamed = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in streamed for entry in part] == content


async def test_prompt_logprobs() -> None:
    def steps(request: SubmitText) -> list[list[Row]]:
        assert request.sampling.prompt_logprobs == 2
        prompt = (None, position("b", 5, 1, 2))
        return [[Row(text="x", finish=Finish.STOP, extra={"prompt_tokens": 2, "prompt_logprobs": prompt})]]

    _, text = await post(FakeLink(answering(steps)), HELLO | {"prompt_logprobs": 2})
    answer = json.loads(text)
    check(chat.ChatCompletion, answer)
    assert answer["prompt_logprobs"] == [
        None,
        {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
         "901": {"logprob": -1.5, "rank": 2, "decoded_token": "r1"}},
    ]  # fmt: skip


async def test_the_stop_reason_is_told_where_there_is_one() -> None:
    def steps(request: SubmitText) -> list[list[Row]]:
        return [[Row(text="a", finish=Finish.STOP, extra={"prompt_tokens": 1, "stop_reason": "\u2028END"})]]

    _, text = await post(FakeLink(answering(steps)), HELLO)
    assert json.loads(text)["choices"][0]["stop_reason"] == "\u2028END"
    _, text = await post(FakeLink(answering(steps)), HELLO | {"stream": True})
    chunks = events(text)
    check_chat_chunks(chunks)
    assert chunks[-1]["choices"][0]["stop_reason"] == "\u2028END"
    assert "\u2028" not in text


async def test_what_the_tokenizer_is_sent() -> None:
    request = await submitted(
        {"n": 2, "stop": "END", "bad_words": ["no"], "skip_special_tokens": False, "priority": 7, "cache_salt": "s",
         "include_stop_str_in_output": True, "chat_template_kwargs": {"enable_thinking": False}}
    )  # fmt: skip
    assert json.loads(request.messages or b"") == HELLO["messages"]
    assert json.loads(request.template_arguments or b"") == {"enable_thinking": False}
    assert (request.prompt, request.prompt_ids, request.tools) == (None, None, None)
    assert (request.n, request.stop, request.bad_words, request.include_stop) == (2, ("END",), ("no",), True)
    assert (request.priority, request.cache_salt, request.skip_special_tokens) == (7, "s", False)
    assert not request.add_special_tokens
    assert request.add_generation_prompt
    assert not request.stream
    assert request.arrival > 0


async def test_the_output_is_unlimited_unless_said() -> None:
    assert (await submitted({})).sampling.max_tokens is None
    assert (await submitted({"max_tokens": 9})).sampling.max_tokens == 9
    assert (await submitted({"max_completion_tokens": 8})).sampling.max_tokens == 8
    assert (await submitted({"max_completion_tokens": 8, "max_tokens": 8})).sampling.max_tokens == 8


async def test_the_models_defaults_hold_where_the_request_is_silent() -> None:
    makers = Generation(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05)
    silent_request = (await submitted({}, makers)).sampling
    assert (silent_request.temperature, silent_request.top_k, silent_request.top_p) == (0.6, 20, 0.95)
    assert (silent_request.min_p, silent_request.repetition_penalty, silent_request.max_tokens) == (0.1, 1.05, None)
    said = (await submitted({"temperature": 0, "top_k": -1, "top_p": 0.5, "max_tokens": 3}, makers)).sampling
    assert (said.temperature, said.top_k, said.top_p, said.max_tokens) == (0.0, 0, 0.5, 3)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_contradictions(body: dict[str, Any], param: str) -> None:
    port = FakeLink(silent)
    code, text = await post(port, HELLO | body)
    assert code == 400
    check_error(json.loads(text), "invalid_request_error", param)
    assert port.sent == []
