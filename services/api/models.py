"""GET /v1/models and GET /v1/models/{id}. Source: OpenAI API reference, "Models"."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.types import Receive, Scope, Send

from services.api.errors import send_json
from services.api.served import ServedModel
from services.api.service import Service


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One name that the model is served under; `max_model_len` is in tokens and not part of OpenAI's shape."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Every name."""

    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class Models:
    """All names, or the one of the path."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._service.model
        name = scope["path_params"].get("name")
        if name is None:
            body: ModelAnswer | ModelList = ModelList(data=[model_answer(model, each) for each in model.names])
        else:
            model.check_name(name)
            body = model_answer(model, name)
        await send_json(send, msgspec.json.encode(body))


def model_answer(model: ServedModel, name: str) -> ModelAnswer:
    return ModelAnswer(id=name, created=model.created, max_model_len=model.max_model_len)
