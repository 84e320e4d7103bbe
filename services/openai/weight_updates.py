"""What trainers do to weights at --admin-address: broadcasts, memory that they share, sums, as SGLang and vLLM have it.

Sources: SGLang, srt/entrypoints/http_server.py and srt/managers/io_struct.py; slime,
slime/backends/sglang_utils/sglang_engine.py; vLLM, entrypoints/serve/dev/rlhf/api_router.py and
distributed/weight_transfer/nccl_engine.py.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from penstock.protocol import groups
from penstock.protocol.control import (
    HOST,
    IN_MEMORY,
    AskDigests,
    Control,
    HoldWeights,
    JoinGroup,
    UpdateWeights,
    WeightTensor,
)
from penstock.protocol.errors import InvalidRequest, invalid, unsupported
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.app_state import AppState
from penstock.services.openai.operator import answer, ask, body, optional, put_to_sleep, truth, update, version_of, wake
from penstock.services.openai.validation import missing

ADDRESS = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
GROUP = "weight_update_group"  # SGLang's name of a group that has none
TRANSFER = "weight_transfer"  # of the one group that vLLM's routes know
MOST_TENSORS = 1 << 16
PICKLED = (
    "{}: pickles are not read, since reading one runs what it holds: give tensors, with their handles as "
    "penstock.weights.share makes them, or broadcast them"
)
Port = Annotated[int, Meta(ge=1, le=65535)]
Size = Annotated[int, Meta(ge=2, le=1 << 16)]
Rank = Annotated[int, Meta(ge=1, le=1 << 16)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
GroupName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,200}\Z")]
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 40)], ...], Meta(max_length=8)]
Tag = Literal["weights", "kv_cache", "cuda_graph"]


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /init_weights_update_group: where number 0 of a process group has its store. Executor 0 is number
    `rank_offset` of it, and so on."""

    master_address: str
    master_port: Port
    rank_offset: Rank
    world_size: Size
    group_name: GroupName = GROUP
    backend: Literal["nccl", "gloo"] = "nccl"


class LeaveRequest(msgspec.Struct, frozen=True):
    """Body of POST /destroy_weights_update_group."""

    group_name: GroupName = GROUP


class Done(msgspec.Struct, frozen=True):
    """Whether it has been done, or why not."""

    success: bool
    message: str


class DistributedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /update_weights_from_distributed: whole tensors by the checkpoint's names, in the order in which
    they are broadcast. The prefix cache is forgotten in any case."""

    names: Annotated[list[Name], Meta(min_length=1, max_length=MOST_TENSORS)]
    dtypes: list[Name]
    shapes: list[Shape]
    group_name: GroupName = GROUP
    weight_version: str | None = None  # None: the number that follows
    abort_all_requests: bool = False
    load_format: str | None = None
    flush_cache: bool = True


class SharedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tensor in a trainer's memory, by the checkpoint's name."""

    name: Name
    dtype: Name
    shape: Shape
    handles: dict[str, str]  # by a GPU's UUID: a CUDA IPC handle in base64; by `cpu`: a file's name in /dev/shm
    offset: Annotated[int, Meta(ge=0, le=1 << 50)] = 0  # bytes, in the memory of the handle


class TensorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /update_weights_from_tensor."""

    tensors: Annotated[list[SharedTensor], Meta(min_length=1, max_length=MOST_TENSORS)] | None = None
    serialized_named_tensors: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # SGLang's, which are pickles
    weight_version: str | None = None
    abort_all_requests: bool = False
    load_format: str | None = None
    flush_cache: bool = True


class TransferInit(msgspec.Struct, frozen=True, kw_only=True):
    """`init_info`: nothing where memory is shared."""

    master_address: str = ""
    master_port: Port | None = None
    rank_offset: Rank = 1
    world_size: Size | None = None
    backend: Literal["nccl", "gloo"] = "nccl"


class TransferInitRequest(msgspec.Struct, frozen=True):
    """Body of POST /init_weight_transfer_engine."""

    init_info: TransferInit


class TransferUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """`update_info`: names, types and shapes of what is broadcast, or `tensors` in a trainer's memory."""

    names: Annotated[list[Name], Meta(max_length=MOST_TENSORS)] = []
    dtype_names: list[Name] = []
    shapes: list[Shape] = []
    packed: bool = False
    tensors: Annotated[list[SharedTensor], Meta(max_length=MOST_TENSORS)] = []
    ipc_handles: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    ipc_handles_pickled: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class TransferUpdateRequest(msgspec.Struct, frozen=True):
    """Body of POST /update_weights."""

    update_info: TransferUpdate


class StartRequest(msgspec.Struct, frozen=True):
    """Body of POST /start_weight_update."""

    is_checkpoint_format: bool = True


class FinishRequest(msgspec.Struct, frozen=True):
    """Body of POST /finish_weight_update."""

    weight_version: str | None = None


class Message(msgspec.Struct, frozen=True):
    """What vLLM's routes answer."""

    message: str


class WorldSize(msgspec.Struct, frozen=True):
    """Body of GET /get_world_size: executors of all replicas, or of one."""

    world_size: int


class MemoryRequest(msgspec.Struct, frozen=True):
    """Body of POST /release_memory_occupation and POST /resume_memory_occupation."""

    tags: list[Tag] | None = None


class CheckRequest(msgspec.Struct, frozen=True):
    """Body of POST /weights_checker."""

    action: str = "checksum"


class Checksums(msgspec.Struct, frozen=True):
    """Sums of whole tensors, 16 hexadecimal digits each, as penstock.weights.checksum has them."""

    weight_version: str
    checksums: dict[str, str]
    dtypes: dict[str, str]  # of what is held
    offsets: dict[str, float]  # added to what the checkpoint has before, of those that have one


class CheckAnswer(msgspec.Struct, frozen=True):
    """Its answer."""

    success: bool
    message: str
    payload: Checksums


async def init_group(app: AppState, context: RequestContext) -> None:
    """Have every executor join a trainer's process group. Answered once all have met."""
    request = await body(context, GroupRequest)
    await done(app, context, joining(app, request), "Succeeded to initialize custom process group.")


async def destroy_group(app: AppState, context: RequestContext) -> None:
    """Leave it."""
    request = await optional(context, LeaveRequest)
    await done(app, context, JoinGroup(0, request.group_name), "Succeeded to destroy custom process group.")


async def from_distributed(app: AppState, context: RequestContext) -> None:
    """Receive tensors that number 0 of a group broadcasts. An update of its own: pause the server around several."""
    request = await body(context, DistributedRequest)
    check_format(request.load_format)
    tensors = listed("names", request.names, ("dtypes", request.dtypes), request.shapes)
    change = await changing(app, tensors, request.weight_version, request.group_name)
    await update(app, context, msgspec.structs.replace(change, abort=request.abort_all_requests))


async def from_tensor(app: AppState, context: RequestContext) -> None:
    """Copy tensors from a trainer's memory on this host, which must stay as it is until this is answered."""
    request = await body(context, TensorRequest)
    if request.tensors is None:
        refuse_pickles("serialized_named_tensors", request.serialized_named_tensors)
        raise missing("tensors")
    check_format(request.load_format)
    change = await changing(app, shared(request.tensors, "tensors"), request.weight_version)
    await update(app, context, msgspec.structs.replace(change, abort=request.abort_all_requests))


async def init_transfer(app: AppState, context: RequestContext) -> None:
    """The same as for SGLang's trainers, by vLLM's path: there is one group."""
    info = (await body(context, TransferInitRequest)).init_info
    if info.master_address:
        if info.master_port is None or info.world_size is None:
            missing = ": master_address goes with master_port and world_size"
            raise invalid("init_info", missing, "missing_required_parameter")
        request = GroupRequest(
            master_address=info.master_address, master_port=info.master_port, rank_offset=info.rank_offset,
            world_size=info.world_size, group_name=TRANSFER, backend=info.backend,
        )  # fmt: skip
        await change_or_raise(app, joining(app, request, "init_info."))
    await answer(context, Message("Weight transfer initialized"))


async def start_update(app: AppState, context: RequestContext) -> None:
    """Begin an update of several parts: no step is planned until it is finished, and streams wait."""
    if not (await optional(context, StartRequest)).is_checkpoint_format:
        raise unsupported("is_checkpoint_format", ": names and shapes are those of the checkpoint")
    await change_or_raise(app, HoldWeights(0))
    await answer(context, Message("Weight update started"))


async def update_part(app: AppState, context: RequestContext) -> None:
    """A part of an update, or an update of its own where none has been started."""
    info = (await body(context, TransferUpdateRequest)).update_info
    for name in ("ipc_handles", "ipc_handles_pickled"):
        refuse_pickles(f"update_info.{name}", getattr(info, name))
    if info.packed:
        raise unsupported("update_info.packed", ": each tensor is broadcast by itself")
    if bool(info.names) == bool(info.tensors):
        raise invalid("update_info", ": give names or tensors")
    if info.tensors:
        tensors, group = shared(info.tensors, "update_info.tensors"), ""
    else:
        tensors = listed("update_info.names", info.names, ("update_info.dtype_names", info.dtype_names), info.shapes)
        group = TRANSFER
    change = await changing(app, tensors, None, group)
    await change_or_raise(app, msgspec.structs.replace(change, check_only=True))
    await change_or_raise(app, change)
    await answer(context, Message("Weights updated"))


async def finish_update(app: AppState, context: RequestContext) -> None:
    """End it: the weights have a version, the prefix cache is forgotten, requests go on."""
    given = (await optional(context, FinishRequest)).weight_version
    version = await version_of(app, given)
    await change_or_raise(app, HoldWeights(0, version))
    await answer(context, Message("Weight update finished"))


async def world_size(app: AppState, context: RequestContext) -> None:
    """How many executors join a trainer's group; include_dp=false: those of one replica."""
    every = truth(dict(parse_qsl(context.query)), "include_dp", absent=True)
    await answer(context, WorldSize((groups.executors if every else groups.group_size)(app.config.model)))


async def release_memory(app: AppState, context: RequestContext) -> None:
    """POST /sleep by SGLang's path. Whatever `tags` there are, all is given back, weights among it."""
    await optional(context, MemoryRequest)
    await put_to_sleep(app)
    await context.send_json(b"null")


async def resume_memory(app: AppState, context: RequestContext) -> None:
    """POST /wake_up by SGLang's path. All is loaded, whatever `tags` there are."""
    await optional(context, MemoryRequest)
    await wake(app)
    await context.send_json(b"null")


async def check_weights(app: AppState, context: RequestContext) -> None:
    """Sums of what is in memory."""
    if (request := await optional(context, CheckRequest)).action != "checksum":
        raise unsupported("action", f": {request.action!r} is not supported; it may be checksum")
    found = await ask(app, AskDigests(0))
    payload = Checksums(
        found.version,
        {each.name: f"{each.value:016x}" for each in found.digests},
        {each.name: each.dtype for each in found.digests},
        {each.name: each.offset for each in found.digests if each.offset},
    )
    await answer(context, CheckAnswer(True, "Success.", payload))


def joining(app: AppState, request: GroupRequest, path: str = "") -> JoinGroup:
    """Raises InvalidRequest for a group that has no room for all executors."""
    count = groups.executors(app.config.model)
    if request.rank_offset + count > request.world_size:
        why = f"is {request.world_size}; executors are {count}, from number {request.rank_offset} on"
        raise invalid(f"{path}world_size", why)
    address = request.master_address.strip("[]")
    if not ADDRESS.fullmatch(address):
        raise invalid(f"{path}master_address", ": it must be a host's name or address")
    return JoinGroup(
        0, request.group_name, address, request.master_port, request.rank_offset, request.world_size, request.backend
    )


def check_format(load_format: str | None) -> None:
    if load_format not in (None, "auto"):
        why = f": {load_format!r} is not supported; tensors come as the checkpoint has them"
        raise unsupported("load_format", why)


def refuse_pickles(param: str, given: msgspec.Raw | msgspec.UnsetType) -> None:
    if given is not msgspec.UNSET and bytes(given) != b"null":
        raise InvalidRequest(PICKLED.format(param), param=param, code="unsupported")


def listed(
    param: str, names: Sequence[str], dtypes: tuple[str, Sequence[str]], shapes: Sequence[tuple[int, ...]]
) -> tuple[WeightTensor, ...]:
    """Raises InvalidRequest unless there are as many of each."""
    if not len(names) == len(dtypes[1]) == len(shapes):
        raise invalid(param, f": {len(names)} names, {len(dtypes[1])} types ({dtypes[0]}) and {len(shapes)} shapes")
    return tuple(
        WeightTensor(name, dtype.removeprefix("torch."), shape)
        for name, dtype, shape in zip(names, dtypes[1], shapes, strict=True)
    )


def shared(tensors: Sequence[SharedTensor], param: str) -> tuple[WeightTensor, ...]:
    """Raises InvalidRequest for a handle that is no base64."""
    found = []
    for at, tensor in enumerate(tensors):
        handles = []
        for place, handle in tensor.handles.items():
            try:
                raw = handle.encode() if place == HOST else base64.b64decode(handle, validate=True)
            except (binascii.Error, ValueError):
                raise invalid(f"{param}[{at}].handles", ": a CUDA IPC handle is given in base64") from None
            handles.append((place, raw))
        if not handles:
            raise invalid(f"{param}[{at}].handles", ": there is none")
        dtype = tensor.dtype.removeprefix("torch.")
        found.append(WeightTensor(tensor.name, dtype, tensor.shape, tuple(handles), tensor.offset))
    return tuple(found)


async def changing(
    app: AppState, tensors: tuple[WeightTensor, ...], version: str | None, group: str = ""
) -> UpdateWeights:
    return UpdateWeights(0, IN_MEMORY, await version_of(app, version), tensors=tensors, group=group)


async def done(app: AppState, context: RequestContext, message: Control, words: str) -> None:
    found = await app.engine_client.control(message)
    told = Done(not found.error, found.error or words)
    await context.send_json(msgspec.json.encode(told), 400 if found.error else 200)


async def change_or_raise(app: AppState, message: Control) -> None:
    """Raises InvalidRequest with the reason of a scheduler that has not done it."""
    found = await app.engine_client.control(message)
    if found.error:
        raise InvalidRequest(found.error, code="not_done")
