"""POST /v1/completions: every form of prompt, echo and logprobs, streamed and whole."""

from __future__ import annotations

import json
import struct
from typing import Any

import openai.types as types
import pytest

from penstock.protocol import limits
from penstock.protocol.messages import Finish, SubmitText
from tests.services.client.fake_engine import FakeLink, Row, answering, app_state, client, position, silent, words
from tests.services.openai.shapes import check, check_completion_chunks, check_error, events, texts

PATH = "/v1/completions"


async def post(port: FakeLink, body: dict[str, Any]) -> tuple[int, str]:
    async with client(app_state(port)) as http:
        answer = await http.post(PATH, json=body)
        return answer.status_code, answer.text


def named(request: SubmitText) -> list[list[Row]]:
    """Every choice says its prompt and its number."""
    prompt = request.prompt if request.prompt is not None else "/".join(map(str, ids_of(request)))
    extra = {"prompt_tokens": 4, "cached_tokens": 1}
    begin = [Row(text=f"<{prompt}>", choice=choice, extra=extra) for choice in range(request.n)]
    return [begin, [Row(text=f"{c}", choice=c, finish=Finish.LENGTH) for c in range(request.n)]]


def ids_of(request: SubmitText) -> tuple[int, ...]:
    assert request.prompt_ids is not None
    return struct.unpack(f"<{len(request.prompt_ids) // 4}i", request.prompt_ids)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("one", ["<one>"]),
        ("", ["<>"]),
        (["one", "two"], ["<one>", "<two>"]),
        ([5, 6, 7], ["<5/6/7>"]),
        ([[5], [6, 7]], ["<5>", "<6/7>"]),
    ],
)
async def test_every_form_of_prompt(prompt: Any, said: list[str]) -> None:
    port = FakeLink(answering(named))
    code, text = await post(port, {"prompt": prompt, "n": 2})
    assert code == 200, text
    answer = json.loads(text)
    check(types.Completion, answer)
    assert answer["id"].startswith("cmpl-")
    expected = [f"{each}{choice}" for each in said for choice in range(2)]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(expected))
    assert answer["usage"]["prompt_tokens"] == 4 * len(said)
    assert answer["usage"]["completion_tokens"] == 4 * len(said)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len(said)}
    assert len({request.id for request in port.of(SubmitText)}) == len(said)
    body = {"prompt": prompt, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    _, text = await post(FakeLink(answering(named)), body)
    check_completion_chunks(events(text), usage=True)
    assert texts(events(text)) == dict(enumerate(expected))


async def test_all_prompts_share_one_sampling() -> None:
    port = FakeLink(answering(words("ok")))
    await post(port, {"prompt": ["a", "b"], "seed": 5, "max_tokens": 7})
    first, second = port.of(SubmitText)
    assert first.sampling == second.sampling
    assert (first.sampling.seed, first.sampling.max_tokens) == (5, 7)
    assert first.add_special_tokens


async def test_sixteen_tokens_unless_said() -> None:
    port = FakeLink(answering(words("ok")))
    await post(port, {"prompt": "a"})
    assert port.of(SubmitText)[0].sampling.max_tokens == 16


def echoing(request: SubmitText) -> list[list[Row]]:
    """Prompt "ab" of two tokens, output "c" and "d", with the log-probabilities that were asked for."""
    top = max(request.sampling.logprobs, 0)
    told = request.sampling.logprobs >= 0
    prompt = {"prompt_logprobs": (None, position("b", 2, 1, top))} if request.sampling.prompt_logprobs >= 0 else {}
    rows = []
    for choice in range(request.n):
        first = {"logprobs": (position("c", 3, 2, top),)} if told else {}
        first |= {"prompt_tokens": 2, **(prompt if choice == 0 else {})}
        rows.append(Row(text="abc" if request.echo else "c", choice=choice, extra=first))
    last = {"logprobs": (position("d", 4, 3, top),)} if told else {}
    ends = [Row(text="d", choice=choice, finish=Finish.LENGTH, extra=dict(last)) for choice in range(request.n)]
    # The choice that brings the prompt's logprobs is not the first to come.
    return [[*reversed(rows)], ends]


@pytest.mark.parametrize("top", [0, 2])
async def test_logprobs(top: int) -> None:
    _, text = await post(FakeLink(answering(echoing)), {"prompt": "ab", "logprobs": top})
    answer = json.loads(text)
    check(types.Completion, answer)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["c", "d"]
    assert logprobs["text_offset"] == [2, 3]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    expected = {"c": -0.5} if top == 0 else {"c": -0.5, "r1": -1.5}
    assert logprobs["top_logprobs"][0] == expected


@pytest.mark.parametrize("n", [1, 3])
async def test_echo_with_logprobs(n: int) -> None:
    body = {"prompt": "ab", "logprobs": 1, "echo": True, "n": n}
    port = FakeLink(answering(echoing))
    _, text = await post(port, body)
    assert port.of(SubmitText)[0].echo
    assert port.of(SubmitText)[0].sampling.prompt_logprobs == 1
    answer = json.loads(text)
    check(types.Completion, answer)
    whole = answer["choices"][0]["logprobs"]
    for choice in answer["choices"]:
        assert choice["text"] == "abcd"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "c", "d"]
        assert logprobs["text_offset"] == [0, 1, 2, 3]
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert logprobs["top_logprobs"][0] is None
        assert "prompt_logprobs" not in choice
    _, text = await post(FakeLink(answering(echoing)), body | {"stream": True})
    chunks = events(text)
    check_completion_chunks(chunks)
    assert texts(chunks) == dict.fromkeys(range(n), "abcd")
    for index in range(n):
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
        assert {key: [entry for part in parts for entry in part[key]] for key in whole} == whole


async def test_echo_of_a_single_token() -> None:
    def steps(request: SubmitText) -> list[list[Row]]:
        extra = {"prompt_tokens": 1, "prompt_logprobs": (None,), "logprobs": (position("c", 3, 5, 1),)}
        return [[Row(text="Hello" + "c", finish=Finish.LENGTH, extra=extra)]]

    _, text = await post(FakeLink(answering(steps)), {"prompt": "Hello", "logprobs": 1, "echo": True})
    assert json.loads(text)["choices"][0]["logprobs"]["tokens"] == ["Hello", "c"]


async def test_echo_alone_asks_for_no_logprobs() -> None:
    port = FakeLink(answering(echoing))
    _, text = await post(port, {"prompt": "ab", "echo": True})
    assert json.loads(text)["choices"][0] == {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}
    assert port.of(SubmitText)[0].sampling.prompt_logprobs == -1


async def test_an_echo_alone_has_the_prompts_logprobs() -> None:
    def steps(request: SubmitText) -> list[list[Row]]:
        extra = {"prompt_tokens": 2, "prompt_logprobs": (None, position("b", 2, 1, 1))}
        return [[Row(text="ab", tokens=0, finish=Finish.LENGTH, extra=extra)]]

    body = {"prompt": "ab", "logprobs": 1, "echo": True, "max_tokens": 0}
    port = FakeLink(answering(steps))
    _, text = await post(port, body)
    assert port.of(SubmitText)[0].sampling.max_tokens == 0
    answer = json.loads(text)
    check(types.Completion, answer)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 0)
    _, text = await post(FakeLink(answering(steps)), body | {"stream": True})
    chunks = events(text)
    check_completion_chunks(chunks)
    assert texts(chunks) == {0: "ab"}


async def test_no_tokens_without_an_echo_leave_nothing_to_answer() -> None:
    for echo in (None, False):
        status, text = await post(FakeLink(answering(words("ok"))), {"prompt": "ab", "max_tokens": 0, "echo": echo})
        assert status == 400
        assert json.loads(text)["error"]["param"] == "max_tokens"


async def test_prompt_logprobs_of_every_prompt() -> None:
    port = FakeLink(answering(echoing))
    _, text = await post(port, {"prompt": ["ab", "ab"], "prompt_logprobs": 1})
    answer = json.loads(text)
    check(types.Completion, answer)
    assert [choice["prompt_logprobs"][0] for choice in answer["choices"]] == [None, None]
    assert answer["choices"][1]["prompt_logprobs"][1]["2"]["decoded_token"] == "b"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 1000]}, "prompt"),
        ({"prompt": [[1], [2, 1000]]}, "prompt[1]"),
        ({"prompt": [1] * 513}, "prompt"),
        ({"prompt": ["a"] * (limits.MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "top_logprobs": 1}, "top_logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3, "n": 2}, "best_of"),
    ],
)
async def test_wrong_prompts_and_their_neighbours(body: dict[str, Any], param: str) -> None:
    port = FakeLink(silent)
    code, text = await post(port, body)
    assert code == 400
    check_error(json.loads(text), "invalid_request_error", param)
    assert port.sent == []


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ([1, *range(512)], [tuple(range(512))]),
        ([[1, *range(512)], [3, 4]], [tuple(range(512)), (3, 4)]),
        ([1] * 300_000, [(1,) * 512]),
    ],
)
async def test_ids_that_no_truncation_keeps_are_not_sent(prompt: Any, sent: list[tuple[int, ...]]) -> None:
    port = FakeLink(answering(named))
    assert (await post(port, {"prompt": prompt, "truncate_prompt_tokens": -1}))[0] == 200
    assert [ids_of(request) for request in port.of(SubmitText)] == sent


async def test_texts_are_left_for_the_tokenizer_to_truncate() -> None:
    port = FakeLink(answering(named))
    assert (await post(port, {"prompt": ["a" * 5000, "b"], "truncate_prompt_tokens": 3}))[0] == 200
    assert [request.prompt for request in port.of(SubmitText)] == ["a" * 5000, "b"]
