"""What the operator does at --admin-address: pauses, sleep, the cache, the weights, adapters, by vLLM's paths and by
SGLang's.

Every route waits until what it asks holds in all replicas. Paths of adapters are relative to --lora-dir, and nothing
outside of it is read. A name that is loaded again means what its folder holds then; requests that run go on with what
they began with, also behind an unload. Sources: vLLM, entrypoints/serve/rlhf/api_router.py and
serve/sleep/api_router.py; SGLang, srt/entrypoints/http_server.py and srt/managers/io_struct.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec

from penstock.engine_core.models.weight_files import find_files
from penstock.protocol import groups
from penstock.protocol.control import (
    AbortAll,
    AskState,
    Control,
    Controlled,
    FlushCache,
    Pause,
    PauseMode,
    Resume,
    SleepEngine,
    UpdateWeights,
    WakeEngine,
)
from penstock.protocol.errors import Conflict, InvalidRequest, ModelError, NotFound, Unavailable, invalid, unsupported
from penstock.services.client.adapters import AdapterNames
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.app_state import AppState
from penstock.services.openai.models import model_answer
from penstock.services.openai.validation import NO, YES, decode

T = TypeVar("T")
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,199}")
LEVELS = ("1", "2")
FORMATS = (None, "auto", "safetensors")
CONFIG = "config.json"


class PauseStatus(msgspec.Struct, frozen=True):
    """Body of POST /pause and POST /resume, as vLLM has it."""

    status: str


class IsPaused(msgspec.Struct, frozen=True):
    """Body of GET /is_paused."""

    is_paused: bool


class IsSleeping(msgspec.Struct, frozen=True):
    """Body of GET /is_sleeping."""

    is_sleeping: bool


class PauseRequest(msgspec.Struct, frozen=True):
    """Body of POST /pause_generation. `retract` and `in_place` are one here: what an update makes stale is computed
    again."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class NoFields(msgspec.Struct, frozen=True):
    """A body that says nothing."""


class GenerationStatus(msgspec.Struct, frozen=True):
    """Body of POST /pause_generation and POST /continue_generation, as SGLang has it."""

    message: str
    status: str = "ok"


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class Load(msgspec.Struct, frozen=True):
    """Of all replicas together."""

    num_total_reqs: int


class Loads(msgspec.Struct, frozen=True):
    """Body of GET /v1/loads, as far as trainers read it."""

    loads: tuple[Load]


class ModelInfoAnswer(msgspec.Struct, frozen=True):
    """Body of GET /model_info, as far as trainers read it."""

    model_path: str
    weight_version: str


class ServerInfoAnswer(msgspec.Struct, frozen=True):
    """Body of GET /server_info, as far as trainers read it: the size of a replica, and how many executors there are."""

    model_path: str
    tp_size: int
    pp_size: int
    dp_size: int
    ep_size: int
    num_gpus: int  # executors of all replicas
    enable_memory_saver: bool = False  # /release_memory_occupation needs no option


class WeightVersion(msgspec.Struct, frozen=True):
    """Body of GET /get_weight_version."""

    weight_version: str


class UpdateRequest(msgspec.Struct, frozen=True):
    """Body of POST /update_weights_from_disk. What other servers tune beside it has no meaning here."""

    model_path: str  # below --weights-dir
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None  # None: the number that follows
    flush_cache: bool = True
    keep_pause: bool = False


class UpdateAnswer(msgspec.Struct, frozen=True):
    """Its answer, also where nothing was updated."""

    success: bool
    message: str
    num_paused_requests: int = 0  # requests that go on with the new weights
    weight_version: str = ""


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


MODES: Mapping[str, PauseMode] = {"abort": PauseMode.ABORT, "retract": PauseMode.KEEP, "in_place": PauseMode.KEEP}


async def pause(app: AppState, context: RequestContext) -> None:
    """Plan no more steps. mode=abort (requests end), wait (they run to their ends) or keep; clear_cache=false keeps the
    prefix cache behind the first two."""
    query = dict(parse_qsl(context.query))
    waits = truth(query, "wait_for_inflight_requests", absent=False)
    given = query.get("mode", "wait" if waits else "abort")
    if given not in list(PauseMode):
        raise invalid("mode", f": it must be one of {', '.join(PauseMode)}")
    clears = truth(query, "clear_cache", absent=True)
    mode = PauseMode(given)
    await ask(app, Pause(0, mode))
    if clears and mode is not PauseMode.KEEP:
        await ask(app, FlushCache(0))
    await answer(context, PauseStatus("paused"))


async def resume(app: AppState, context: RequestContext) -> None:
    """Go on. A pause that does not hold yet is given up."""
    await ask(app, Resume(0))
    await answer(context, PauseStatus("resumed"))


async def is_paused(app: AppState, context: RequestContext) -> None:
    """Whether a pause holds, in all replicas."""
    await answer(context, IsPaused(bool((await ask(app, AskState(0))).paused)))


async def sleep(app: AppState, context: RequestContext) -> None:
    """Have executors give their devices back, if no request runs or waits; those that a pause holds may. level=1 leaves
    weights in the host's memory where --keep-weights is given, level=2 does not. A request wakes the executors, unless
    it is held."""
    level = dict(parse_qsl(context.query)).get("level", "1")
    if level not in LEVELS:
        raise invalid("level", f": it must be {' or '.join(LEVELS)}")
    await put_to_sleep(app, discard=level == "2")
    await context.send_body(b"", b"text/plain; charset=utf-8")


async def put_to_sleep(app: AppState, *, discard: bool = False) -> None:
    """Have the model sleep, or each of several where none is named; `discard` its weights in the host's memory, too.
    Raises Conflict where its requests are in the way."""
    for each in app.each:
        found = await each.engine_client.control(SleepEngine(0, discard=discard))
        if found.error:
            raise Conflict(f"{each.model.name}: {found.error}" if app.models else found.error, code="not_done")


async def wake_up(app: AppState, context: RequestContext) -> None:
    """Load the model again. All of it, whatever `tags` there are. One of several waits for its memory, as with
    requests."""
    await wake(app)
    await context.send_body(b"", b"text/plain; charset=utf-8")


async def wake(app: AppState) -> None:
    """Have the model loaded; one of several by the process that knows whose memory it is."""
    if app.switcher is not None:
        await app.switcher.wake(app.model.name)
    else:
        await ask(app, WakeEngine(0))


async def is_sleeping(app: AppState, context: RequestContext) -> None:
    """Whether executors hold no device, in all replicas, be it that the operator asked for it or that nobody asked for
    anything."""
    await answer(context, IsSleeping((await ask(app, AskState(0))).asleep))


async def pause_generation(app: AppState, context: RequestContext) -> None:
    """The same by SGLang's path."""
    mode = MODES[(await optional(context, PauseRequest)).mode]
    await ask(app, Pause(0, mode))
    await answer(context, GenerationStatus("Generation paused successfully."))


async def continue_generation(app: AppState, context: RequestContext) -> None:
    await optional(context, NoFields)
    await ask(app, Resume(0))
    await answer(context, GenerationStatus("Generation continued successfully."))


async def flush_cache(app: AppState, context: RequestContext) -> None:
    """Forget the prefix cache. Requests that run are computed again."""
    await ask(app, FlushCache(0))
    await context.send_body(b"Cache flushed.\n", b"text/plain; charset=utf-8")


async def abort_request(app: AppState, context: RequestContext) -> None:
    """End all requests, or those that are called `rid`: by a field of POST /generate, or by X-Request-Id."""
    request = await optional(context, AbortRequest)
    if request.abort_all == bool(request.rid):
        why = "give rid, the id of a request, or abort_all: true for all of them"
        raise InvalidRequest(why, param="rid")
    await ask(app, AbortAll(0, request.rid))
    await context.send_body(b"", b"text/plain; charset=utf-8")


async def loads(app: AppState, context: RequestContext) -> None:
    """How many requests schedulers have that have not ended."""
    await answer(context, Loads((Load((await ask(app, AskState(0))).requests),)))


async def weight_version(app: AppState, context: RequestContext) -> None:
    """The version of the weights, which GET /model_info tells as well."""
    await answer(context, WeightVersion((await ask(app, AskState(0))).version))


async def model_info(app: AppState, context: RequestContext) -> None:
    """The model's name and the version of its weights."""
    await answer(context, ModelInfoAnswer(app.model.name, (await ask(app, AskState(0))).version))


async def server_info(app: AppState, context: RequestContext) -> None:
    """What slime asks an engine that it has not started."""
    model = app.config.model
    ranks, experts = model.tensor_parallel_size, model.tensor_parallel_size if model.expert_parallel else 1
    stages, replicas = model.pipeline_parallel_size, model.data_parallel_size
    await answer(context, ServerInfoAnswer(app.model.name, ranks, stages, replicas, experts, groups.executors(model)))


async def update_weights_from_disk(app: AppState, context: RequestContext) -> None:
    """Have the model's memory hold the weights of a folder below --weights-dir. Requests go on with them: what was
    computed with the old ones is computed again, and no token is of both."""
    request = await body(context, UpdateRequest)
    if request.load_format not in FORMATS:
        raise unsupported("load_format", ": it must be auto")
    if not request.flush_cache:
        raise unsupported("flush_cache", ": what old weights have computed is never used behind an update")
    path = str(weights_folder(app.config.api.weights_dir, request.model_path))
    version = await version_of(app, request.weight_version)
    change = UpdateWeights(0, path, version, abort=request.abort_all_requests)
    await update(app, context, change, keep_pause=request.keep_pause)


async def update(app: AppState, context: RequestContext, change: UpdateWeights, *, keep_pause: bool = False) -> None:
    """Look at the weights everywhere, then have them written, and answer. A folder's path is nothing for clients."""
    found = await app.engine_client.control(msgspec.structs.replace(change, check_only=True))
    if not found.error:  # none of several replicas has written
        if keep_pause:
            await ask(app, Pause(0, PauseMode.KEEP))
        found = await app.engine_client.control(change)
    path = change.path
    told = UpdateAnswer(
        success=not found.error,
        message=found.error.replace(f"{path}/", "").replace(f"{path}: ", "") or "Succeeded to update model weights.",
        num_paused_requests=found.requests,
        weight_version=found.version,
    )
    await context.send_json(msgspec.json.encode(told), 400 if found.error else 200)


def weights_folder(directory: str, path: str) -> Path:
    """The folder that a request names, all of it below --weights-dir, whatever links say. Raises InvalidRequest, and
    NotFound where there is none."""
    if not directory:  # of several models another one has it
        raise InvalidRequest("the model has no weights_dir", param="model", code="unsupported")
    within = Path(directory).resolve()
    folder = (within / path).resolve()
    outside = InvalidRequest("the folder and its files must be below --weights-dir", param="model_path")  # fmt: skip
    if not folder.is_relative_to(within) or folder == within:
        raise outside
    if not folder.is_dir():
        raise NotFound("model_path: there is no such folder below --weights-dir", param="model_path")
    try:
        files = [folder / CONFIG, *find_files(folder)]
    except ModelError as error:
        why = str(error).replace(f"{folder}/", "")
        raise InvalidRequest(why, param="model_path") from None
    if not all(file.resolve().is_relative_to(within) for file in files):
        raise outside
    return folder


async def version_of(app: AppState, given: str | None) -> str:
    """What a request calls the weights, or the number that follows. Raises InvalidRequest for what cannot be a name."""
    if given is None:
        return next_version((await ask(app, AskState(0))).version)
    if not VERSION.fullmatch(given):
        raise invalid("weight_version", ": it has letters, digits and . _ : @ / + -")
    return given


def next_version(current: str) -> str:
    """The number behind the present one, or behind those of replicas that differ. Raises InvalidRequest where one is no
    number."""
    numbers = [int(each) for each in current.split(",") if each.isdecimal()]
    if len(numbers) < len(current.split(",")):
        why = f": it must be given, since the present one is no number: {current}"
        raise invalid("weight_version", why, "missing_required_parameter")
    return str(max(numbers) + 1)


def names_of(app: AppState) -> AdapterNames:
    if app.model.adapters is None or app.model.adapters.directory is None:  # of several models another one has them
        raise InvalidRequest(f"the model {app.model.name} has no lora_dir", param="model", code="unsupported")
    return app.model.adapters


async def load_adapter(app: AppState, context: RequestContext) -> None:
    """Have a name mean an adapter, as its folder is now."""
    request = await body(context, LoadAdapterRequest)
    names_of(app).load(request.lora_name, request.lora_path or request.lora_name)
    await answer(context, model_answer(app, request.lora_name))


async def unload_adapter(app: AppState, context: RequestContext) -> None:
    """Have a name mean nothing. Raises NotFound for one that means nothing already."""
    name = (await body(context, UnloadAdapterRequest)).lora_name
    if name not in names_of(app).names():
        raise NotFound(f"no adapter is loaded as {name[:200]!r}", param="lora_name", code="model_not_found")
    names_of(app).unload(name)
    await answer(context, Unloaded(name))


async def ask(app: AppState, message: Control) -> Controlled:
    """Have all schedulers do it, of each model where none is named. Raises Unavailable with the reason of one that has
    not."""
    answers = []
    for each in app.each:
        found = await each.engine_client.control(message)
        if found.error:
            raise Unavailable(f"{each.model.name}: {found.error}" if app.models else found.error, code="not_done")
        answers.append(found)
    return msgspec.structs.replace(
        answers[0],
        requests=sum(found.requests for found in answers),
        paused=answers[0].paused if all(found.paused for found in answers) else "",
        asleep=all(found.asleep for found in answers),
    )


async def answer(context: RequestContext, body: msgspec.Struct) -> None:
    await context.send_json(msgspec.json.encode(body))


async def body(context: RequestContext, kind: type[T]) -> T:
    """The body as this type. Raises InvalidRequest naming the parameter."""
    return decode(await context.read_json(), msgspec.json.Decoder(kind))


async def optional(context: RequestContext, kind: type[T]) -> T:
    """The body, which may be empty."""
    length = context.header(b"content-length")
    if length in (None, b"0") and b"transfer-encoding" not in context.headers:
        return kind()
    return await body(context, kind)


def truth(query: dict[str, str], name: str, *, absent: bool) -> bool:
    """Raises InvalidRequest for what is neither yes nor no."""
    given = query.get(name)
    if given is None:
        return absent
    if given.lower() not in (*YES, *NO):
        raise invalid(name, ": it must be true or false")
    return given.lower() in YES
