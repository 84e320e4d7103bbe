"""POST /v1/messages and POST /v1/messages/count_tokens. Source: Anthropic API reference, "Messages"."""

from __future__ import annotations

import secrets
import time

import msgspec

from penstock.protocol import limits
from penstock.protocol.config import CLAMP_NONE
from penstock.protocol.errors import RequestError
from penstock.protocol.messages import Tokenize, Tokenized
from penstock.services.client.model_info import ServedModel
from penstock.services.client.output_collector import Reply
from penstock.services.http.request_context import RequestContext
from penstock.services.http.stream_writer import answered, attended, stream, whole
from penstock.services.openai.answers import Identity
from penstock.services.openai.app_state import AppState
from penstock.services.openai.chat import chat_submission, conversation, reasoning_of
from penstock.services.openai.messages import errors
from penstock.services.openai.messages.output import MessageEvents, TokenCount, Told, Uncleared, message_answer
from penstock.services.openai.messages.request import HEADER, REASONS, REFUSALS, CountRequest, MessageRequest, ignored
from penstock.services.openai.messages.turns import chat_request
from penstock.services.openai.parameters import check_limits, check_unsupported_in
from penstock.services.openai.tools import tools_asked
from penstock.services.openai.validation import decode, raw_fields, with_query

REQUEST = msgspec.json.Decoder(MessageRequest)
COUNT = msgspec.json.Decoder(CountRequest)


async def create_message(app: AppState, context: RequestContext) -> None:
    """POST /v1/messages."""
    body = await context.read_json()
    request = with_query(decode(body, REQUEST), context)
    app.model.check_name(request.model)
    context.set_timeout(request.timeout, "timeout")
    check_unsupported_in(raw_fields(body), REFUSALS, REASONS)
    identity = Identity("msg_" + secrets.token_hex(16), int(time.time()), app.model.name)
    now, timings = time.monotonic(), app.traffic.timings
    reply = Reply(1, 1, stream=bool(request.stream), timings=timings, now=now, name=identity.id)
    told = Told.of(request, context.id.decode())
    try:
        remark_ignored(request, app.model, context)
        chat = chat_request(request)
        check_limits(chat, app.config.api)
        number = app.pipeline.new_id()
        user = request.metadata.user_id if request.metadata else None
        submit = chat_submission(
            chat, number, app.model, 1, context.trace, context.session(user), late=True,
            clamp=app.config.api.clamp_max_tokens != CLAMP_NONE,
        )  # fmt: skip
        app.pipeline.submit([submit], reply, now, context.client(user))
        async with attended(reply, app.pipeline, context):
            if request.stream:
                await stream(reply, MessageEvents(identity, told), context)
                return
            await whole(reply)
            await context.send_json(msgspec.json.encode(message_answer(identity, reply, told)))
    except RequestError as error:
        errors.told(error)
        raise


async def count_message_tokens(app: AppState, context: RequestContext) -> None:
    """How many tokens the prompt of a message would have."""
    body = await context.read_json()
    request = decode(body, COUNT)
    app.model.check_name(request.model)
    check_unsupported_in(raw_fields(body), REFUSALS, REASONS)
    try:
        remark_ignored(request, app.model, context)
        question = count_question(request, app.pipeline.new_id())
        found = await answered(app.pipeline.ask(question), context)
    except RequestError as error:
        errors.told(error)
        raise
    assert isinstance(found, Tokenized)
    count = len(found.token_ids) // 4
    edits = msgspec.UNSET if request.context_management is None else Uncleared(count)
    await context.send_json(msgspec.json.encode(TokenCount(count, edits)))


def remark_ignored(request: MessageRequest | CountRequest, model: ServedModel, context: RequestContext) -> None:
    """Name in a header the edits of the conversation that could change something, of which none is made."""
    if request.context_management is not None:
        found = ignored(request.context_management, request.messages, model.max_model_len)
        if found:
            context.response_headers.append((HEADER, ", ".join(found).encode()))


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
