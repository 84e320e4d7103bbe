"""POST /v1/messages and POST /v1/messages/count_tokens. Source: Anthropic API reference, "Messages"."""

from __future__ import annotations

import secrets
import time

import msgspec
from starlette.types import Receive, Scope, Send

from protocol.errors import RequestError
from protocol.messages import Tokenize, Tokenized
from services.api import bounds, exchange, refusals
from services.api.answers import Identity
from services.api.chat import chat_submission
from services.api.connection import outlet_of
from services.api.conversation import conversation
from services.api.decoding import decode, read_json
from services.api.delivery import answered, attended, stream, whole
from services.api.errors import send_json
from services.api.messages.events import MessageEvents
from services.api.messages.output import TokenCount, message_answer
from services.api.messages.request import REASONS, REFUSALS, CountRequest, MessageRequest
from services.api.messages.turns import TERMS, chat_request
from services.api.query import with_query
from services.api.reply import Reply
from services.api.service import Service
from services.api.session import session_of
from services.api.terms import told_in
from services.api.tools import tools_asked
from services.api.trace import trace_context

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
        refusals.check_table(refusals.fields_of(body), REFUSALS, REASONS)
        identity = Identity("msg_" + secrets.token_hex(16), int(time.time()), service.model.name)
        now, timings = time.monotonic(), service.traffic.timings
        reply = Reply(1, 1, stream=bool(request.stream), timings=timings, now=now, name=identity.id)
        try:
            chat = chat_request(request)
            thinking = request.thinking is None or request.thinking.display != "omitted"
            bounds.check(chat, service.config.api)
            number, session = service.pipeline.new_id(), session_of(scope)
            submit = chat_submission(chat, number, service.model, 1, trace_context(scope), session)
            service.pipeline.submit([submit], reply, now)
            async with attended(reply, service.pipeline, receive, exchange.of(scope)):
                if request.stream:
                    frames = MessageEvents(identity, thinking=thinking)
                    await stream(reply, frames, send, outlet_of(scope), exchange.of(scope))
                    return
                await whole(reply)
                await send_json(send, msgspec.json.encode(message_answer(identity, reply, thinking=thinking)))
        except RequestError as error:
            told_in(error, TERMS)
            raise


class MessageTokens:
    """How many tokens the prompt of a message would have."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        request = decode(await read_json(scope, receive, service.config.api), COUNT)
        service.model.check_name(request.model)
        try:
            question = count_question(request, service.pipeline.new_id())
            found = await answered(service.pipeline.ask(question), receive)
        except RequestError as error:
            told_in(error, TERMS)
            raise
        assert isinstance(found, Tokenized)
        await send_json(send, msgspec.json.encode(TokenCount(len(found.token_ids) // 4)))


def count_question(request: CountRequest, number: int) -> Tokenize:
    """The question for the tokenizer. Raises InvalidRequest and NotBuilt naming the field."""
    message = MessageRequest(
        max_tokens=1,
        **{name: getattr(request, name) for name in ("messages", "model", "system", "tools", "tool_choice")},
    )
    chat = chat_request(message)
    found = conversation(chat)
    return Tokenize(
        id=number,
        messages=found.messages,
        tools=tools_asked(chat).tools,
        add_generation_prompt=found.add_generation_prompt,
        continue_final_message=found.continue_final_message,
        add_special_tokens=False,
    )
