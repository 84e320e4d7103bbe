"""What the Responses and Messages APIs take beyond their own parameters, under the names of chats (`extra_body`)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.protocol import limits
from penstock.services.openai.schema import Bias, Budget, OptionalJson, Penalty, Share, Timeout


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """Handed on as they are."""

    top_k: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKEN_ID)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=limits.MAX_LOGIT_BIAS)] | None = None
    seed: Annotated[int, Meta(ge=limits.SEED_MIN, le=limits.SEED_MAX)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=limits.MAX_CACHE_SALT)] | None = None
    timeout: Timeout | None = None
    speculative: bool | None = None
    thinking_token_budget: Budget | None = None
    chat_template_kwargs: OptionalJson = msgspec.UNSET


def extras_of(request: Extras) -> dict[str, Any]:
    """By name, as a ChatRequest takes them."""
    return {name: getattr(request, name) for name in Extras.__struct_fields__}
