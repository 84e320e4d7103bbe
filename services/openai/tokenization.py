"""POST /tokenize and POST /detokenize, in the shapes that clients of open servers know."""

from __future__ import annotations

import struct

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Detokenize, Detokenized, Tokenize, Tokenized
from penstock.services.http.stream_writer import answered
from penstock.services.openai.app_state import Service
from penstock.services.openai.chat import conversation, tools_of
from penstock.services.openai.completions import check_ids
from penstock.services.openai.errors import send_json
from penstock.services.openai.schema import DetokenizeRequest, TokenizeRequest
from penstock.services.openai.validation import decode, given, read_json

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


class TokenizeText:
    """Token ids of a text or of a chat."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_json(scope, receive, service.config.api)
        request = decode(body, TOKENIZE)
        service.model.check_name(request.model)
        question = tokenize(request, service.pipeline.new_id())
        found = await answered(service.pipeline.ask(question), receive)
        assert isinstance(found, Tokenized)
        ids = struct.unpack(f"<{len(found.token_ids) // 4}i", found.token_ids)
        answer = TokenizeAnswer(len(ids), service.model.max_model_len, ids, found.token_strings)
        await send_json(send, msgspec.json.encode(answer))


class DetokenizeText:
    """The text of token ids."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_json(scope, receive, service.config.api)
        request = decode(body, DETOKENIZE)
        service.model.check_name(request.model)
        if request.tokens:
            check_ids(request.tokens, "tokens", service.model)
        ids = struct.pack(f"<{len(request.tokens)}i", *request.tokens)
        question = Detokenize(service.pipeline.new_id(), ids)
        found = await answered(service.pipeline.ask(question), receive)
        assert isinstance(found, Detokenized)
        await send_json(send, msgspec.json.encode(DetokenizeAnswer(found.text)))


class TokenizerInfo:
    """The tokenizer's own configuration."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._service.model.tokenizer)


def tokenize(request: TokenizeRequest, number: int) -> Tokenize:
    """The question for the tokenizer. Raises InvalidRequest unless exactly one of prompt and messages is given."""
    if (request.prompt is None) == (not given(request.messages)):
        raise InvalidRequest("give either prompt or messages", param="prompt", code="missing_required_parameter")
    if request.prompt is not None:
        return Tokenize(
            id=number,
            prompt=request.prompt,
            add_special_tokens=request.add_special_tokens is not False,
            with_strings=bool(request.return_token_strs),
        )
    chat = conversation(request)
    return Tokenize(
        id=number,
        messages=chat.messages,
        tools=tools_of(request.tools),
        template_arguments=chat.template_arguments,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        add_special_tokens=bool(request.add_special_tokens),
        with_strings=bool(request.return_token_strs),
    )
