"""Limits that options set (bounds.py, decoding.py): each refusal names the limit and its option."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.protocol import limits
from penstock.protocol.config import fields
from penstock.protocol.messages import SubmitText
from penstock.services.openai.schema import ChatRequest, CompletionRequest
from penstock.services.openai.validation import LIMIT_OPTIONS
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, silent, words
from tests.services.openai.shapes import check_error

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
TEXT = ("/v1/completions", {"prompt": "a"})
FEW: dict[str, int] = {"max_n": 2, "max_logprobs": 3, "max_stop_strings": 1, "max_logit_bias": 2}

Endpoint = tuple[str, dict[str, Any]]
# Endpoint, parameter, a value that fits FEW, one that does not, one beyond what the engine can do.
COMMON: tuple[tuple[str, Any, Any, Any], ...] = (
    ("n", 2, 3, limits.MAX_CHOICES + 1),
    ("prompt_logprobs", 3, 4, limits.MAX_LOGPROBS + 1),
    ("stop", ["a"], ["a", "b"], ["a"] * (limits.MOST_STOP_STRINGS + 1)),
    ("logit_bias", {"1": 1, "2": 1}, {str(k): 1 for k in range(3)}, {str(k): 1 for k in range(1025)}),
)
BOUNDED: tuple[tuple[Endpoint, str, Any, Any, Any], ...] = (
    *((endpoint, *case) for endpoint in (CHAT, TEXT) for case in COMMON),
    (CHAT, "top_logprobs", 3, 4, limits.MAX_LOGPROBS + 1),
    (TEXT, "logprobs", 3, 4, limits.MAX_LOGPROBS + 1),
)


@pytest.mark.parametrize(("endpoint", "param", "fits", "over", "beyond"), BOUNDED)
async def test_each_limit_names_itself_and_its_option(
    endpoint: Endpoint, param: str, fits: Any, over: Any, beyond: Any
) -> None:
    path, body = endpoint
    more = {"logprobs": True} if param == "top_logprobs" else {}
    port = FakeLink(answering(words("ok")))
    async with client(app_state(port, **FEW)) as http:
        for value, status in ((fits, 200), (over, 400), (beyond, 400)):
            answer = await http.post(path, json={**body, **more, param: value})
            assert answer.status_code == status, answer.text
            if status == 400:
                check_error(answer.json(), "invalid_request_error", param)
                assert LIMIT_OPTIONS[param] in answer.json()["error"]["message"]
    assert len(port.of(SubmitText)) == 1


def test_every_option_named_exists() -> None:
    flags = {field.flag for field in fields()}
    assert set(LIMIT_OPTIONS.values()) <= flags
    served = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert set(LIMIT_OPTIONS) <= served


async def test_the_length_of_a_prompt_and_of_an_output_name_the_option() -> None:
    path, _ = TEXT
    async with client(app_state(FakeLink(silent))) as http:
        for body, param in (({"prompt": [1] * 513}, "prompt"), ({"prompt": "a", "max_tokens": 513}, "max_tokens")):
            answer = await http.post(path, json=body)
            assert answer.status_code == 400
            check_error(answer.json(), "invalid_request_error", param)
            assert "512" in answer.json()["error"]["message"]
            assert "--max-model-len" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_the_depth_of_a_body(path: str) -> None:
    def nested(levels: int) -> dict[str, Any]:
        inner: Any = 1
        for _ in range(levels - 1):
            inner = [inner]
        return {"prompt": "a", "tokens": [1], "messages": [{"role": "user", "content": "a"}], "nobody_knows": inner}

    async with client(app_state(FakeLink(answering(words("ok"))), max_json_depth=8)) as http:
        for levels, refused in ((8, False), (9, True), (400, True)):
            body = json.dumps(nested(levels)).encode()
            answer = await http.post(path, content=body, headers={"content-type": "application/json"})
            message = answer.json().get("error", {}).get("message", "") if answer.status_code != 200 else ""
            assert ("--max-json-depth" in message) == refused
            assert answer.status_code == 400 or not refused
            if refused:
                assert "8" in message
