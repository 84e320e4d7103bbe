"""The routes of the Responses API. Source: OpenAI API reference, "Responses"."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Message, Receive, Scope, Send

from penstock.protocol.config import CLAMP_ALL
from penstock.protocol.errors import EngineFailure, InvalidRequest, NotBuilt, RequestError
from penstock.protocol.messages import PieceKind, SubmitText
from penstock.services.client.output_collector import Choice, Reply, Segment
from penstock.services.client.session import client_of, session_of
from penstock.services.http import request_context as exchange
from penstock.services.http.connection import outlet_of
from penstock.services.http.disconnect import ClientLeft
from penstock.services.http.query import stream_asked, with_query
from penstock.services.http.request_context import Exchange
from penstock.services.http.stream_writer import attended, stream, timed, whole
from penstock.services.openai.app_state import Service
from penstock.services.openai.chat import chat_submission
from penstock.services.openai.errors import send_json
from penstock.services.openai.field_aliases import told_in
from penstock.services.openai.output_blocks import Block, Blocks
from penstock.services.openai.parameters import check_limits, check_unsupported_in
from penstock.services.openai.responses.events import ResponseEvents
from penstock.services.openai.responses.output import Deleted, ItemList, ResponseAnswer, shaped
from penstock.services.openai.responses.request import REASONS, REFUSALS, ResponseRequest
from penstock.services.openai.responses.turn import Turn, earlier_messages
from penstock.services.openai.validation import decode, raw_fields, read_json
from penstock.services.supervisor import logs
from penstock.services.tracing.propagation import trace_context

log = logging.getLogger(__name__)

REQUEST = msgspec.json.Decoder(ResponseRequest)
ITEMS = msgspec.json.Decoder(list[dict[str, Any]])
PAGE = 20  # items, unless the query says another limit
MAX_PAGE = 100


class Responses:
    """Create a response: at once, as a stream, or in the background."""

    def __init__(self, service: Service, work: BackgroundWork) -> None:
        self._service = service
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_json(scope, receive, service.config.api)
        request = with_query(decode(body, REQUEST), scope)
        service.model.check_name(request.model)
        current = exchange.of(scope)
        current.bound(request.timeout, "timeout")
        check_unsupported_in(raw_fields(body), REFUSALS, REASONS)
        earlier = await earlier_messages(request.previous_response_id, service.responses)
        turn = Turn(request, service.responses, service.model.name, earlier)
        now, timings = time.monotonic(), service.traffic.timings
        reply = Reply(1, 1, stream=bool(request.stream), timings=timings, now=now, name=turn.id)
        try:
            self._submit(turn, reply, scope)
            if request.background:
                begun = self._work.begin(turn, reply, current)
                await turn.saved()
                await send_json(send, msgspec.json.encode(begun))
                return
            async with attended(reply, service.pipeline, receive, current):
                if request.stream:
                    await stream(reply, ResponseEvents(turn), Kept(turn, send), outlet_of(scope), current)
                    return
                await whole(reply)
                answer = completed(turn, reply)
                await turn.saved()
                await send_json(send, msgspec.json.encode(answer))
        except RequestError as error:
            told_in(error, turn.terms)
            raise

    def _submit(self, turn: Turn, reply: Reply, scope: Scope) -> None:
        service, user = self._service, turn.request.user
        trace, session = trace_context(scope), session_of(scope, user)
        check_limits(turn.chat, service.config.api)
        number = service.pipeline.new_id()
        clamp = service.config.api.clamp_max_tokens == CLAMP_ALL
        submit: SubmitText = chat_submission(turn.chat, number, service.model, 1, trace, session, clamp=clamp)
        turn.open(submit.sampling)
        service.pipeline.submit([submit], reply, time.monotonic(), client_of(scope, user))


class Kept:
    """`send` of a stream whose end is told when the response has been kept."""

    def __init__(self, turn: Turn, send: Send) -> None:
        self._turn = turn
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await self._turn.saved()
        await self._send(message)


class BackgroundWork:
    """Responses that nobody waits for, while they are made. Their bodies count until then."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[str, tuple[Reply, asyncio.Task[None]]] = {}

    def begin(self, turn: Turn, reply: Reply, current: Exchange) -> ResponseAnswer:
        """The response as it stands now, which is kept. What it has of time is what the exchange had."""
        turn.keep(turn.opening)
        current.lasting = True
        task = asyncio.create_task(self._finish(turn, reply, current))
        self._running[turn.id] = (reply, task)
        return turn.opening

    async def end(self, name: str) -> None:
        """End what is running under this name, and wait until it has been kept; nothing happens where it has ended."""
        found = self._running.get(name)
        if found is None:
            return
        reply, task = found
        self._service.pipeline.drop(reply)
        reply.leave()
        await asyncio.shield(task)

    async def ended(self, seconds: float) -> None:
        """Wait so long for all of them to end, and to be kept."""
        if tasks := [task for _, task in self._running.values()]:
            logs.info(log, "draining_background", unfinished=len(tasks))
            await asyncio.wait(tasks, timeout=seconds)

    async def _finish(self, turn: Turn, reply: Reply, current: Exchange) -> None:
        status = "failed"
        try:
            with timed(reply, self._service.pipeline, current):
                await whole(reply)
            status = completed(turn, reply).status
        except ClientLeft:
            status = "cancelled"
            turn.keep(msgspec.structs.replace(turn.opening, status="cancelled"))
        except RequestError as error:
            turn.failed(told_in(error, turn.terms))
        except Exception:  # guard: design 7, one request that finds a bug of ours ends alone
            trace = current.context.trace_id
            logs.exception(log, "request_failed", id=current.id.decode(), trace_id=trace, route=current.endpoint)
            bug = EngineFailure("the server failed on this request", code="internal_error")
            current.rejection = exchange.reason_of(bug)
            turn.failed(bug)
        finally:
            await turn.saved()
            del self._running[turn.id]
            self._service.pipeline.drop(reply)
            self._account(turn, reply, current, status)

    def _account(self, turn: Turn, reply: Reply, current: Exchange, status: str) -> None:
        """What the gate does of other requests, whose end is that of their answer."""
        now = time.monotonic()
        current.end()
        current.note(reply)
        reply.told(now)
        self._service.traffic.ended(current.prompt_tokens, current.completion_tokens, current.rejection)
        fields: dict[str, object] = {"id": current.id.decode(), "response": turn.id}
        if trace := current.context.trace_id:
            fields["trace_id"] = trace
        fields.update(status=status, prompt_tokens=current.prompt_tokens, completion_tokens=current.completion_tokens)
        if current.rejection:
            fields["reason"] = current.rejection
        logs.info(log, "background", **fields, seconds=now - current.started)


class StoredResponse:
    """Retrieve or delete a response that is kept; one that is being made in the background ends with that."""

    def __init__(self, service: Service, work: BackgroundWork) -> None:
        self._service = service
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["id"]
        store = self._service.responses
        if scope["method"] == "DELETE":
            await self._work.end(name)
            await store.delete(name)
            await send_json(send, msgspec.json.encode(Deleted(id=name)))
            return
        if stream_asked(scope):
            raise NotBuilt("a response that was made cannot be streamed again", param="stream")
        await send_json(send, (await store.get(name)).answer)


class CancelledResponse:
    """Cancel a response that is made in the background."""

    def __init__(self, service: Service, work: BackgroundWork) -> None:
        self._service = service
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["id"]
        store = self._service.responses
        if not msgspec.json.decode((await store.get(name)).answer)["background"]:
            message = "only responses that were created with background can be cancelled"
            raise InvalidRequest(message, code="not_cancellable")
        await self._work.end(name)
        await send_json(send, (await store.get(name)).answer)


class InputItems:
    """The input items of a response that is kept, page by page."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        items = ITEMS.decode((await self._service.responses.get(scope["path_params"]["id"])).input)
        await send_json(
            send, msgspec.json.encode(page(items, dict(parse_qsl(scope["query_string"].decode("latin-1")))))
        )


def page(items: list[dict[str, Any]], query: dict[str, str]) -> ItemList:
    """Part of the items, the newest first unless `order` is asc. Raises InvalidRequest for a query without sense."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order", code="invalid_value")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= MAX_PAGE and len(limit) < 4):
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_PAGE}", param="limit", code="invalid_value")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest("after names none of the items", param="after", code="invalid_value")
        ordered = ordered[ids.index(after) + 1 :]
    found = ordered[: int(limit)]
    ends = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return ItemList(data=found, first_id=ends[0], last_id=ends[1], has_more=len(found) < len(ordered))


def completed(turn: Turn, reply: Reply) -> ResponseAnswer:
    """The whole response of a reply that has ended."""
    (choice,) = reply.choices
    logprobs = shaped(choice.take_logprobs())
    return turn.complete(reply, written(choice), logprobs)


def written(choice: Choice) -> list[Block]:
    """A choice's blocks; one that said nothing has one of text."""
    blocks = Blocks()
    blocks.push(choice.take())
    if not blocks.all:
        blocks.push([Segment(PieceKind.CONTENT, "")])
    return blocks.all
