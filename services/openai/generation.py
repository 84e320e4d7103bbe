"""One generation path for every API: a request goes to the engine, and its outputs become a response.

Each API parses its body into a `GenerateRequest` and brings an encoder of the outputs; `generate` does the rest.

A response begins with the first output, so a refusal by a later process still has its own HTTP status. From then on
each batch that arrives is written to the connection at once, past the request's own task. That task wakes for the end,
for an error, and when the client is slow: it then waits for the connection while deltas merge in the collector.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import msgspec

from penstock.protocol.errors import RequestError
from penstock.protocol.messages import SubmitText
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.output_collector import OWN_NAMES, Choice, OutputCollector
from penstock.services.http.connection import StreamWriter
from penstock.services.http.request_context import (
    STREAM_WRITER,
    ClientDisconnect,
    RequestContext,
    bug,
)
from penstock.services.openai.answers import Identity
from penstock.services.openai.app_state import AppState
from penstock.services.openai.images import GivenImage, read

WEIGHT_VERSION = b"x-penstock-weight-version"  # of those that an answer came from, or several with commas

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on at once
)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is asked: each of `prompts` has as many choices, numbered prompt by prompt."""

    id: str  # the response's
    prompts: tuple[SubmitText, ...]  # yet without what the connection says of their sender
    user: str | None = None  # the sender, as the body calls it
    images: tuple[GivenImage, ...] = ()  # of the one prompt, yet to be read
    least_aborted: int | None = None  # tokens of a choice that the operator ended, where the API has a word for that
    field_names: Mapping[str, str] = OWN_NAMES  # what the API calls the fields that other processes name in errors


class ResponseEncoder(Protocol):
    """An API's encoding of the outputs, as one body or as the events of a stream."""

    def response(self, outputs: OutputCollector) -> bytes:
        """The body of a response that is not streamed."""

    def take(self, outputs: OutputCollector, updated: list[Choice]) -> bytes:
        """Events of everything that the choices of `updated` have to give, which is thereby taken."""

    def end(self, outputs: OutputCollector) -> bytes:
        """The last events of a complete response."""

    def failure(self, outputs: OutputCollector, error: RequestError) -> bytes:
        """The last events of a stream that cannot go on."""


Parsed = tuple[GenerateRequest, ResponseEncoder]


async def generate(
    parse: Callable[[AppState, RequestContext], Awaitable[Parsed]], app: AppState, context: RequestContext
) -> None:
    """An endpoint of the API whose bodies `parse` reads."""
    await respond(app, *await parse(app, context), context)


async def respond(app: AppState, request: GenerateRequest, encoder: ResponseEncoder, context: RequestContext) -> None:
    """Answer with the outputs, as they come or in one piece. Raises what the engine refuses the request with, and
    ClientDisconnect."""
    if request.images:
        request = await read_images(app, request, context)
    outputs = submit(app, request, context)
    async with attended(outputs, app.engine_client, context):
        if outputs.stream:
            await stream(outputs, encoder, context)
        else:
            await whole(outputs, context)
            await context.send_json(encoder.response(outputs))


async def read_images(app: AppState, request: GenerateRequest, context: RequestContext) -> GenerateRequest:
    """The request with its images read. Raises as `services.openai.images.read` does."""
    (prompt,) = request.prompts
    prompt = msgspec.structs.replace(prompt, images=await read(app, context, request.images, request.user))
    return msgspec.structs.replace(request, prompts=(prompt,), images=())


def submit(app: AppState, request: GenerateRequest, context: RequestContext) -> OutputCollector:
    """The outputs to come. Raises what the engine refuses the request with at once."""
    now, first = time.monotonic(), request.prompts[0]
    outputs = OutputCollector(
        len(request.prompts), first.n, stream=first.stream, timings=app.traffic.timings, now=now,
        name=request.id, field_names=request.field_names, least_aborted=request.least_aborted,
        versioned=bool(app.config.api.admin_address),
    )  # fmt: skip
    session, client = context.sender(request.user)
    sender: dict[str, Any] = {"session": session, "client": client, "adapter": context.adapter}
    if outputs.versioned and not first.rid:
        sender["rid"] = context.id.decode()
    app.engine_client.submit([msgspec.structs.replace(each, **sender) for each in request.prompts], outputs, now)
    return outputs


def new_identity(prefix: str, app: AppState, context: RequestContext) -> Identity:
    """Of a response to a request whose body has been read."""
    return Identity(prefix + secrets.token_hex(16), int(time.time()), model_name(app, context))


def model_name(app: AppState, context: RequestContext) -> str:
    """The name that responses carry."""
    return app.model.names[0] if context.adapter is None else context.adapter.name


async def whole(outputs: OutputCollector, context: RequestContext) -> None:
    """Wait for the last output. The response's headers tell its weights. Raises the engine's error, or
    ClientDisconnect."""
    await outputs.get()
    if outputs.disconnected:
        raise ClientDisconnect
    if (failure := outputs.failure) is not None:
        raise failure
    if outputs.versioned:
        given = dict(context.response_headers).get(WEIGHT_VERSION)
        versions = dict.fromkeys([*([] if given is None else given.decode().split(",")), *outputs.versions])
        others = [each for each in context.response_headers if each[0] != WEIGHT_VERSION]
        context.response_headers = [*others, (WEIGHT_VERSION, ",".join(versions).encode())]


async def stream(outputs: OutputCollector, encoder: ResponseEncoder, context: RequestContext) -> None:
    """Send the outputs as they come; everything new goes out in one write.

    Raises ClientDisconnect, and the engine's error if nothing was sent yet; a later error is sent as the last event.
    """
    updated = await outputs.get()
    if outputs.error is not None and not outputs.disconnected and (failure := outputs.failure) is not None:
        raise failure
    writer: StreamWriter | None = context.scope.get(STREAM_WRITER)
    if not outputs.disconnected:
        await context.start(200, STREAM_HEADERS)

    def write(outputs: OutputCollector, updated: list[Choice]) -> bool:
        """As `services.client.output_collector.Sink`."""
        if writer is None or not writer.open:
            return False
        try:
            if body := encoder.take(outputs, updated):
                writer.write(body)
        except Exception:  # guard: design 7, one request that finds a bug of ours ends alone
            outputs.fail(bug(context))
        return True

    while not outputs.disconnected:
        ended, error = outputs.ended, outputs.error
        body = encoder.take(outputs, updated)
        if error is not None:
            body += encoder.failure(outputs, error)
        elif ended:
            body += encoder.end(outputs)
        if body:
            await context.send({"type": "http.response.body", "body": body, "more_body": not ended})
        if ended:
            return
        updated = await outputs.get(write)
    raise ClientDisconnect


@asynccontextmanager
async def attended(
    outputs: OutputCollector, engine_client: EngineClient, context: RequestContext
) -> AsyncIterator[None]:
    """While inside, the client's disconnect or the request's timeout aborts the request at once; on the way out
    whatever is left of it is aborted."""

    def on_disconnect(_: object) -> None:
        engine_client.abort(outputs)
        outputs.disconnect()

    leaving = asyncio.ensure_future(context.receive())  # the body was read: all that can come is the disconnect
    leaving.add_done_callback(on_disconnect)
    try:
        if context.timeout == math.inf:
            yield
        else:
            with timed(outputs, engine_client, context):
                yield
    finally:
        leaving.remove_done_callback(on_disconnect)
        leaving.cancel()
        if outputs.open:
            engine_client.abort(outputs)
        note(outputs, context)


def note(outputs: OutputCollector, context: RequestContext) -> None:
    """Tell the log, the metrics and the trace what became of a request that has ended."""
    outcome, usage = context.outcome, outputs.usage
    outcome.prompt_tokens, outcome.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    if outputs.error is not None and not outputs.disconnected:
        outcome.reason = outputs.error.code
    if outputs.first_token is not None:
        outcome.first_token = outputs.first_token - context.started
    if outputs.operation is not None:
        outputs.end_trace(time.monotonic())


@contextmanager
def timed(outputs: OutputCollector, engine_client: EngineClient, context: RequestContext) -> Iterator[None]:
    """While inside, the request's timeout ends it, queued or running."""
    left = context.time_left(time.monotonic())
    if left == math.inf:
        yield
        return

    def expire() -> None:
        if not outputs.ended:
            engine_client.abort(outputs)
            outputs.fail(context.deadline_exceeded())

    timer = asyncio.get_running_loop().call_later(left, expire)
    try:
        yield
    finally:
        timer.cancel()
