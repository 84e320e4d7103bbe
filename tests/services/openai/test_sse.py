"""Server-sent events: a stream says what the whole says however it is cut, and stays one line per event."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai.types as completions
import openai.types.chat as chat
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.errors import EngineFailure
from penstock.protocol.messages import Finish
from penstock.protocol.outputs import TextExtra
from penstock.services.client.output_collector import OutputCollector
from penstock.services.metrics.requests import Timings
from penstock.services.openai.answers import Identity, ResponseOptions, chat_answer, completion_answer
from penstock.services.openai.parameters import UsageWanted
from penstock.services.openai.sse import SSEEncoder, encode_text
from tests.services.client.fake_engine import position
from tests.services.openai.shapes import (
    check,
    check_chat_chunks,
    check_completion_chunks,
    check_error,
    events,
    texts,
)
from tests.services.openai.written import FINISHES, outputs
from tests.services.openai.written import replay as replayed

USAGE = UsageWanted(at_end=True)
IDENTITY = Identity("id-1", 1_700_000_000, 'a "quoted" \u2028 name')
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, str, int, int, TextExtra | None, bool]]:
    """Rows of up to three choices, interleaved, each with whether the stream is taken after it."""
    rows = []
    choices = draw(st.integers(1, 3))
    told = draw(st.booleans())
    open_choices = list(range(choices))
    offsets = [0] * choices
    begun: set[int] = set()
    while open_choices:
        index = draw(st.sampled_from(open_choices))
        text = draw(TEXT)
        finish = draw(st.sampled_from([Finish.NONE, Finish.NONE, Finish.NONE, Finish.STOP, Finish.LENGTH]))
        if len(rows) > 30:
            finish = Finish.LENGTH
        fields: dict[str, Any] = {}
        if index not in begun:
            begun.add(index)
            fields = {"prompt_tokens": 3, "cached_tokens": 1}
        if told and text:
            fields["logprobs"] = (position(text, 7, offsets[index], 2),)
        if finish == Finish.STOP and draw(st.booleans()):
            fields["stop_reason"] = draw(st.one_of(st.integers(0, 9), TEXT))
        offsets[index] += len(text)
        rows.append((index, text, 1, finish, TextExtra(row=0, **fields) if fields else None, draw(st.booleans())))
        if finish:
            open_choices.remove(index)
    return rows


def replay(
    rows: list[tuple[int, str, int, int, TextExtra | None, bool]], frames: SSEEncoder | None
) -> tuple[OutputCollector, str]:
    """The reply that `rows` make, and the stream if it is taken where the rows say."""
    choices = max(row[0] for row in rows) + 1
    collector = OutputCollector(1, choices, stream=frames is not None, timings=Timings(), now=1.0)
    sent = b""
    for step, (index, text, tokens, finish, extra, taken) in enumerate(rows):
        collector.put(index, text, tokens, finish, extra, 2.0 + step)
        if frames is not None and (taken or step == len(rows) - 1):
            sent += frames.take(collector, collector.get_nowait())
    return collector, (sent + (frames.end(collector) if frames else b"")).decode()


@settings(max_examples=200)
@given(lives())
def test_a_chat_stream_says_what_the_whole_says(rows: Any) -> None:
    choices = max(row[0] for row in rows) + 1
    told = any(row[4] is not None and row[4].logprobs for row in rows)
    collector, stream = replay(rows, SSEEncoder(IDENTITY, chat=True, choices=choices, usage=USAGE))
    chunks = events(stream)
    check_chat_chunks(chunks, usage=True)
    collector, _ = replay(rows, None)
    whole = json.loads(json_of(chat_answer(IDENTITY, collector, ResponseOptions(logprobs=told))))
    check(chat.ChatCompletion, whole)
    assert texts(chunks) == {c["index"]: c["message"]["content"] for c in whole["choices"]}
    assert ends(chunks) == {c["index"]: (c["finish_reason"], c.get("stop_reason")) for c in whole["choices"]}
    assert chunks[-1]["usage"] == whole["usage"]
    if told:
        for choice in whole["choices"]:
            assert streamed_logprobs(chunks, choice["index"], "content") == choice["logprobs"]["content"]


@settings(max_examples=200)
@given(lives())
def test_a_completion_stream_says_what_the_whole_says(rows: Any) -> None:
    choices = max(row[0] for row in rows) + 1
    told = any(row[4] is not None and row[4].logprobs for row in rows)
    collector, stream = replay(rows, SSEEncoder(IDENTITY, chat=False, choices=choices, usage=USAGE))
    chunks = events(stream)
    check_completion_chunks(chunks, usage=True)
    collector, _ = replay(rows, None)
    answer = completion_answer(IDENTITY, collector, ResponseOptions(logprobs=told))
    whole = json.loads(json_of(answer))
    check(completions.Completion, whole)
    assert texts(chunks) == {c["index"]: c["text"] for c in whole["choices"]}
    assert ends(chunks) == {c["index"]: (c["finish_reason"], c.get("stop_reason")) for c in whole["choices"]}
    if told:
        for choice in whole["choices"]:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert streamed_logprobs(chunks, choice["index"], name) == choice["logprobs"][name]


def json_of(answer: Any) -> bytes:
    return msgspec.json.encode(answer)


def ends(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, Any]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    return {choice["index"]: (choice["finish_reason"], choice.get("stop_reason")) for choice in choices}


def streamed_logprobs(chunks: list[dict[str, Any]], index: int, name: str) -> list[Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][name]]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_one_line_for_every_reader(text: str) -> None:
    encoded = encode_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


def test_an_error_in_a_stream() -> None:
    collector = OutputCollector(1, 1, stream=True, timings=Timings(), now=0.0)
    frames = SSEEncoder(IDENTITY, chat=True, choices=1)
    first, last, rest = frames.failure(collector, EngineFailure("line\u2028break")).decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert "\u2028" not in first
    check_error(json.loads(first.removeprefix("data: ")), "server_error", None)


def test_deltas_that_were_not_taken_are_merged() -> None:
    collector = OutputCollector(1, 1, stream=True, timings=Timings(), now=0.0)
    frames = SSEEncoder(IDENTITY, chat=True, choices=1)
    for step in range(5):
        collector.put(0, str(step), 1, Finish.NONE, None, 1.0 + step)
    first = frames.take(collector, collector.get_nowait()).decode()
    assert first.count("data: ") == 2  # the role, then all of the text
    assert '"content":"01234"' in first
    collector.put(0, "", 1, Finish.NONE, None, 9.0)
    assert frames.take(collector, collector.get_nowait()) == b""  # a token that decodes to nothing yet


@settings(max_examples=200)
@given(rows=outputs(), finish=st.sampled_from(FINISHES))
def test_reasoning_and_calls_of_a_stream_are_those_of_the_whole(rows: Any, finish: Finish) -> None:
    _, stream = replayed(rows, finish, SSEEncoder(IDENTITY, chat=True, choices=1, usage=USAGE))
    chunks = events(stream)
    check_chat_chunks(chunks, usage=True)
    collector, _ = replayed(rows, finish, None)
    whole = json.loads(json_of(chat_answer(IDENTITY, collector, ResponseOptions())))
    check(chat.ChatCompletion, whole)
    (choice,) = whole["choices"]
    content, reasoning, calls = "", "", []
    for chunk in chunks:
        for delta in (part["delta"] for part in chunk["choices"]):
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    assert call["index"] == len(calls)
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
    message = choice["message"]
    assert content == (message["content"] or "")
    assert reasoning == (message.get("reasoning_content") or "")
    assert calls == [call["function"] for call in message.get("tool_calls") or ()]
    assert ends(chunks) == {0: (choice["finish_reason"], choice.get("stop_reason"))}


@settings(max_examples=100)
@given(rows=outputs(), finish=st.sampled_from(FINISHES), told=st.booleans())
def test_where_reasoning_is_looked_for_every_delta_tells(rows: Any, finish: Finish, told: bool) -> None:
    """A client's loop adds up what each delta has: `reasoning_content` if it is there, else `content`."""
    frames = SSEEncoder(IDENTITY, chat=True, choices=1, told=ResponseOptions(reasoning=told))
    _, stream = replayed(rows, finish, frames, reasons=True)
    chunks = events(stream)
    check_chat_chunks(chunks)
    collector, _ = replayed(rows, finish, None, reasons=True)
    answer = json.loads(json_of(chat_answer(IDENTITY, collector, ResponseOptions(reasoning=told))))
    message = answer["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(("reasoning_content" in delta) == told for delta in (*deltas, message))
    if told:
        reasoning, content = "", ""
        for delta in deltas:
            if delta["reasoning_content"]:
                reasoning += delta["reasoning_content"]
            elif "tool_calls" not in delta:
                content += delta["content"]
        assert (reasoning, content) == (message["reasoning_content"] or "", message["content"] or "")
