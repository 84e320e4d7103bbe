"""What the openai client sees of a real server with the embedded model."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import LIMIT, Server

QUESTION = [{"role": "user", "content": "What is 128 + 457?"}]
STORY = [{"role": "user", "content": "Tell me a short story."}]


def stream_text(client: openai.OpenAI, **arguments: object) -> str:
    chunks = list(client.chat.completions.create(model="penstock-demo", stream=True, **arguments))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_the_answer_is_right_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="penstock-demo", messages=QUESTION, temperature=0)
    assert "585" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert stream_text(client, messages=QUESTION, temperature=0) == whole.choices[0].message.content


def test_the_model_may_be_left_out_and_an_unknown_one_is_404(server: Server, client: openai.OpenAI) -> None:
    body = {"messages": QUESTION, "max_tokens": 4}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=LIMIT)
    assert answer.status_code == 200
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=QUESTION)


def test_usage_comes_last_when_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="penstock-demo", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="penstock-demo", prompt="One two", max_tokens=8, logprobs=3, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.completion_tokens
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == pytest.approx(value)  # greedy: the chosen one is the best


def test_echo_returns_the_prompt_with_its_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="penstock-demo", prompt="One two three", max_tokens=2, echo=True, logprobs=1, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith("One two three")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)


def test_an_echo_alone_scores_the_prompt(client: openai.OpenAI) -> None:
    """What evaluation harnesses ask for: the same scores as beside a token, and no token."""
    prompts = ["One two three", "Four"]
    said = {"model": "penstock-demo", "prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0}
    alone = client.completions.create(max_tokens=0, **said)
    beside = client.completions.create(max_tokens=1, **said)
    assert [choice.text for choice in alone.choices] == prompts
    assert {choice.finish_reason for choice in alone.choices} == {"length"}
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0
    for choice, other in zip(alone.choices, beside.choices, strict=True):
        assert choice.logprobs is not None
        assert other.logprobs is not None
        assert choice.logprobs.tokens == other.logprobs.tokens[:-1]
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(other.logprobs.token_logprobs[1:-1])
        assert choice.logprobs.text_offset == other.logprobs.text_offset[:-1]
    parts = [part for part in client.completions.create(max_tokens=0, stream=True, **said) if part.choices]
    for index, prompt in enumerate(prompts):
        assert "".join(part.choices[0].text for part in parts if part.choices[0].index == index) == prompt


def test_three_choices_differ_and_share_the_prompt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="penstock-demo", messages=STORY, n=3, temperature=1.0, seed=11, max_tokens=60
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_seed_gives_the_same_text_twice(client: openai.OpenAI) -> None:
    first, second = (
        client.chat.completions.create(model="penstock-demo", messages=STORY, temperature=1.0, seed=5, max_tokens=50)
        for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content


def test_stop_strings_are_removed_from_the_text(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(model="penstock-demo", messages=STORY, temperature=0, max_tokens=60)
    text = free.choices[0].message.content or ""
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    cut = client.chat.completions.create(
        model="penstock-demo", messages=STORY, temperature=0, max_tokens=60, stop=[stop]
    )
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert stream_text(client, messages=STORY, temperature=0, max_tokens=60, stop=[stop]) == text[: text.index(stop)]


def test_many_prompts_and_token_ids(client: openai.OpenAI, server: Server) -> None:
    ids = httpx.post(server.url + "/tokenize", json={"prompt": "Hello there"}, timeout=LIMIT).json()["tokens"]
    text = client.completions.create(model="penstock-demo", prompt="Hello there", max_tokens=6, temperature=0)
    both = client.completions.create(model="penstock-demo", prompt=[ids, ids], max_tokens=6, temperature=0)
    assert [choice.text for choice in both.choices] == [text.choices[0].text] * 2


def test_tokenize_round_trip(server: Server) -> None:
    text = "Straße, 東京 and 🙂 with  two spaces\n"
    body = {"prompt": text, "add_special_tokens": False}
    answer = httpx.post(server.url + "/tokenize", json=body, timeout=LIMIT).json()
    assert answer["count"] == len(answer["tokens"])
    back = httpx.post(server.url + "/detokenize", json={"tokens": answer["tokens"]}, timeout=LIMIT).json()
    assert back["prompt"] == text


def test_a_client_that_leaves_frees_its_blocks(server: Server, client: openai.OpenAI) -> None:
    before = server.aborted()
    stream = client.completions.create(
        model="penstock-demo", prompt="Once", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.until("/health", lambda health: health["engine"]["running"] == 1)
    stream.close()
    server.until("/health", lambda health: rests(health["engine"]))
    server.until("/health", lambda _: server.aborted() > before)  # the output did not end by itself


def rests(engine: dict[str, Any]) -> bool:
    """Whether nobody runs, and no block is held: those of the last step are until its result has come."""
    return bool(engine["running"] == 0 and engine["blocks_free"] + engine["blocks_idle"] == engine["blocks"])


async def test_sixty_four_streams_at_once_give_what_one_gives(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def ask(number: int) -> str:
            answer = await client.chat.completions.create(
                model="penstock-demo",
                messages=[{"role": "user", "content": f"What is {number} + 457?"}],
                temperature=0,
                max_tokens=16,
            )
            return answer.choices[0].message.content or ""

        alone = [await ask(100 + k) for k in range(4)]
        together = await asyncio.gather(*(ask(100 + k % 4) for k in range(64)))
    assert together == alone * 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "no"}, "messages"),
        ({"messages": QUESTION, "temperature": -1}, "temperature"),
        ({"messages": QUESTION, "n": 0}, "n"),
        ({"messages": QUESTION, "max_tokens": 10_000_000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
        ({"messages": QUESTION, "response_format": {"type": "yaml"}}, "response_format.type"),
    ],
)
def test_bad_requests_name_the_parameter(server: Server, body: dict[str, object], param: str) -> None:
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=LIMIT)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("effort", ["high", "none"])
def test_a_loop_for_reasoning_models(client: openai.OpenAI, effort: Any) -> None:
    """The loop of DeepSeek's guide: it reads `reasoning_content` of every delta, and `content` where that is null."""
    said = {"reasoning": "", "content": ""}
    messages: Any = [{"role": "user", "content": "What is 128 + 457?"}]
    words: Any = {"model": "penstock-demo", "messages": messages, "temperature": 0, "reasoning_effort": effort}
    for chunk in client.chat.completions.create(stream=True, **words):
        delta: Any = chunk.choices[0].delta
        if delta.reasoning_content:
            said["reasoning"] += delta.reasoning_content
        else:
            said["content"] += delta.content
    whole: Any = client.chat.completions.create(**words).choices[0].message
    assert said == {"reasoning": whole.reasoning_content or "", "content": whole.content}
    assert bool(said["reasoning"]) == (effort == "high")
    assert "585" in said["content"]
