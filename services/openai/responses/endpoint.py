"""The endpoints of the Responses API, and its work in the background. Source: OpenAI API reference, "Responses"."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Message

from penstock.protocol.errors import InvalidRequest, RequestError, Unsupported, invalid
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.output_collector import OutputCollector
from penstock.services.http.request_context import ClientDisconnect, RequestContext, bug
from penstock.services.metrics.requests import Traffic
from penstock.services.openai import generation
from penstock.services.openai.app_state import AppState
from penstock.services.openai.generation import GenerateRequest, note, timed, whole
from penstock.services.openai.parameters import check_unsupported
from penstock.services.openai.responses.events import ResponseEvents
from penstock.services.openai.responses.output import Deleted, ItemList, ResponseAnswer
from penstock.services.openai.responses.request import REASONS, REFUSALS, ResponseRequest
from penstock.services.openai.responses.turn import Turn, earlier_messages
from penstock.services.openai.validation import read_request, stream_asked
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

REQUEST = msgspec.json.Decoder(ResponseRequest)
ITEMS = msgspec.json.Decoder(list[dict[str, Any]])
PAGE = 20  # items, unless the query says another limit
MAX_PAGE = 100


async def create_response(app: AppState, context: RequestContext) -> None:
    """POST /v1/responses: at once, as a stream, or in the background."""
    turn, asked = await parse_response(app, context)
    if asked.images:
        asked = await generation.read_images(app, asked, context)
    (submit,) = asked.prompts
    turn.open(submit.sampling, submit.images)
    if turn.request.background:
        begun = app.background.begin(turn, generation.submit(app, asked, context), context, app.engine_client)
        await turn.saved()
        await context.send_json(msgspec.json.encode(begun))
        return
    send = context.send

    async def send_kept(message: Message) -> None:
        """End the response once it has been kept."""
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await turn.saved()
        await send(message)

    context.send = send_kept
    await generation.respond(app, asked, ResponseEvents(turn), context)


async def parse_response(app: AppState, context: RequestContext) -> tuple[Turn, GenerateRequest]:
    """The turn, which holds nothing of the body's memory, and what the engine is asked."""
    request, fields = await read_request(await context.read_json(), REQUEST, app.model, context)
    check_unsupported(fields, REFUSALS, REASONS)
    earlier = await earlier_messages(request.previous_response_id, app.responses)
    turn = Turn(request, app.responses, app.model, generation.model_name(app, context), earlier)
    submit = turn.submission(app.config.api, app.model, context.trace)
    return turn, GenerateRequest(id=turn.id, prompts=(submit,), user=request.user, images=turn.prompt.images,
                                 field_names=turn.field_names)  # fmt: skip


async def get_response(app: AppState, context: RequestContext) -> None:
    """A response that is kept."""
    if stream_asked(context):
        raise Unsupported("a response that was made cannot be streamed again", param="stream")
    await context.send_json((await app.responses.get(context.path_params["id"])).answer)


async def delete_response(app: AppState, context: RequestContext) -> None:
    """Delete a response that is kept; one that is being made in the background ends with that."""
    name = context.path_params["id"]
    await app.background.end(name)
    await app.responses.delete(name)
    await context.send_json(msgspec.json.encode(Deleted(id=name)))


async def cancel_response(app: AppState, context: RequestContext) -> None:
    """Cancel a response that is made in the background."""
    name = context.path_params["id"]
    if not msgspec.json.decode((await app.responses.get(name)).answer)["background"]:
        message = "only responses that were created with background can be cancelled"
        raise InvalidRequest(message, code="not_cancellable")
    await app.background.end(name)
    await context.send_json((await app.responses.get(name)).answer)


async def list_input_items(app: AppState, context: RequestContext) -> None:
    """The input items of a response that is kept, page by page."""
    items = ITEMS.decode((await app.responses.get(context.path_params["id"])).input)
    await context.send_json(msgspec.json.encode(page(items, dict(parse_qsl(context.query)))))


def page(items: list[dict[str, Any]], query: dict[str, str]) -> ItemList:
    """Part of the items, the newest first unless `order` is asc. Raises InvalidRequest for a query without sense."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= MAX_PAGE and len(limit) < 4):
        raise invalid("limit", f"must be a number from 1 to {MAX_PAGE}")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise invalid("after", "names none of the items")
        ordered = ordered[ids.index(after) + 1 :]
    found = ordered[: int(limit)]
    ends = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return ItemList(data=found, first_id=ends[0], last_id=ends[1], has_more=len(found) < len(ordered))


class BackgroundWork:
    """The responses that are being made in the background, while nobody waits for them. Their bodies count as
    unfinished until they end."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._running: dict[str, tuple[EngineClient, OutputCollector, asyncio.Task[None]]] = {}

    def begin(
        self, turn: Turn, collector: OutputCollector, context: RequestContext, engine_client: EngineClient
    ) -> ResponseAnswer:
        """The response as it stands now, which is kept. The request's timeout goes on."""
        turn.keep(turn.opening)
        context.background = True
        task = asyncio.create_task(self._finish(turn, collector, context, engine_client))
        self._running[turn.id] = (engine_client, collector, task)
        return turn.opening

    async def end(self, name: str) -> None:
        """End what is running under this name, and wait until it has been kept; nothing happens where it has ended."""
        found = self._running.get(name)
        if found is None:
            return
        engine_client, collector, task = found
        engine_client.abort(collector)
        collector.disconnect()
        await asyncio.shield(task)

    async def ended(self, seconds: float) -> None:
        """Wait so long for all of them to end, and to be kept."""
        if tasks := [task for _, _, task in self._running.values()]:
            logs.info(log, "draining_background", unfinished=len(tasks))
            await asyncio.wait(tasks, timeout=seconds)

    async def _finish(
        self, turn: Turn, collector: OutputCollector, context: RequestContext, engine_client: EngineClient
    ) -> None:
        status = "failed"
        try:
            with timed(collector, engine_client, context):
                await whole(collector, context)
            status = turn.whole(collector).status
        except ClientDisconnect:
            status = "cancelled"
            turn.keep(msgspec.structs.replace(turn.opening, status="cancelled"))
        except RequestError as error:
            turn.failed(error)
        except Exception:  # guard: design 7, one request that finds a bug of ours ends alone
            found = bug(context)
            context.outcome.reason = found.code
            turn.failed(found)
        finally:
            await turn.saved()
            del self._running[turn.id]
            engine_client.abort(collector)
            self._account(turn, collector, context, status)

    def _account(self, turn: Turn, collector: OutputCollector, context: RequestContext, status: str) -> None:
        """Count and log it, as the middleware does for requests that end with their response."""
        now, outcome = time.monotonic(), context.outcome
        context.budget.total -= context.size
        note(collector, context)
        self._traffic.ended(outcome.prompt_tokens, outcome.completion_tokens, outcome.reason)
        fields: dict[str, object] = {"id": context.id.decode(), "response": turn.id}
        if trace := context.trace.trace_id:
            fields["trace_id"] = trace
        fields.update(status=status, prompt_tokens=outcome.prompt_tokens, completion_tokens=outcome.completion_tokens)
        if outcome.reason:
            fields["reason"] = outcome.reason
        logs.info(log, "background", **fields, seconds=now - context.started)
