"""POST /v1/messages and POST /v1/messages/count_tokens. Source: Anthropic API reference, "Messages"."""

from __future__ import annotations

import functools

import msgspec

from penstock.protocol import limits
from penstock.protocol.config import CLAMP_NONE
from penstock.protocol.errors import RequestError
from penstock.protocol.messages import Tokenized
from penstock.services.client.model_info import ModelInfo
from penstock.services.client.output_collector import renamed
from penstock.services.http.request_context import RequestContext, answered
from penstock.services.openai.app_state import AppState
from penstock.services.openai.generation import GenerateRequest, Parsed, generate, new_identity
from penstock.services.openai.images import read
from penstock.services.openai.messages.output import MessageEvents, ResponseOptions, TokenCount, Uncleared
from penstock.services.openai.messages.request import HEADER, REASONS, REFUSALS, CountRequest, MessageRequest, ignored
from penstock.services.openai.messages.turns import FIELD_NAMES, grammar_of, message_prompt
from penstock.services.openai.parameters import Lengths, check_limits, check_unsupported, submission
from penstock.services.openai.schema import GenerationRequest, extras_of
from penstock.services.openai.validation import FIELDS, decode, read_request

REQUEST = msgspec.json.Decoder(MessageRequest)
COUNT = msgspec.json.Decoder(CountRequest)


async def parse_message(app: AppState, context: RequestContext) -> Parsed:
    """POST /v1/messages."""
    options, model = app.config.api, app.model
    request, fields = await read_request(await context.read_json(), REQUEST, model, context)
    check_unsupported(fields, REFUSALS, REASONS)
    remark_ignored(request, model, context)
    prompt, grammar = message_prompt(request, request.max_tokens, model), grammar_of(request)
    parameters = generation_request(request)
    check_limits(parameters, options, ("top_logprobs", None), FIELD_NAMES)
    lengths = Lengths(request.max_tokens, "max_tokens", late=True, clamp=options.clamp_max_tokens != CLAMP_NONE)
    submit = submission(parameters, lengths, model, 1, context.trace, grammar, **prompt.fields)
    identity = new_identity("msg_", app, context)
    user = request.metadata.user_id if request.metadata else None
    asked = GenerateRequest(id=identity.id, prompts=(submit,), user=user, images=prompt.images, field_names=FIELD_NAMES)
    return asked, MessageEvents(identity, ResponseOptions.of(request, context.id.decode()))


create_message = functools.partial(generate, parse_message)


def generation_request(request: MessageRequest) -> GenerationRequest:
    """The parameters of a message that its prompt does not hold."""
    return GenerationRequest(
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        stop=request.stop_sequences or None,
        **extras_of(request),
    )


async def count_message_tokens(app: AppState, context: RequestContext) -> None:
    """How many tokens the prompt of a message would have."""
    body = await context.read_json()
    request = decode(body, COUNT)
    app.model.adapter(request.model)
    check_unsupported(decode(body, FIELDS), REFUSALS, REASONS)
    remark_ignored(request, app.model, context)
    grammar_of(request)  # what a message would refuse, its count refuses
    prompt = message_prompt(request, limits.MAX_TOKEN_ID, app.model)
    images = await read(app, context, prompt.images, engine=False)
    call = msgspec.structs.replace(prompt.tokenize(), images=images, client=context.sender()[1])
    try:
        found = await answered(app.engine_client.call(call), context)
    except RequestError as error:
        renamed(error, FIELD_NAMES)
        raise
    assert isinstance(found, Tokenized)
    count = len(found.token_ids) // 4
    edits = msgspec.UNSET if request.context_management is None else Uncleared(count)
    await context.send_json(msgspec.json.encode(TokenCount(count, edits)))


def remark_ignored(request: MessageRequest | CountRequest, model: ModelInfo, context: RequestContext) -> None:
    """Name in a header the edits of the conversation that could change something, of which none is made."""
    if request.context_management is not None:
        found = ignored(request.context_management, request.messages, model.max_model_len)
        if found:
            context.response_headers.append((HEADER, ", ".join(found).encode()))
