"""GET /v1/models and GET /v1/models/{id}. Sources: OpenAI API reference, "Models"; Anthropic API reference, "Models".

A model has the fields of both references. The list is OpenAI's, or Anthropic's page for who asks with its header
`anthropic-version`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal
from urllib.parse import parse_qs

import msgspec

from penstock.protocol.errors import InvalidRequest, invalid
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.app_state import AppState
from penstock.services.openai.dispatch import find
from penstock.services.openai.errors import VERSION_HEADER
from penstock.services.openai.health import model_state

PAGE, MOST = 20, 1000  # models of Anthropic's page: unless its query says how many, and at most


class Quantization(msgspec.Struct, frozen=True):
    """How the weights are quantized."""

    method: str
    format: str
    bits: int


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One name that the model is served under. `max_model_len`, in tokens, `input_modalities`, `tasks` and
    `quantization` are of neither reference."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int
    input_modalities: tuple[Literal["text", "image"], ...]
    tasks: tuple[str, ...]  # of generate, embed, score and classify
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int
    parent: str | msgspec.UnsetType = msgspec.UNSET  # of an adapter, as in vLLM: the model that it is added to
    quantization: Quantization | msgspec.UnsetType = msgspec.UNSET  # of weights that are
    wrong_output: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET  # why what it says is wrong; ours
    state: str | msgspec.UnsetType = msgspec.UNSET  # of several models: loaded, asleep, loading or failed; ours


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Every name."""

    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the names, as Anthropic lists them."""

    data: list[ModelAnswer]
    has_more: bool
    first_id: str | None
    last_id: str | None


async def models(app: AppState, context: RequestContext) -> None:
    """All names, or the one of the path."""
    name = context.path_params.get("name")
    body: ModelAnswer | ModelList | ModelPage
    if name is not None:
        if app.models:
            app = find(app, name)
        app.model.adapter(name)
        body = model_answer(app, name)
    elif VERSION_HEADER in context.headers:
        body = page(app, context.query)
    else:
        body = ModelList(data=[model_answer(each, name) for each, name in served(app)])
    await context.send_json(msgspec.json.encode(body))


def model_answer(app: AppState, name: str) -> ModelAnswer:
    """Of the model of `app`, or of its adapter."""
    model, facts = app.model, app.model.quantization
    return ModelAnswer(
        id=name,
        created=model.created,
        max_model_len=model.max_model_len,
        input_modalities=model.modalities,
        tasks=model.tasks,
        display_name=name,
        created_at=datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.max_model_len,
        max_tokens=model.max_model_len,
        parent=msgspec.UNSET if name in model.names else model.name,
        quantization=msgspec.UNSET if facts is None else Quantization(facts.method, facts.format, facts.bits),
        wrong_output=model.wrong_output or msgspec.UNSET,
        state=model_state(app).value if app.config.run.for_model else msgspec.UNSET,
    )


def served(app: AppState) -> list[tuple[AppState, str]]:
    """The names of each model, then those of its adapters."""
    return [
        (each, name)
        for each in app.each
        for name in (*each.model.names, *(() if each.model.adapters is None else each.model.adapters.names()))
    ]


def page(app: AppState, query: str) -> ModelPage:
    """The names behind `after_id` or before `before_id`, at most `limit`. Raises InvalidRequest."""
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    limit = asked.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MOST)) and 1 <= int(limit) <= MOST):
        raise invalid("limit", f"must be a number from 1 to {MOST}")
    states, most = {name: each for each, name in served(app)}, int(limit)
    names = list(states)
    if "after_id" in asked and "before_id" in asked:
        raise InvalidRequest("after_id and before_id cannot both be given", param="before_id")
    if "before_id" in asked:
        rest = names[: place(names, asked["before_id"], "before_id")]
        found = rest[-most:]
    else:
        rest = names[place(names, asked["after_id"], "after_id") + 1 :] if "after_id" in asked else names
        found = rest[:most]
    ends = (found[0], found[-1]) if found else (None, None)
    data = [model_answer(states[name], name) for name in found]
    return ModelPage(data=data, has_more=len(found) < len(rest), first_id=ends[0], last_id=ends[1])


def place(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise invalid(param, "names none of the models")
    return names.index(name)
