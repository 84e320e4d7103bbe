"""A streamed response: its events in order, and the same response as the whole one, for every cut.

The whole one is made by endpoint.py and output.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import responses as shapes
from pydantic import TypeAdapter

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import EngineFailure
from penstock.protocol.messages import Finish, PieceKind, Sampling
from penstock.protocol.outputs import Piece
from penstock.services.client.output_collector import OutputCollector
from penstock.services.metrics.requests import Timings
from penstock.services.openai.responses.endpoint import REQUEST
from penstock.services.openai.responses.events import ResponseEvents
from penstock.services.openai.responses.items import unsealed
from penstock.services.openai.responses.store import ResponseStore
from penstock.services.openai.responses.turn import Turn, said
from tests.services.client.fake_engine import MODEL
from tests.services.openai.shapes import strangers
from tests.services.openai.written import FINISHES, events, outputs, replay

EVENT: TypeAdapter[Any] = TypeAdapter(shapes.ResponseStreamEvent)


def turn(**fields: Any) -> Turn:
    request = REQUEST.decode(msgspec.json.encode({"input": "hi", **fields}))
    found = Turn(request, ResponseStore(Path("unused"), 0, 1, ApiConfig()), MODEL, "demo")
    found.open(Sampling(temperature=0.5, top_p=0.9, seed=1, max_tokens=5))
    return found


def plain(value: Any) -> Any:
    """Without ids and times, which no two responses share."""
    if isinstance(value, dict):
        varying = ("id", "item_id", "call_id", "created_at", "completed_at")
        return {name: plain(part) for name, part in value.items() if name not in varying}
    return [plain(part) for part in value] if isinstance(value, list) else value


@given(outputs(), st.sampled_from(FINISHES))
@settings(max_examples=200, deadline=None)
def test_a_stream_says_what_the_whole_says(rows: list[tuple[list[Piece], bool]], finish: Finish) -> None:
    one, other = turn(), turn()
    _, text = replay(rows, finish, ResponseEvents(one))
    collector, _ = replay(rows, finish, None)
    whole = json.loads(msgspec.json.encode(other.whole(collector)))
    told = events(text)
    for event in told:
        assert list(strangers(EVENT.validate_python(event, strict=True))) == []
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] == f"response.{whole['status']}"
    assert plain(told[-1]["response"]) == plain(whole)
    assert told[-1]["response"]["id"] == told[0]["response"]["id"]
    assert [event["item"] for event in told if event["type"] == "response.output_item.done"] == told[-1]["response"][
        "output"
    ]
    check_items(told, told[-1]["response"]["output"])


def check_items(told: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Each item is added, has its part added, grows by what it holds, and is done, before the next one."""
    orders = {"message": ("content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
              "reasoning": ("content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
              "function_call": ("", "function_call_arguments.delta", "function_call_arguments.done", "")}  # fmt: skip
    rest = told[2:-1]
    for index, item in enumerate(output):
        added, delta, done, closed = orders[item["type"]]
        expected = ["output_item.added", *([added] if added else [])]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        own = [event for event in rest if event["output_index"] == index]
        grown = [event["delta"] for event in own if event["type"] == f"response.{delta}"]
        assert "".join(grown) == text
        began = own[0]["item"]
        assert began["status"] == "in_progress"
        assert (began["arguments"] == "") if item["type"] == "function_call" else (began["content"] == [])
        expected += [delta] * len(grown) + [done, *([closed] if closed else []), "output_item.done"]
        assert [event["type"] for event in own] == [f"response.{name}" for name in expected]
        assert all(event.get("item_id", item["id"]) == item["id"] for event in own)
        assert rest[: len(own)] == own
        rest = rest[len(own) :]
    assert rest == []


PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a*"}}
SPACE = {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "spawn"}]}


def test_calls_of_custom_tools_and_of_namespaces_have_items_of_their_own() -> None:
    C, A = PieceKind.CALL, PieceKind.ARGUMENTS
    tools = [PATCH, SPACE, {"type": "web_search", "external_web_access": True}]
    rows = [([Piece(PieceKind.REASONING, "hm"), Piece(C, "patch"), Piece(A, "a"), Piece(A, "a\n")], False),
            ([Piece(C, "agents__spawn"), Piece(A, "{}"), Piece(C, "unknown"), Piece(A, "{}")], True)]  # fmt: skip
    one = turn(tools=tools, include=["reasoning.encrypted_content"])
    _, text = replay(rows, Finish.CALLS, ResponseEvents(one))
    told = events(text)
    for event in told:
        # OpenAI's API sends the status of a custom call too, which its client does not name
        assert set(strangers(EVENT.validate_python(event, strict=True))) <= {"status", "penstock"}
    answer = told[-1]["response"]
    thought, patch, spawn, unknown = answer["output"]
    assert unsealed(thought["encrypted_content"]) == "hm"
    assert patch | {"id": 0, "call_id": 0} == {
        "type": "custom_tool_call", "id": 0, "call_id": 0, "status": "completed", "name": "patch", "input": "aa\n"
    }  # fmt: skip
    assert (spawn["name"], spawn["namespace"], spawn["arguments"]) == ("spawn", "agents", "{}")
    assert (unknown["name"], "namespace" in unknown) == ("unknown", False)
    assert [tool["type"] for tool in answer["tools"]] == ["custom", "namespace"]
    assert answer["tools"][1]["tools"][0]["name"] == "spawn"
    assert answer["penstock"]["ignored"] == ["tools[2]: web_search does not run here and was left out"]
    own = [event for event in told if event.get("item_id") == patch["id"]]
    kind = "response.custom_tool_call_input"
    assert [event["type"] for event in own] == [*[f"{kind}.delta"] * (len(own) - 1), f"{kind}.done"]
    assert "".join(event["delta"] for event in own[:-1]) == own[-1]["input"] == "aa\n"
    added = next(event["item"] for event in told if event.get("output_index") == 1)
    assert (added["input"], added["status"]) == ("", "in_progress")
    (message,) = said(one.whole(replay(rows, Finish.CALLS, None)[0]).output)
    assert message["reasoning_content"] == "hm"
    assert [call[call["type"]]["name"] for call in message["tool_calls"]] == ["patch", "agents__spawn", "unknown"]


def test_an_output_of_nothing_is_an_empty_message() -> None:
    _, text = replay([([], True)], Finish.STOP, ResponseEvents(turn()))
    (item,) = events(text)[-1]["response"]["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_what_was_cut_off_is_incomplete() -> None:
    rows = [([Piece(PieceKind.CONTENT, "so"), Piece(PieceKind.CALL, "f"), Piece(PieceKind.ARGUMENTS, '{"a')], True)]
    _, text = replay(rows, Finish.LENGTH, ResponseEvents(turn()))
    answer = events(text)[-1]["response"]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]


def test_a_failure_is_told_and_ends_the_stream() -> None:
    told = turn()
    framing = ResponseEvents(told)
    collector = OutputCollector(1, 1, stream=True, timings=Timings(), now=0.0)
    collector.put(0, "so", 1, Finish.NONE, None, 1.0)
    sent = framing.take(collector, collector.get_nowait()) + framing.failure(
        collector, EngineFailure("it broke\u2028", code="x")
    )
    found = events(sent.decode())
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    assert found[-2]["message"] == "it broke\u2028"
    assert found[-1]["response"]["error"] == {"code": "server_error", "message": "it broke\u2028"}
    assert "\u2028" not in sent.decode()
    for event in found:
        EVENT.validate_python(event, strict=True)
