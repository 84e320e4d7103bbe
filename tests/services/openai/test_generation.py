"""Clients that leave, clients that are slow, and answers that fail on the way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Scope

from penstock.protocol.errors import Unavailable
from penstock.protocol.messages import Abort, Finish, Rejected, SubmitText, Tokenize
from penstock.services.openai.app_state import AppState
from penstock.services.openai.routes import application
from penstock.services.openai.sse import SSEEncoder
from tests.services.client.fake_engine import LIMIT, FakeLink, Row, answering, app_state, batch, client, silent, words
from tests.services.openai.shapes import check_error

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


class Connection:
    """A client at the ASGI seam: it can leave at any moment and can stop reading."""

    def __init__(self, parts: AppState, path: str, body: dict[str, Any], *headers: tuple[bytes, bytes]) -> None:
        self.sent: list[Message] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.news = asyncio.Event()
        self._left = asyncio.Event()
        self._body: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        scope: Scope = {
            "type": "http", "method": "POST", "path": path, "headers": headers, "root_path": "", "query_string": b"",
        }  # fmt: skip
        self.task = asyncio.ensure_future(application(parts)(scope, self._receive, self._send))

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    def leave(self) -> None:
        self._left.set()

    async def until(self, text: str) -> None:
        """Wait until `text` was sent."""
        async with asyncio.timeout(LIMIT):
            while text not in self.text:
                self.news.clear()
                await self.news.wait()

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, LIMIT)

    async def _receive(self) -> Message:
        if self._body:
            return self._body.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reading.wait()
        if not self._left.is_set():
            self.sent.append(message)
            self.news.set()


async def turns(count: int = 5) -> None:
    """Let everything run that can run."""
    for _ in range(count):
        await asyncio.sleep(0)


def request_of(port: FakeLink) -> SubmitText:
    (request,) = port.of(SubmitText)
    assert isinstance(request, SubmitText)
    return request


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_leaves_is_aborted_at_once(stream: bool, begun: bool) -> None:
    port = FakeLink(silent)
    parts = app_state(port)
    connection = Connection(parts, CHAT, HELLO | {"stream": stream})
    await turns()
    request = request_of(port)
    if begun:
        port.arrive(batch([(request.id, Row(text="Hi", extra={"prompt_tokens": 3}))]))
        await turns()
    connection.leave()
    await turns()
    assert port.of(Abort) == [Abort(request.id)]
    await connection.ended()
    assert parts.engine_client.statistics().unfinished == 0
    port.arrive(batch([(request.id, Row(text="late"))]))  # what crossed the abort is dropped
    assert "late" not in connection.text
    assert parts.traffic.responses == {(CHAT, 499): 1}


async def test_every_prompt_of_a_client_that_leaves_is_aborted() -> None:
    port = FakeLink(silent)
    connection = Connection(app_state(port), "/v1/completions", {"prompt": ["a", "b", "c"], "n": 2})
    await turns()
    first, second, third = port.of(SubmitText)
    rows = [(second.id, Row(choice=0, finish=Finish.STOP)), (second.id, Row(choice=1, finish=Finish.STOP))]
    port.arrive(batch(rows))
    connection.leave()
    await connection.ended()
    assert port.of(Abort) == [Abort(first.id), Abort(third.id)]


@pytest.mark.parametrize("late", [False, True])
async def test_a_slow_client_is_aborted_while_its_write_waits(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves, or its timeout has passed."""
    aborted = asyncio.Event()
    port = FakeLink(lambda _, message: aborted.set() if isinstance(message, Abort) else None)
    loop, timers = asyncio.get_running_loop(), list[Callable[[], None]]()

    def recorded(seconds: float, expire: Callable[[], None]) -> asyncio.TimerHandle:
        timers.append(expire)
        return loop.call_at(loop.time() + seconds, expire)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_later", recorded)
        headers = [(b"x-request-timeout", b"60")] if late else []
        connection = Connection(app_state(port), CHAT, HELLO | {"stream": True}, *headers)
        await turns()
    request = request_of(port)
    connection.reading.clear()
    port.arrive(batch([(request.id, Row(text="Hi"))]))
    await turns()
    if late:
        timers[0]()
    else:
        connection.leave()
    await asyncio.wait_for(aborted.wait(), LIMIT)
    assert port.of(Abort) == [Abort(request.id)]
    assert not connection.task.done()
    connection.reading.set()
    await connection.ended()


async def test_nothing_waits_for_a_request_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task waits for its client to leave, and no timer holds it."""
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def recorded(*arguments: Any, **options: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*arguments, **options))
        return timers[-1]

    parts = app_state(FakeLink(answering(words("Hi"))))
    before = asyncio.all_tasks()
    monkeypatch.setattr(loop, "call_later", recorded)
    connection = Connection(parts, CHAT, HELLO, (b"x-request-timeout", b"60"))
    await connection.task
    await turns()
    assert connection.status == 200
    assert asyncio.all_tasks() == before
    assert [timer.cancelled() for timer in timers] == [True]


async def test_an_abort_waits_for_credit_and_is_then_sent() -> None:
    port = FakeLink(silent)
    parts = app_state(port)
    connection = Connection(parts, CHAT, HELLO)
    await turns()
    assert port.peer is not None
    port.peer.credit = 0
    connection.leave()
    await connection.ended()
    assert port.of(Abort) == []
    assert parts.engine_client.statistics().aborts_owed == 1
    port.peer.credit = 1
    parts.engine_client._router.flush()
    assert port.of(Abort) == [Abort(request_of(port).id)]
    assert parts.engine_client.statistics().aborts_owed == 0


async def test_a_client_that_leaves_while_its_text_is_tokenized() -> None:
    port = FakeLink(silent)
    parts = app_state(port)
    connection = Connection(parts, "/tokenize", {"prompt": "a"})
    await turns()
    assert len(port.of(Tokenize)) == 1
    connection.leave()
    await connection.ended()
    assert connection.sent == []
    assert [status for _, status in parts.traffic.responses.elements()] == [499]


async def test_deltas_for_a_slow_client_are_merged() -> None:
    port = FakeLink(silent)
    slow = Connection(app_state(port), CHAT, HELLO | {"stream": True})
    await turns()
    number = request_of(port).id
    port.arrive(batch([(number, Row(text="one", extra={"prompt_tokens": 3}))]))
    await slow.until("one")
    slow.reading.clear()
    for k in range(100):
        port.arrive(batch([(number, Row(text=f" {k}"))]))
        await turns(2)
    writes = len(slow.sent)
    slow.reading.set()
    port.arrive(batch([(number, Row(text=".", finish=Finish.STOP))]))
    await slow.ended()
    assert len(slow.sent) <= writes + 3
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in slow.text.split("\n\n")[:-2]]
    assert "".join(delta.get("content", "") for delta in deltas) == "one" + "".join(f" {k}" for k in range(100)) + "."


async def test_one_write_per_step() -> None:
    port = FakeLink(answering(words("a", "b", "c")))
    connection = Connection(app_state(port), CHAT, HELLO | {"stream": True, "n": 4})
    await connection.ended()
    assert len(connection.sent) == 1 + 3  # the headers, then one body per step whatever it held


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("rejected", "status", "kind"),
    [
        ({"status": 400, "param": "messages", "code": "context_length_exceeded"}, 400, "invalid_request_error"),
        ({"status": 429, "retry_after": 7.2}, 429, "rate_limit_error"),
        ({"status": 503}, 503, "service_unavailable"),
        ({"status": 500}, 500, "server_error"),
        ({"status": 418}, 500, "server_error"),
    ],
)
async def test_a_rejection_keeps_its_status(rejected: dict[str, Any], status: int, kind: str, stream: bool) -> None:
    port = FakeLink(silent)
    async with client(app_state(port)) as http:
        asking = asyncio.ensure_future(http.post(CHAT, json=HELLO | {"stream": stream}))
        await turns(20)
        port.arrive(Rejected(id=request_of(port).id, message="the prompt is too long", **rejected))
        answer = await asking
    assert answer.status_code == status
    check_error(answer.json(), kind, rejected.get("param"))
    assert answer.headers.get("retry-after") == ("8" if status == 429 else None)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("finish", [Finish.ERROR, Finish.ABORT])
async def test_a_failure_before_the_first_token(finish: Finish) -> None:
    extra = {"error": "the logits were not finite"} if finish == Finish.ERROR else {}
    for stream in (True, False):
        port = FakeLink(answering(lambda request: [[Row(tokens=0, finish=finish, extra=extra)]]))
        async with client(app_state(port)) as http:
            answer = await http.post(CHAT, json=HELLO | {"stream": stream})
        assert answer.status_code == (500 if finish == Finish.ERROR else 503)
        check_error(answer.json(), "server_error" if finish == Finish.ERROR else "service_unavailable", None)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), ("/v1/completions", {"prompt": "a"})])
async def test_what_the_operator_ends_is_complete_as_it_is(path: str, body: dict[str, Any], stream: bool) -> None:
    rows = [[Row(text="a", extra={"prompt_tokens": 1, "cached_tokens": 0})], [Row(tokens=0, finish=Finish.ABORT)]]
    async with client(app_state(FakeLink(answering(lambda request: rows)))) as http:
        answer = await http.post(path, json=body | {"stream": stream})
    assert answer.status_code == 200
    assert '"finish_reason":"abort"' in answer.text.replace(" ", "")
    assert "error" not in answer.text


async def test_other_apis_have_no_word_for_it() -> None:
    rows = [[Row(text="a", extra={"prompt_tokens": 1, "cached_tokens": 0})], [Row(tokens=0, finish=Finish.ABORT)]]
    async with client(app_state(FakeLink(answering(lambda request: rows)))) as http:
        answer = await http.post("/v1/messages", json={**HELLO, "max_tokens": 4})
    assert answer.status_code == 503


async def test_a_structure_that_cannot_be_followed_is_the_requests_own_fault() -> None:
    rows = [[Row(tokens=0, finish=Finish.GRAMMAR, extra={"error": "too many states"})]]
    for stream in (True, False):
        async with client(app_state(FakeLink(answering(lambda request: rows)))) as http:
            answer = await http.post(CHAT, json=HELLO | {"stream": stream})
        assert answer.status_code == 400
        check_error(answer.json(), "invalid_request_error", None)
        assert answer.json()["error"]["code"] == "grammar_failed"
        assert "too many states" in answer.json()["error"]["message"]


async def test_a_failure_in_a_stream_is_its_last_frame() -> None:
    def steps(request: SubmitText) -> list[list[Row]]:
        fine = [Row(text="a", choice=c, extra={"prompt_tokens": 1}) for c in range(2)]
        return [fine, [Row(text="b", choice=1, finish=Finish.ERROR, extra={"error": "lost"})], [Row(text="never")]]

    port = FakeLink(answering(steps))
    async with client(app_state(port)) as http:
        answer = await http.post(CHAT, json=HELLO | {"stream": True, "n": 2})
    assert answer.status_code == 200
    blocks = answer.text.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    check_error(json.loads(blocks[-2][6:]), "server_error", None)
    assert '"finish_reason":"' not in answer.text
    assert port.of(Abort) == [Abort(request_of(port).id)]  # the other choice has nobody to go to


async def test_a_failed_choice_fails_the_whole_answer() -> None:
    def steps(request: SubmitText) -> list[list[Row]]:
        return [[Row(text="a", choice=0, finish=Finish.STOP), Row(choice=1, finish=Finish.ERROR)]]

    async with client(app_state(FakeLink(answering(steps)))) as http:
        answer = await http.post(CHAT, json=HELLO | {"n": 2})
    assert answer.status_code == 500


@pytest.mark.parametrize("stream", [True, False])
async def test_a_lost_tokenizers_requests_go_on_at_another(stream: bool) -> None:
    ports = [FakeLink(silent, 0), FakeLink(silent, 1)]
    parts = app_state(ports)
    connection = Connection(parts, CHAT, HELLO | {"stream": stream})
    await turns()
    home, other = ports if ports[0].of(SubmitText) else ports[::-1]
    home.arrive(batch([(home.of(SubmitText)[0].id, Row(text="Hi", extra={"prompt_tokens": 3}))]))
    await turns()
    home.lose()
    (moved,) = other.of(SubmitText)
    other.arrive(batch([(moved.id, Row(text=" there", finish=Finish.STOP))]))
    await connection.ended()
    assert connection.status == 200
    assert "service_unavailable" not in connection.text
    assert " there" in connection.text
    assert connection.text.endswith("data: [DONE]\n\n") == stream
    assert parts.engine_client.statistics().unfinished == 0


async def test_what_outlasts_the_drain_ends_with_a_reason() -> None:
    parts = app_state(FakeLink(silent))
    streaming = Connection(parts, CHAT, HELLO | {"stream": True})
    asking = Connection(parts, "/tokenize", {"prompt": "a"})
    await turns()
    parts.engine_client.fail_all(Unavailable("the server is shutting down", code="draining"))
    await asyncio.gather(streaming.ended(), asking.ended())
    for connection in (streaming, asking):
        assert connection.status == 503
        assert json.loads(connection.text)["error"]["code"] == "draining"


async def test_a_bug_of_ours_in_a_stream_cuts_it_short_and_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    port = FakeLink(silent)
    connection = Connection(app_state(port), CHAT, HELLO | {"stream": True})
    await turns()
    number = request_of(port).id
    port.arrive(batch([(number, Row(text="one", extra={"prompt_tokens": 3}))]))
    await connection.until("one")
    monkeypatch.setattr(SSEEncoder, "take", lambda *_: 1 / 0)
    port.arrive(batch([(number, Row(text="two"))]))
    with pytest.raises(ZeroDivisionError):  # the server closes the connection, so no client takes it for an end
        await connection.ended()
    assert "[DONE]" not in connection.text
    assert port.of(Abort) == [Abort(number)]


async def test_the_time_to_the_first_token_is_counted_once() -> None:
    parts = app_state(FakeLink(answering(words("a", "b", "c"))))
    started = time.monotonic()
    async with client(parts) as http:
        await http.post(CHAT, json=HELLO | {"stream": True, "n": 2})
    took = time.monotonic() - started
    first = parts.traffic.timings.first_token.statistics()
    assert sum(first.counts) == 1
    assert 0 < first.total < took
    assert sum(parts.traffic.timings.inter_token.statistics().counts) == 4


VERSIONED = [
    (CHAT, HELLO),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/messages", {**HELLO, "max_tokens": 4}),
    ("/v1/responses", {"input": "a"}),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), VERSIONED)
async def test_answers_of_every_api_tell_the_weights_that_their_tokens_came_from(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    """Where an operator can change them."""
    rows = [
        [Row(text="a", extra={"prompt_tokens": 1, "cached_tokens": 0, "weights": ((0, "0"),)})],
        [Row(text="b", finish=Finish.STOP, extra={"weights": ((1, "step-1"),)})],
    ]
    found = []
    for address in ("unix:/none", ""):
        port = FakeLink(answering(lambda request: rows))
        async with client(app_state(port, admin_address=address)) as http:
            found.append(await http.post(path, json=body | {"stream": stream}))
    told, silent = found
    assert "x-penstock-weight-version" not in silent.headers
    assert "weight_version" not in silent.text
    assert told.headers.get("x-penstock-weight-version") == (None if stream else "0,step-1")
    spans = [{"index": 0, "start": 0, "weight_version": "0"}, {"index": 0, "start": 1, "weight_version": "step-1"}]
    remarks = {"weight_version": "step-1", "weight_versions": spans}
    assert told.text.count(json.dumps(remarks, separators=(",", ":"))) == 1
