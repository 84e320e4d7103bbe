"""Several models behind one endpoint: which of them a request is for, and the routes that ask."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from urllib.parse import parse_qsl

import msgspec

from penstock.protocol.errors import InvalidRequest, NotFound
from penstock.services.http.request_context import RequestContext
from penstock.services.http.routing import Handler, Route
from penstock.services.openai.app_state import AppState

BY_QUERY = ("/tokenizer_info",)  # routes for clients without a body that are about one model
# The operator's routes that are about all models unless they name one; others are about one model.
FOR_ALL = (
    "/pause", "/resume", "/is_paused", "/pause_generation", "/continue_generation", "/flush_cache",
    "/reset_prefix_cache", "/abort_request",
    "/sleep", "/is_sleeping", "/openapi.json",
)  # fmt: skip


class Asked(msgspec.Struct, frozen=True):
    """The part of a body that says for which model it is."""

    model: str | None = None


ASKED = msgspec.json.Decoder(Asked)


def dispatched(app: AppState, routes: Sequence[Route]) -> tuple[Route, ...]:
    """Routes whose handlers get the state of the model that is asked for, where there are several."""
    if not app.models:
        return tuple(routes)
    return tuple(
        msgspec.structs.replace(route, handler=functools.partial(by_body, route.handler))
        if route.body is not None
        else msgspec.structs.replace(route, handler=functools.partial(by_query, route.handler, True))
        if route.path in BY_QUERY
        else route
        for route in routes
    )


def operated(app: AppState, routes: Sequence[Route]) -> tuple[Route, ...]:
    """The operator's routes, which name a model in their query."""
    if not app.models:
        return tuple(routes)
    return tuple(
        msgspec.structs.replace(route, handler=functools.partial(by_query, route.handler, route.path not in FOR_ALL))
        for route in routes
    )


async def by_body(handler: Handler, app: AppState, context: RequestContext) -> None:
    """Raises InvalidRequest for a body that names no model, NotFound for one that there is not."""
    context.body = await context.read_json()
    try:
        asked = ASKED.decode(context.body).model
    except msgspec.DecodeError:  # the endpoint says what is wrong with it
        await handler(app.models[0], context)
        return
    await handler(find(app, asked), context)


async def by_query(handler: Handler, needed: bool, app: AppState, context: RequestContext) -> None:
    """Raises InvalidRequest for a query that names no model where one is needed, or several; NotFound for one that
    there is not."""
    asked = [value for name, value in parse_qsl(context.query) if name == "model"]
    if len(asked) > 1:
        raise InvalidRequest("the query names several models: name one", param="model")
    await handler(find(app, asked[0] if asked else None) if asked or needed else app, context)


def find(app: AppState, asked: str | None) -> AppState:
    """The state of the model, or of the one whose adapter it is. Raises InvalidRequest and NotFound."""
    if asked is None:
        called = ", ".join(each.model.name for each in app.models)
        why = f"this server has several models, so a request must name one: {called}"
        raise InvalidRequest(why, param="model", code="missing_required_parameter")
    for each in app.models:
        if asked in each.model.names:
            return each
    for each in app.models:
        if each.model.adapters is not None and each.model.adapters.find(asked) is not None:
            return each
    raise NotFound(f"The model `{asked[:200]}` does not exist.", param="model", code="model_not_found")
