"""POST /v1/messages and POST /v1/messages/count_tokens. Source: Anthropic API reference, "Messages"."""

from __future__ import annotations

import secrets
import time

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.protocol import limits
from penstock.protocol.config import CLAMP_NONE
from penstock.protocol.errors import RequestError
from penstock.protocol.messages import Tokenize, Tokenized
from penstock.services.client.model_info import ServedModel
from penstock.services.client.output_collector import Reply
from penstock.services.client.session import client_of, session_of
from penstock.services.http import request_context as exchange
from penstock.services.http.connection import outlet_of
from penstock.services.http.query import with_query
from penstock.services.http.request_context import Exchange
from penstock.services.http.stream_writer import answered, attended, stream, whole
from penstock.services.openai.answers import Identity
from penstock.services.openai.app_state import Service
from penstock.services.openai.chat import chat_submission, conversation, reasoning_of
from penstock.services.openai.errors import send_json
from penstock.services.openai.messages import errors
from penstock.services.openai.messages.output import MessageEvents, TokenCount, Told, Uncleared, message_answer
from penstock.services.openai.messages.request import HEADER, REASONS, REFUSALS, CountRequest, MessageRequest, ignored
from penstock.services.openai.messages.turns import chat_request
from penstock.services.openai.parameters import check_limits, check_unsupported_in
from penstock.services.openai.tools import tools_asked
from penstock.services.openai.validation import decode, raw_fields, read_json
from penstock.services.tracing.propagation import trace_context

REQUEST = msgspec.json.Decoder(MessageRequest)
COUNT = msgspec.json.Decoder(CountRequest)


class Messages:
    """Create a message."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_json(scope, receive, service.config.api)
        request = with_query(decode(body, REQUEST), scope)
        service.model.check_name(request.model)
        exchange.of(scope).bound(request.timeout, "timeout")
        check_unsupported_in(raw_fields(body), REFUSALS, REASONS)
        identity = Identity("msg_" + secrets.token_hex(16), int(time.time()), service.model.name)
        now, timings = time.monotonic(), service.traffic.timings
        reply = Reply(1, 1, stream=bool(request.stream), timings=timings, now=now, name=identity.id)
        current = exchange.of(scope)
        told = Told.of(request, current.id.decode())
        try:
            remark_ignored(request, service.model, current)
            chat = chat_request(request)
            check_limits(chat, service.config.api)
            number = service.pipeline.new_id()
            user = request.metadata.user_id if request.metadata else None
            submit = chat_submission(
                chat, number, service.model, 1, trace_context(scope), session_of(scope, user), late=True,
                clamp=service.config.api.clamp_max_tokens != CLAMP_NONE,
            )  # fmt: skip
            service.pipeline.submit([submit], reply, now, client_of(scope, user))
            async with attended(reply, service.pipeline, receive, current):
                if request.stream:
                    await stream(reply, MessageEvents(identity, told), send, outlet_of(scope), current)
                    return
                await whole(reply)
                await send_json(send, msgspec.json.encode(message_answer(identity, reply, told)))
        except RequestError as error:
            errors.told(error)
            raise


class MessageTokens:
    """How many tokens the prompt of a message would have."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_json(scope, receive, service.config.api)
        request = decode(body, COUNT)
        service.model.check_name(request.model)
        check_unsupported_in(raw_fields(body), REFUSALS, REASONS)
        try:
            remark_ignored(request, service.model, exchange.of(scope))
            question = count_question(request, service.pipeline.new_id())
            found = await answered(service.pipeline.ask(question), receive)
        except RequestError as error:
            errors.told(error)
            raise
        assert isinstance(found, Tokenized)
        count = len(found.token_ids) // 4
        edits = msgspec.UNSET if request.context_management is None else Uncleared(count)
        await send_json(send, msgspec.json.encode(TokenCount(count, edits)))


def remark_ignored(request: MessageRequest | CountRequest, model: ServedModel, current: Exchange) -> None:
    """Name in a header the edits of the conversation that could change something, of which none is made."""
    if request.context_management is not None:
        found = ignored(request.context_management, request.messages, model.max_model_len)
        if found:
            current.headers.append((HEADER, ", ".join(found).encode()))


def count_question(request: CountRequest, number: int) -> Tokenize:
    """The question for the tokenizer. Raises InvalidRequest and NotBuilt naming the field."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    chat = chat_request(MessageRequest(max_tokens=limits.MAX_TOKEN_ID, **fields))
    found = conversation(chat)
    return Tokenize(
        id=number,
        messages=found.messages,
        tools=tools_asked(chat).tools,
        reasoning=reasoning_of(chat),
        template_arguments=found.template_arguments,
        add_generation_prompt=found.add_generation_prompt,
        continue_final_message=found.continue_final_message,
        add_special_tokens=False,
    )
