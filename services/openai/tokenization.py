"""POST /tokenize and POST /detokenize, in the shapes that clients of open servers know."""

from __future__ import annotations

import struct

import msgspec

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Detokenize, Detokenized, Tokenize, Tokenized
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import RequestContext, answered
from penstock.services.openai.app_state import AppState
from penstock.services.openai.chat import chat_prompt
from penstock.services.openai.completions import check_ids
from penstock.services.openai.images import GivenImage, read
from penstock.services.openai.schema import DetokenizeRequest, TokenizeRequest
from penstock.services.openai.validation import decode, given

TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """Body of a tokenization."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """Body of a detokenization."""

    prompt: str


class TokenizerInfoAnswer(msgspec.Struct, frozen=True):
    """Body of GET /tokenizer_info: what the model's tokenizer_config.json holds, with these two."""

    tokenizer_class: str
    chat_template: str | msgspec.UnsetType = msgspec.UNSET


async def tokenize(app: AppState, context: RequestContext) -> None:
    """Token ids of a text or of a chat."""
    body = await context.read_json()
    request = decode(body, TOKENIZE)
    app.model.adapter(request.model)
    call, given = tokenize_call(request, app.model)
    images = await read(app, context, given, engine=False)
    call = msgspec.structs.replace(call, images=images, client=context.sender()[1])
    found = await answered(app.engine_client.call(call), context)
    assert isinstance(found, Tokenized)
    ids = struct.unpack(f"<{len(found.token_ids) // 4}i", found.token_ids)
    answer = TokenizeAnswer(len(ids), app.model.max_model_len, ids, found.token_strings)
    await context.send_json(msgspec.json.encode(answer))


async def detokenize(app: AppState, context: RequestContext) -> None:
    """The text of token ids."""
    body = await context.read_json()
    request = decode(body, DETOKENIZE)
    app.model.adapter(request.model)
    if request.tokens:
        check_ids(request.tokens, "tokens", app.model)
    ids = struct.pack(f"<{len(request.tokens)}i", *request.tokens)
    found = await answered(app.engine_client.call(Detokenize(token_ids=ids)), context)
    assert isinstance(found, Detokenized)
    await context.send_json(msgspec.json.encode(DetokenizeAnswer(found.text)))


async def tokenizer_info(app: AppState, context: RequestContext) -> None:
    """The tokenizer's own configuration."""
    await context.send_json(app.model.tokenizer)


def tokenize_call(request: TokenizeRequest, model: ModelInfo) -> tuple[Tokenize, tuple[GivenImage, ...]]:
    """The question for the tokenizer, and the images that it needs.

    Raises InvalidRequest unless exactly one of prompt and messages is given.
    """
    if (request.prompt is None) == (not given(request.messages)):
        raise InvalidRequest("give either prompt or messages", param="prompt", code="missing_required_parameter")
    if request.prompt is not None:
        call = Tokenize(
            prompt=request.prompt,
            add_special_tokens=request.add_special_tokens is not False,
            with_strings=bool(request.return_token_strs),
        )
        return call, ()
    prompt = chat_prompt(request, model)
    return prompt.tokenize(with_strings=bool(request.return_token_strs)), prompt.images
