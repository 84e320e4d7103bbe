"""POST /v1/chat/completions. Source: OpenAI API reference, "Create chat completion"."""

from __future__ import annotations

import secrets
import time

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.protocol.config import CLAMP_ALL
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar, Reasoning, SubmitText, ToolUse, TraceContext
from penstock.services.client.model_info import ServedModel
from penstock.services.client.output_collector import Reply
from penstock.services.client.session import client_of, session_of
from penstock.services.client.submission import submission
from penstock.services.http import request_context as exchange
from penstock.services.http.connection import outlet_of
from penstock.services.http.query import with_query
from penstock.services.http.stream_writer import attended, stream, whole
from penstock.services.openai import limits as bounds
from penstock.services.openai import unsupported as refusals
from penstock.services.openai.answers import Identity, Told, chat_answer
from penstock.services.openai.app_state import Service
from penstock.services.openai.conversation import conversation
from penstock.services.openai.errors import send_json
from penstock.services.openai.parameters import Lengths, choices, prompt_logprobs, wants_usage
from penstock.services.openai.raw_fields import members_of
from penstock.services.openai.schema import ChatRequest
from penstock.services.openai.sse import Frames
from penstock.services.openai.tools import tools_asked
from penstock.services.openai.validation import read_json
from penstock.services.tracing.propagation import trace_context

REQUEST = msgspec.json.Decoder(ChatRequest)


class ChatCompletions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        members = await members_of(await read_json(scope, receive, service.config.api))
        request = with_query(members.decode(REQUEST), scope)
        service.model.check_name(request.model)
        exchange.of(scope).bound(request.timeout, "timeout")
        bounds.check(request, service.config.api)
        n = choices(request, 1)
        refusals.check(members.fields, refusals.REFUSED_IN_CHAT, n)
        check_template(request, trusted=service.config.tokenizer.trust_request_chat_template)
        usage = wants_usage(request)
        number = service.pipeline.new_id()
        session = session_of(scope, request.user)
        trace, clamp = trace_context(scope), service.config.api.clamp_max_tokens == CLAMP_ALL
        submit = chat_submission(request, number, service.model, n, trace, session, clamp=clamp)
        identity = Identity("chatcmpl-" + secrets.token_hex(16), int(time.time()), service.model.name)
        now = time.monotonic()
        streaming = bool(request.stream)
        reply = Reply(1, n, stream=streaming, timings=service.traffic.timings, now=now, name=identity.id)
        service.pipeline.submit([submit], reply, now, client_of(scope, request.user))
        async with attended(reply, service.pipeline, receive, exchange.of(scope)):
            told = Told.of(request, submit.tool_use)
            if streaming:
                frames = Frames(identity, chat=True, choices=n, usage=usage, told=told)
                await stream(reply, frames, send, outlet_of(scope), exchange.of(scope))
                return
            await whole(reply)
            await send_json(send, msgspec.json.encode(chat_answer(identity, reply, told)))


def chat_submission(
    request: ChatRequest,
    number: int,
    model: ServedModel,
    n: int,
    trace: TraceContext,
    session: str = "",
    *,
    clamp: bool = False,
    late: bool = False,
) -> SubmitText:
    """The request as the message with id `number`; `clamp` and `late` as in `Lengths`.

    Raises InvalidRequest or NotBuilt naming the parameter.
    """
    chat = conversation(request)
    asked = tools_asked(request)
    length = msgspec.structs.replace(lengths(request), clamp=clamp, late=late)
    found = submission(request, length, model, n, trace)
    check_structure(asked.use, found.grammar)
    return msgspec.structs.replace(
        found,
        id=number,
        session=session,
        messages=chat.messages,
        tools=asked.tools,
        tool_use=asked.use,
        reasoning=reasoning_of(request),
        chat_template=request.chat_template,
        template_arguments=chat.template_arguments,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        add_special_tokens=bool(request.add_special_tokens),  # the template writes its own unless told otherwise
    )


def check_structure(use: ToolUse | None, grammar: Grammar | None) -> None:
    """Raise InvalidRequest for an answer that must be a call and must follow a grammar. A `response_format` is for
    answers that are no calls, so it goes with every `tool_choice`."""
    if use is None or not use.required or grammar is None or grammar.param.partition(".")[0] == "response_format":
        return
    message = f"{grammar.param} and tool_choice: the choice makes every answer a call, which follows no grammar"
    raise InvalidRequest(message, param=grammar.param, code="invalid_value")


def check_template(request: ChatRequest, *, trusted: bool) -> None:
    """Raise InvalidRequest for a template of the request's own that the server does not take."""
    if request.chat_template is not None and not trusted:
        message = "chat_template is taken only by a server that was started with --trust-request-chat-template"
        raise InvalidRequest(message, param="chat_template", code="unsupported")


def reasoning_of(request: ChatRequest) -> Reasoning:
    """Raises InvalidRequest where the two names of the budget contradict each other."""
    budget, other = request.thinking_token_budget, request.max_thinking_tokens
    if budget is not None and other is not None and budget != other:
        message = "thinking_token_budget and max_thinking_tokens differ; give one of them"
        raise InvalidRequest(message, param="max_thinking_tokens", code="invalid_value")
    return Reasoning(
        effort=request.reasoning_effort or "",
        budget=other if budget is None else budget,
        split=request.separate_reasoning is not False,
    )


def lengths(request: ChatRequest) -> Lengths:
    """Output length and logprobs under the names they have in chat. Raises InvalidRequest where they contradict.

    Without a length the answer may take all the room that the prompt leaves.
    """
    most, param = request.max_completion_tokens, "max_completion_tokens"
    if most is None:
        most, param = request.max_tokens, "max_tokens"
    elif request.max_tokens is not None and request.max_tokens != most:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens", code="invalid_value"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    return Lengths(
        max_tokens=most,
        max_tokens_param=param,
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
        prompt_logprobs=prompt_logprobs(request),
    )
