"""A request for text, whatever API it came by: submitted to the engine, and answered with what its API makes of it.

Each API parses its body into a `GenerateRequest` and gives an encoder for the outputs; `generate` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from penstock.protocol.messages import SubmitText
from penstock.services.client.output_collector import OWN_NAMES, OutputCollector
from penstock.services.http.request_context import RequestContext
from penstock.services.http.stream_writer import Framing, attended, stream, whole
from penstock.services.openai.app_state import AppState


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is asked: each of `prompts` has n choices, numbered prompt by prompt."""

    id: str  # the response's
    prompts: tuple[SubmitText, ...]
    n: int = 1
    stream: bool = False
    field_names: Mapping[str, str] = OWN_NAMES  # what the API calls the fields that other processes name in errors


class ResponseEncoder(Framing, Protocol):
    """An API's encoding of the outputs."""

    def response(self, outputs: OutputCollector) -> bytes:
        """The body of a response that is not streamed."""


async def generate(app: AppState, request: GenerateRequest, encoder: ResponseEncoder, context: RequestContext) -> None:
    """Answer with the outputs, as they come or in one piece. Raises what the engine refuses the request with, and
    ClientDisconnect."""
    outputs = submit(app, request)
    async with attended(outputs, app.engine_client, context):
        if request.stream:
            await stream(outputs, encoder, context)
        else:
            await whole(outputs)
            await context.send_json(encoder.response(outputs))


def submit(app: AppState, request: GenerateRequest) -> OutputCollector:
    """The outputs to come. Raises what the engine refuses the request with at once."""
    now = time.monotonic()
    outputs = OutputCollector(
        len(request.prompts), request.n, stream=request.stream, timings=app.traffic.timings, now=now,
        name=request.id, field_names=request.field_names,
    )  # fmt: skip
    app.engine_client.submit(request.prompts, outputs, now)
    return outputs
