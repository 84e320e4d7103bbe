"""POST /v1/chat/completions. Source: OpenAI API reference, "Create chat completion"."""

from __future__ import annotations

import secrets
import time

import msgspec

from penstock.protocol.config import CLAMP_ALL
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Client, Grammar, SubmitText, ToolUse, TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.answers import Identity, Told
from penstock.services.openai.app_state import AppState
from penstock.services.openai.chat_prompt import chat_prompt
from penstock.services.openai.generation import GenerateRequest, generate
from penstock.services.openai.parameters import (
    UNSUPPORTED_IN_CHAT,
    Lengths,
    check_limits,
    check_unsupported,
    choices,
    prompt_logprobs,
    submission,
    wants_usage,
)
from penstock.services.openai.schema import ChatRequest
from penstock.services.openai.sse import Frames
from penstock.services.openai.validation import read_fields, with_query

REQUEST = msgspec.json.Decoder(ChatRequest)


async def create_chat_completion(app: AppState, context: RequestContext) -> None:
    """POST /v1/chat/completions."""
    options, model = app.config.api, app.model
    fields = await read_fields(await context.read_json())
    request = with_query(fields.decode(REQUEST), context)
    model.check_name(request.model)
    context.set_timeout(request.timeout, "timeout")
    check_limits(request, options, ("top_logprobs", request.top_logprobs))
    n = choices(request, 1)
    check_unsupported(fields.fields, UNSUPPORTED_IN_CHAT, n)
    if request.chat_template is not None and not app.config.tokenizer.trust_request_chat_template:
        message = "chat_template is taken only by a server that was started with --trust-request-chat-template"
        raise InvalidRequest(message, param="chat_template", code="unsupported")
    usage = wants_usage(request)
    session, client = context.session(request.user), context.client(request.user)
    submit = chat_submission(
        request, app.engine_client.new_id(), model, n, context.trace, session, client,
        clamp=options.clamp_max_tokens == CLAMP_ALL,
    )  # fmt: skip
    identity = Identity("chatcmpl-" + secrets.token_hex(16), int(time.time()), model.names[0])
    encoder = Frames(identity, chat=True, choices=n, usage=usage, told=Told.of(request, submit.tool_use))
    asked = GenerateRequest(id=identity.id, prompts=(submit,), n=n, stream=submit.stream)
    await generate(app, asked, encoder, context)


def chat_submission(
    request: ChatRequest,
    number: int,
    model: ModelInfo,
    n: int,
    trace: TraceContext,
    session: str = "",
    client: Client = Client(),  # noqa: B008 (frozen)
    *,
    clamp: bool = False,
) -> SubmitText:
    """The request as the message with id `number`; `clamp` as in `Lengths`.

    Raises InvalidRequest or NotBuilt naming the parameter.
    """
    prompt = chat_prompt(request)
    found = submission(request, lengths(request, clamp=clamp), model, n, trace)
    if found.grammar is not None:
        check_structure(prompt.tools.use, found.grammar)
    return msgspec.structs.replace(
        prompt.prompt_of(found), id=number, session=session, client=client, chat_template=request.chat_template
    )


def check_structure(use: ToolUse | None, grammar: Grammar | None) -> None:
    """Raise InvalidRequest for an answer that must be a call and must follow a grammar. A `response_format` is for
    answers that are no calls, so it goes with every `tool_choice`."""
    if use is None or not use.required or grammar is None or grammar.param.partition(".")[0] == "response_format":
        return
    message = f"{grammar.param} and tool_choice: the choice makes every answer a call, which follows no grammar"
    raise InvalidRequest(message, param=grammar.param, code="invalid_value")


def lengths(request: ChatRequest, *, clamp: bool = False) -> Lengths:
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
        prompt_logprobs=-1 if request.prompt_logprobs is None else prompt_logprobs(request),
        clamp=clamp,
    )
