"""A streamed message: its events in order, and the same message as the whole one, for every cut (output.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from anthropic import types as shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from penstock.protocol.errors import EngineFailure
from penstock.protocol.messages import Finish, PieceKind
from penstock.protocol.outputs import Piece
from penstock.services.client.output_collector import OutputCollector
from penstock.services.metrics.requests import Timings
from penstock.services.openai.answers import Identity
from penstock.services.openai.messages.output import UNPARSED, MessageEvents, ResponseOptions, arguments, message_answer
from tests.services.openai.shapes import strangers
from tests.services.openai.written import FINISHES, events, outputs, replay

IDENTITY = Identity("msg_1", 1, "demo")
EVENT: TypeAdapter[Any] = TypeAdapter(shapes.RawMessageStreamEvent)
TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def gathered(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events."""
    message: dict[str, Any] = told[0]["message"]
    for event in told[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "grown": ""})
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                message["content"][-1]["grown"] += event["delta"][TEXTS[event["delta"]["type"]]]
            case "content_block_stop":
                block = message["content"][event["index"]]
                grown = block.pop("grown")
                kind = block["type"]
                if kind == "tool_use":
                    block["input"] = arguments(grown)
                else:
                    block["text" if kind == "text" else "thinking"] = grown
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def plain(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: part for name, part in block.items() if name != "id"} for block in message["content"]]
    return {**message, "content": content}


@given(outputs(), st.sampled_from(FINISHES), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_stream_says_what_the_whole_says(
    rows: list[tuple[list[Piece], bool]], finish: Finish, thinking: bool
) -> None:
    _, text = replay(rows, finish, MessageEvents(IDENTITY, ResponseOptions(thinking=thinking)))
    collector, _ = replay(rows, finish, None)
    whole = json.loads(msgspec.json.encode(message_answer(IDENTITY, collector, ResponseOptions(thinking=thinking))))
    assert list(strangers(shapes.Message.model_validate(whole, strict=True))) == []
    told = events(text)
    assert [event["type"] for event in told[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    assert told[0]["message"]["usage"]["cache_read_input_tokens"] == 3
    del told[1]
    for event in told:
        assert list(strangers(EVENT.validate_python(event, strict=True))) == []
    blocks = [event for event in told if event["type"].startswith("content_block")]
    starts = [event["index"] for event in blocks if event["type"].endswith("start")]
    assert starts == [event["index"] for event in blocks if event["type"].endswith("stop")]
    assert [event["index"] for event in blocks] == sorted(event["index"] for event in blocks)
    assert plain(gathered(told)) == plain(whole)
    assert thinking or all(block["type"] != "thinking" for block in whole["content"])
    for call in (block for block in whole["content"] if block["type"] == "tool_use"):
        assert call["id"].startswith("toolu_")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", {}), ("{}", {}), ('{"a": [1]}', {"a": [1]}), ('{"a', {UNPARSED: '{"a'}), ("[1]", {UNPARSED: "[1]"})],
)
def test_arguments_are_an_object(text: str, expected: dict[str, Any]) -> None:
    assert arguments(text) == expected


@pytest.mark.parametrize(
    ("finish", "stopped", "reason"),
    [(Finish.STOP, None, "end_turn"), (Finish.STOP, "END", "stop_sequence"), (Finish.STOP, 7, "end_turn"),
     (Finish.LENGTH, None, "max_tokens"), (Finish.CALLS, None, "tool_use")],
)  # fmt: skip
def test_why_it_ended(finish: Finish, stopped: str | int | None, reason: str) -> None:
    collector, _ = replay([([Piece(PieceKind.CONTENT, "so")], True)], finish, None)
    collector.choices[0].stop_reason = stopped
    answer = message_answer(IDENTITY, collector)
    assert answer.stop_reason == reason
    assert answer.stop_sequence == ("END" if stopped == "END" else None)


@pytest.mark.parametrize(("asked", "reason"), [(1, "max_tokens"), (2, "model_context_window_exceeded")])
def test_an_output_that_fills_the_context(asked: int, reason: str) -> None:
    told = ResponseOptions(max_tokens=asked)
    rows = [([Piece(PieceKind.CONTENT, "so")], True)]
    collector, text = replay(rows, Finish.LENGTH, MessageEvents(IDENTITY, told))
    assert collector.choices[0].tokens == 1
    assert events(text)[-2]["delta"]["stop_reason"] == reason
    assert message_answer(IDENTITY, collector, told).stop_reason == reason


def test_no_key_is_null_that_anthropic_leaves_out() -> None:
    """A client that is strict takes only what the reference's examples hold: `citations` is absent, never null."""
    rows = [([Piece(PieceKind.REASONING, "hm"), Piece(PieceKind.CONTENT, "so")], True)]
    _, text = replay(rows, Finish.STOP, MessageEvents(IDENTITY))
    whole, _ = replay(rows, Finish.STOP, None)
    told = [*events(text), json.loads(msgspec.json.encode(message_answer(IDENTITY, whole)))]
    assert {name for event in told for name in nulls(event)} == {"stop_reason", "stop_sequence"}


def nulls(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (name for name, part in value.items() if part is None)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nulls(part)


def test_a_failure_is_told_in_the_stream() -> None:
    framing = MessageEvents(IDENTITY, ResponseOptions(request_id="req"))
    collector = OutputCollector(1, 1, stream=True, timings=Timings(), now=0.0)
    collector.put(0, "so", 1, Finish.NONE, None, 1.0)
    sent = framing.take(collector, collector.get_nowait()) + framing.failure(collector, EngineFailure("it broke"))
    assert events(sent.decode())[-1] == {
        "type": "error", "error": {"type": "api_error", "message": "it broke"}, "request_id": "req",
    }  # fmt: skip
