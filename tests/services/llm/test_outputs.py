"""From a reply to outputs: whole, cumulative and delta."""

from __future__ import annotations

import pytest

from penstock.protocol.columns import pack
from penstock.protocol.errors import EngineFailure
from penstock.protocol.messages import Finish, PieceKind
from penstock.protocol.outputs import Piece, PositionLogprobs, TextExtra, TokenLogprob
from penstock.services.client.output_collector import OutputCollector
from penstock.services.llm.outputs import CompletionOutput, Logprob, OutputBuilder, position
from penstock.services.llm.params import RequestOutputKind, SamplingParams
from penstock.services.llm.prompts import chat_request, completion_requests, parse_prompts
from penstock.services.metrics.requests import Timings
from tests.services.client.fake_engine import MODEL


def at(token_id: int, logprob: float) -> PositionLogprobs:
    top = (TokenLogprob("best", 8, -0.1, b"best"), TokenLogprob("t", token_id, logprob, b"t"))
    return PositionLogprobs(TokenLogprob("t", token_id, logprob, b"t"), 2, top, 0)


def growing(kind: RequestOutputKind, *, n: int = 1, logprobs: bool = True) -> tuple[OutputCollector, OutputBuilder]:
    stream = kind is not RequestOutputKind.FINAL_ONLY
    collector = OutputCollector(1, n, stream=stream, timings=Timings(), now=0.0)
    (request,) = completion_requests(parse_prompts("p"), SamplingParams(logprobs=1 if logprobs else None), MODEL)
    return collector, OutputBuilder(collector, request, "7", kind)


def push(collector: OutputCollector, choice: int, text: str, token: int, finish: Finish = Finish.NONE) -> None:
    extra = TextExtra(
        row=0, prompt_tokens=2, prompt_token_ids=pack("i", [1, 2]), cached_tokens=1,
        logprobs=(at(token, -0.5),), stop_reason="s" if finish else None, drafted=(3, 1) if finish else None,
    )  # fmt: skip
    collector.put(choice, text, 1, finish, extra, 1.0, token_ids=pack("i", [token]))
    collector.notify()


def test_calls_of_custom_tools() -> None:
    collector = OutputCollector(1, 1, stream=True, timings=Timings(), now=0.0)
    tools = [{"type": "custom", "custom": {"name": "c"}}, {"type": "function", "function": {"name": "f"}}]
    request = chat_request([{"role": "user", "content": "x"}], None, MODEL, tools=tools)
    builder = OutputBuilder(collector, request, "7", RequestOutputKind.DELTA)
    calls = [Piece(PieceKind.CALL, "c"), Piece(PieceKind.ARGUMENTS, "a "), Piece(PieceKind.CALL, "f")]
    collector.put(0, "", 1, Finish.NONE, None, 1.0, pieces=tuple(calls[:2]))
    (first,) = builder.take(collector.get_nowait()).outputs
    collector.put(0, "", 1, Finish.NONE, None, 1.0, pieces=(Piece(PieceKind.ARGUMENTS, "b"), calls[2]))
    (more,) = builder.take(collector.get_nowait()).outputs
    custom, function = first.message()["tool_calls"][0], more.message()["tool_calls"][1]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "c", "input": "a "})
    assert [(call.type, call.arguments) for call in more.tool_calls] == [("custom", "b"), ("function", "")]
    assert function["function"] == {"name": "f", "arguments": ""}


def test_a_whole_output() -> None:
    collector, builder = growing(RequestOutputKind.FINAL_ONLY)
    push(collector, 0, "a", 5)
    push(collector, 0, "b", 6, Finish.STOP)
    found = builder.take(collector.get_nowait())
    (choice,) = found.outputs
    assert (found.request_id, found.prompt, found.prompt_token_ids, found.num_cached_tokens) == ("7", "p", [1, 2], 1)
    assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == ("ab", [5, 6], "stop", "s")
    assert choice.cumulative_logprob == -1.0
    assert choice.logprobs is not None
    assert choice.logprobs[1] == {6: Logprob(-0.5, 2, "t"), 8: Logprob(-0.1, 1, "best")}
    assert found.finished
    assert choice.finished()
    assert found.metrics.accepted_draft_tokens == 3
    assert found.metrics.finished_time is not None


@pytest.mark.parametrize(
    ("kind", "texts", "ids"),
    [
        (RequestOutputKind.CUMULATIVE, ["a", "ab"], [[5], [5, 6]]),
        (RequestOutputKind.DELTA, ["a", "b"], [[5], [6]]),
    ],
)
def test_a_stream(kind: RequestOutputKind, texts: list[str], ids: list[list[int]]) -> None:
    collector, builder = growing(kind)
    push(collector, 0, "a", 5)
    first = builder.take(collector.get_nowait())
    push(collector, 0, "b", 6, Finish.LENGTH)
    second = builder.take(collector.get_nowait())
    assert [each.outputs[0].text for each in (first, second)] == texts
    assert [each.outputs[0].token_ids for each in (first, second)] == ids
    assert (first.finished, second.finished) == (False, True)
    assert (first.outputs[0].finish_reason, second.outputs[0].finish_reason) == (None, "length")
    assert second.outputs[0].cumulative_logprob == -1.0
    assert first.metrics.first_token_time is not None


def test_a_delta_holds_the_choices_that_have_one() -> None:
    collector, builder = growing(RequestOutputKind.DELTA, n=2, logprobs=False)
    push(collector, 1, "x", 5)
    (choice,) = builder.take(collector.get_nowait()).outputs
    assert (choice.index, choice.text, choice.logprobs, choice.cumulative_logprob) == (1, "x", None, None)


def test_a_failure_keeps_its_error() -> None:
    collector, builder = growing(RequestOutputKind.FINAL_ONLY)
    error = EngineFailure("not a number")
    collector.fail(error)
    found = builder.failed(error)
    assert (found.outputs, found.finished, found.error) == ([], True, error)


def test_ranks_follow_the_order() -> None:
    assert [entry.rank for entry in position(at(3, -2.0)).values()] == [2, 1]


WRITTEN = (
    [Piece(PieceKind.REASONING, "why")], [Piece(PieceKind.REASONING, " so"), Piece(PieceKind.CONTENT, "Hi")],
    [Piece(PieceKind.CALL, "f"), Piece(PieceKind.ARGUMENTS, '{"a"')],
    [Piece(PieceKind.ARGUMENTS, ": 1}"), Piece(PieceKind.CALL, "g"), Piece(PieceKind.ARGUMENTS, "{}")],
)  # fmt: skip


def written(kind: RequestOutputKind) -> list[CompletionOutput]:
    """The choice as it was after each of the pieces."""
    collector, builder = growing(kind, logprobs=False)
    found = []
    for step, pieces in enumerate(WRITTEN):
        finish = Finish.CALLS if step == len(WRITTEN) - 1 else Finish.NONE
        collector.put(0, "", 1, finish, None, 1.0, pieces, token_ids=pack("i", [step]))
        if kind is not RequestOutputKind.FINAL_ONLY or finish:
            found.append(builder.take(collector.get_nowait()).outputs[0])
    return found


def test_what_a_chat_wrote_is_told_by_kind() -> None:
    (whole,) = written(RequestOutputKind.FINAL_ONLY)
    assert (whole.reasoning, whole.text, whole.finish_reason) == ("why so", "Hi", "tool_calls")
    calls = [(call.index, call.name, call.arguments) for call in whole.tool_calls]
    assert calls == [(0, "f", '{"a": 1}'), (1, "g", "{}")]
    assert len({call.id for call in whole.tool_calls}) == 2
    message = whole.message()
    assert (message["role"], message["content"], message["reasoning_content"]) == ("assistant", "Hi", "why so")
    assert message["tool_calls"][0] == {
        "id": whole.tool_calls[0].id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'},
    }  # fmt: skip
    assert CompletionOutput(index=0, text="Hi", token_ids=[]).message() == {"role": "assistant", "content": "Hi"}


def test_deltas_of_a_chat_add_up_to_the_whole() -> None:
    deltas, steps = written(RequestOutputKind.DELTA), written(RequestOutputKind.CUMULATIVE)
    assert "".join(delta.reasoning for delta in deltas) == steps[-1].reasoning == "why so"
    assert "".join(delta.text for delta in deltas) == steps[-1].text == "Hi"
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        parts = calls.setdefault(call.index, [])
        assert bool(call.name) == bool(call.id) == (not parts)
        parts.append(call.name + call.arguments)
    assert {index: "".join(parts) for index, parts in calls.items()} == {0: 'f{"a": 1}', 1: "g{}"}
    assert [len(step.tool_calls) for step in steps] == [0, 0, 1, 2]
