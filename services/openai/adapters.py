"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, vLLM's paths, for the operator alone.

--admin-address has them where --lora-dir is given. Paths are relative to --lora-dir, and nothing outside of it is read.
A name that is loaded again means what its folder holds then; requests that run go on with what they began with, also
behind an unload.
"""

from __future__ import annotations

import msgspec

from penstock.protocol.errors import InvalidRequest, NotFound
from penstock.services.client.adapters import AdapterNames
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.app_state import AppState
from penstock.services.openai.models import model_answer
from penstock.services.openai.validation import decode


class LoadAdapterRequest(msgspec.Struct, frozen=True):
    """Body of a load. Names and paths are short."""

    lora_name: str
    lora_path: str = ""  # of the folder, below --lora-dir; empty: the one of that name


class UnloadAdapterRequest(msgspec.Struct, frozen=True):
    """Body of an unload."""

    lora_name: str


class Unloaded(msgspec.Struct, frozen=True):
    """As OpenAI answers the deletion of a model."""

    id: str
    object: str = "model"
    deleted: bool = True


LOAD = msgspec.json.Decoder(LoadAdapterRequest)
UNLOAD = msgspec.json.Decoder(UnloadAdapterRequest)


def names_of(app: AppState) -> AdapterNames:
    if app.model.adapters is None or app.model.adapters.directory is None:  # of several models another one has them
        raise InvalidRequest(f"the model {app.model.name} has no lora_dir", param="model", code="unsupported")
    return app.model.adapters


async def load_adapter(app: AppState, context: RequestContext) -> None:
    """Have a name mean an adapter, as its folder is now."""
    request = decode(await context.read_json(), LOAD)
    names_of(app).load(request.lora_name, request.lora_path or request.lora_name)
    await context.send_json(msgspec.json.encode(model_answer(app, request.lora_name)))


async def unload_adapter(app: AppState, context: RequestContext) -> None:
    """Have a name mean nothing. Raises NotFound for one that means nothing already."""
    name = decode(await context.read_json(), UNLOAD).lora_name
    if name not in names_of(app).names():
        raise NotFound(f"no adapter is loaded as {name[:200]!r}", param="lora_name", code="model_not_found")
    names_of(app).unload(name)
    await context.send_json(msgspec.json.encode(Unloaded(name)))
