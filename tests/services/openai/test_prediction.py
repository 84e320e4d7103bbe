"""`prediction` and `speculative` on both endpoints, and what usage says of drafts."""

from __future__ import annotations

import json
from typing import Any

import openai.types as completions
import openai.types.chat as chat
import pytest

from penstock.protocol.messages import Finish, SubmitText
from tests.services.client.fake_engine import FakeLink, Row, answering, app_state, client, silent, words
from tests.services.openai.shapes import check, check_chat_chunks, check_completion_chunks, check_error, events

CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
PLAIN = "/v1/completions", {"prompt": "Hello"}
PART = {"type": "text", "text": "a"}
ENDPOINTS = pytest.mark.parametrize(("path", "body"), [CHAT, PLAIN], ids=["chat", "completions"])


async def post(port: FakeLink, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with client(app_state(port)) as http:
        answer = await http.post(path, json=body)
        return answer.status_code, answer.text


async def submitted(path: str, body: dict[str, Any]) -> SubmitText:
    port = FakeLink(answering(words("ok")))
    code, text = await post(port, path, body)
    assert code == 200, text
    (request,) = port.of(SubmitText)
    assert isinstance(request, SubmitText)
    return request


@ENDPOINTS
@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (None, ""),
        ({"type": "content", "content": "def f():\n"}, "def f():\n"),
        ({"type": "content", "content": ""}, ""),
        ({"type": "content", "content": [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]}, "a\nb"),
    ],
)
async def test_the_predicted_text_goes_to_the_tokenizer(
    path: str, body: dict[str, Any], prediction: Any, text: str
) -> None:
    assert (await submitted(path, body | {"prediction": prediction})).prediction == text


@ENDPOINTS
@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ([], "prediction"),
        ({}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"content": "text"}, "prediction.type"),
        ({"type": "diff", "content": "text"}, "prediction.type"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": ["text"]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": "x"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [PART, {"type": "text"}]}, "prediction.content[1].text"),
    ],
)
async def test_a_wrong_prediction_is_refused(path: str, body: dict[str, Any], prediction: Any, param: str) -> None:
    port = FakeLink(silent)
    code, text = await post(port, path, body | {"prediction": prediction})
    assert code == 400
    check_error(json.loads(text), "invalid_request_error", json.loads(text)["error"]["param"])
    assert str(json.loads(text)["error"]["param"]).startswith(param)
    assert port.sent == []


@ENDPOINTS
async def test_nothing_is_refused_beside_a_prediction(path: str, body: dict[str, Any]) -> None:
    logprobs: Any = True if path == CHAT[0] else 2
    prediction = {"type": "content", "content": "text"}
    beside = {"n": 3, "logprobs": logprobs, "presence_penalty": 1.0, "frequency_penalty": 1.0, "max_tokens": 7,
              "temperature": 1.0, "seed": 3, "stop": "END"}  # fmt: skip
    request = await submitted(path, body | beside | {"prediction": prediction})
    assert (request.prediction, request.n, request.speculate) == ("text", 3, True)


@ENDPOINTS
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, True), ({"speculative": None}, True), ({"speculative": True}, True), ({"speculative": False}, False)],
)
async def test_drafts_are_switched_off_by_request(
    path: str, body: dict[str, Any], given: dict[str, Any], expected: bool
) -> None:
    assert (await submitted(path, body | given)).speculate is expected


@ENDPOINTS
@pytest.mark.parametrize("wrong", ["no", 0, {}])
async def test_the_switch_is_true_or_false(path: str, body: dict[str, Any], wrong: Any) -> None:
    code, text = await post(FakeLink(silent), path, body | {"speculative": wrong})
    assert code == 400
    check_error(json.loads(text), "invalid_request_error", "speculative")


def drafting(request: SubmitText) -> list[list[Row]]:
    """Choice k ends with 3 + k drafts accepted and k rejected; the second one never had any."""
    first = [Row(text="a", choice=choice, extra={"prompt_tokens": 2}) for choice in range(request.n)]
    told = [{} if choice == 1 else {"drafted": (3 + choice, choice)} for choice in range(request.n)]
    return [first, [Row(text="b", choice=k, finish=Finish.STOP, extra=told[k]) for k in range(request.n)]]


@ENDPOINTS
async def test_usage_adds_up_the_drafts_of_all_choices(path: str, body: dict[str, Any]) -> None:
    for n, accepted, rejected in ((1, 3, 0), (2, 3, 0), (3, 8, 2)):
        _, text = await post(FakeLink(answering(drafting)), path, body | {"n": n})
        answer = json.loads(text)
        check(chat.ChatCompletion if path == CHAT[0] else completions.Completion, answer)
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        details = drafts | {"reasoning_tokens": 0}
        assert answer["usage"]["completion_tokens_details"] == details
        streamed = body | {"n": n, "stream": True, "stream_options": {"include_usage": True}}
        _, text = await post(FakeLink(answering(drafting)), path, streamed)
        chunks = events(text)
        (check_chat_chunks if path == CHAT[0] else check_completion_chunks)(chunks, usage=True)
        assert chunks[-1]["usage"] == answer["usage"]


async def test_every_prompt_has_the_prediction() -> None:
    port = FakeLink(answering(drafting))
    body = {"prompt": ["a", "b"], "prediction": {"type": "content", "content": "text"}}
    _, text = await post(port, PLAIN[0], body)
    assert [request.prediction for request in port.of(SubmitText)] == ["text", "text"]
    assert json.loads(text)["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 6
