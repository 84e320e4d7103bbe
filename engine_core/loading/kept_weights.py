"""A copy of a rank's weights in the host's memory, as its model had them on the device: nothing is converted when they
come back. It is an anonymous file (memfd_create(2)), which outlives the program image that wrote it.

The file: the tensors' bytes, each at a multiple of ALIGNED; a table of them in JSON; the table's length and MAGIC, 8
bytes each. The end is written last, so a copy that was cut off is none. What the table says is compared with the model
that is to be filled, and each tensor's sum, taken on the device, with that of the bytes that arrived there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor

from penstock.engine_core.loading.digests import BITS
from penstock.engine_core.loading.streaming import WeightStream
from penstock.engine_core.models.layers import Destination, Destinations, owners_of, pack, reopen
from penstock.engine_core.models.quantized_matrix import Owner
from penstock.kernels.grouped_linear import PlaneForm, PlaneWeight
from penstock.kernels.linear import DequantizedWeight, packed
from penstock.kernels.quantized import Float4Weight, Float8Weight, GroupedWeight, Int8Weight

MAGIC = b"penstock"
ALIGNED = 64  # bytes
KINDS: Mapping[str, Callable[..., object]] = {kind.__name__: kind for kind in (
    Float8Weight, Int8Weight, GroupedWeight, Float4Weight, PlaneWeight, PlaneForm, DequantizedWeight,
)}  # fmt: skip


class KeptWeightsError(ValueError):
    """A copy cannot be used: weights are read from files."""


class Part(Protocol):
    """A model, its vision encoder, its draft model, a product behind pooling."""

    def destinations(self) -> Mapping[str, Destination] | Destinations: ...


Parts = Mapping[str, Part]


class KeptBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the file."""

    first: int
    count: int
    sum: int  # see `sum_of`


class KeptView(msgspec.Struct, frozen=True, array_like=True):
    """How a tensor lies in one of the memories that the model has: experts, and parts of fused weights, share one."""

    memory: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # numbers


class KeptTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of `Owner.made`, contiguous."""

    dtype: str
    shape: tuple[int, ...]
    bytes: KeptBytes
    packed: bool = False  # as oneDNN has it; the bytes are dense
    empty: bool = False  # only its shape is kept


class KeptMade(msgspec.Struct, frozen=True, array_like=True):
    """`Owner.made`: see `encoded`."""

    made: Any
    tensors: tuple[KeptTensor, ...]


class Table(msgspec.Struct, frozen=True):
    """What the file holds, and of what."""

    key: str  # of all that decides about a rank's weights, and how they lie
    path: str  # of the folder that they are from, as the scheduler says it; empty: the one that the server started with
    version: str
    memories: tuple[KeptBytes, ...]  # that tensors of destinations lie in, each once
    tensors: dict[str, KeptView]  # those, by part and name
    made: tuple[KeptMade, ...]  # of each owner, in the order of destinations


def size_of(parts: Parts) -> int:
    """Bytes of these parts' weights in a copy, but for those that are packed on a CPU."""
    made: list[Tensor] = []
    for owner in owners(parts):
        encoded(owner.made, made, 0)
    return placed([*laid_out(parts)[0], *made])[1]


def write(file: int, parts: Parts, key: str, path: str, version: str, room: int, memory: Tensor | None = None) -> None:
    """Copy the weights of these parts to a file, instead of what it had. On a CPU they are laid out as checkpoints have
    them, and not packed again: nothing is computed with them from here on. memory: the file's, if it is `mapped`.
    Raises OSError, and MemoryError where they take more bytes than there is room for."""
    with torch.inference_mode():
        made = [owner.made for owner in owners(parts)]
        for owner, one in zip(owners(parts), made, strict=True):
            if not one:
                owner.reopen()
        memories, views = laid_out(parts)
        found: list[Tensor] = []
        codes = []
        for one in made:
            first = len(found)
            codes.append((encoded(one, found, first), first, len(found)))
        sources = [*memories, *found]
        starts, size = placed(sources)
        if size > room:
            raise MemoryError(f"weights take {size} bytes, and {room} of the host's memory are free")
        os.ftruncate(file, size)
        sums = copied(sources, starts, memory if memory is not None and len(memory) >= size else mapped(file, size))
    kept = [KeptBytes(start, bytes_of(source), total)
            for source, start, total in zip(sources, starts, sums, strict=True)]  # fmt: skip
    tensors = [KeptTensor(name_of(tensor.dtype), tuple(tensor.shape), own, tensor.is_mkldnn, tensor.is_meta)
               for tensor, own in zip(found, kept[len(memories) :], strict=True)]  # fmt: skip
    states = tuple(KeptMade(code, tuple(tensors[first:end])) for code, first, end in codes)
    table = msgspec.json.encode(Table(key, path, version, tuple(kept[: len(memories)]), views, states))
    os.pwrite(file, table + len(table).to_bytes(8, "little") + MAGIC, size)


def read_table(file: int) -> Table:
    """Raises KeptWeightsError unless the file is there as a whole."""
    try:
        size = os.fstat(file).st_size
        end = os.pread(file, 16, max(0, size - 16))
        length = int.from_bytes(end[:8], "little")
        if len(end) < 16 or end[8:] != MAGIC or length > size - 16:
            raise KeptWeightsError("it is cut off")
        table = msgspec.json.decode(os.pread(file, length, size - 16 - length), type=Table)
    except OSError as error:
        raise KeptWeightsError(f"it cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise KeptWeightsError(f"its table is damaged: {error}") from None
    kept = [*table.memories, *(tensor.bytes for one in table.made for tensor in one.tensors)]
    if any(one.first < 0 or one.first + one.count > size - 16 - length for one in kept):
        raise KeptWeightsError("it is shorter than its tensors")
    return table


def restore(file: int, parts: Parts, key: str, device: torch.device) -> Table:
    """Fill a model from a copy. Raises KeptWeightsError for a copy of another model, and for a damaged one: then the
    parts are as they were before anything was packed, and can be filled from files."""
    table = read_table(file)
    if table.key != key:
        raise KeptWeightsError("it is of another model, or of other options")
    with closing(Filler(file, device)) as filler, torch.inference_mode():
        try:
            filler.fill(table, parts)
        except KeptWeightsError:
            for part in parts.values():
                reopen(places(part))
            raise
        for part in parts.values():
            pack(places(part))
    return table


class Filler:
    """Copies tensors' bytes from the file, and compares their sums."""

    def __init__(self, file: int, device: torch.device) -> None:
        self._device = device
        self._bytes = mapped(file, os.fstat(file).st_size)
        self._stream = stream_of(device)
        self._sums: list[tuple[Tensor, int]] = []

    def fill(self, table: Table, parts: Parts) -> None:
        """Raises KeptWeightsError where the parts differ from the table, or what arrives from what was kept."""
        memories, views = laid_out(parts)
        sizes = [bytes_of(memory) for memory in memories]
        if views != table.tensors or sizes != [kept.count for kept in table.memories]:
            raise KeptWeightsError("its tensors are not those of the model")
        for memory, kept in zip(memories, table.memories, strict=True):
            self._fill(memory, kept)
        found = list(owners(parts))
        if len(found) != len(table.made):
            raise KeptWeightsError("its layers are not those of the model")
        for owner, state in zip(found, table.made, strict=True):
            there: list[Tensor] = []
            alike = encoded(owner.made, there, 0) == state.made
            if alike and [form_of(each) for each in there] == [(one.dtype, one.shape) for one in state.tensors]:
                for tensor, one in zip(there, state.tensors, strict=True):
                    self._fill(tensor, one.bytes)
            else:
                tensors = [self._new(one) for one in state.tensors]
                owner.remake(cast("tuple[object, ...]", decoded(state.made, tensors)))
        if self._stream is not None:
            self._stream.flush()
        if sum_of([tensor for tensor, _ in self._sums]) != [expected for _, expected in self._sums]:
            raise KeptWeightsError("its bytes are damaged")

    def _new(self, kept: KeptTensor) -> Tensor:
        """In new memory."""
        made = torch.empty(kept.shape, dtype=getattr(torch, kept.dtype), device="meta" if kept.empty else self._device)
        if not kept.empty:
            self._fill(made, kept.bytes)
        return packed(made) if kept.packed else made

    def _fill(self, tensor: Tensor, kept: KeptBytes) -> None:
        target, stored = flat(tensor), self._bytes[kept.first : kept.first + kept.count]
        if len(target) != len(stored):
            raise KeptWeightsError("its tensors are not those of the model")
        if self._stream is not None and self._stream.takes(target, stored):
            self._stream.copy(target, stored)
        else:
            target.copy_(stored)
        self._sums.append((target, kept.sum))

    def close(self) -> None:
        """Let go of the copy, which stays."""
        if self._stream is not None:
            self._stream.close()
        self._sums.clear()


def places(part: Part) -> dict[str, Destination]:
    return dict(part.destinations())


def owners(parts: Parts) -> Iterator[Owner]:
    for part in parts.values():
        yield from owners_of(places(part).values())


def laid_out(parts: Parts) -> tuple[list[Tensor], dict[str, KeptView]]:
    """The memories that tensors of destinations lie in, as bytes, and how they do."""
    memories: dict[int, tuple[int, Tensor]] = {}
    views = {}
    for part, one in parts.items():
        for name, place in places(one).items():
            tensor = place.tensor
            if tensor is None or not tensor.numel():
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in memories:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                memories[storage.data_ptr()] = len(memories), whole
            views[f"{part} {name}"] = KeptView(
                memories[storage.data_ptr()][0], name_of(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()),
                int(tensor.storage_offset()),
            )  # fmt: skip
    return [memory for _, memory in memories.values()], views


def encoded(value: object, tensors: list[Tensor], first: int) -> Any:
    """Records of tensors as JSON takes them, with numbers from `first` on for tensors, which are added to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1 - first}
    if is_dataclass(value):
        assert type(value).__name__ in KINDS, "it can be made again"
        inside = {field.name: encoded(getattr(value, field.name), tensors, first) for field in fields(value)}
        return {"kind": type(value).__name__, "fields": inside}
    if isinstance(value, tuple):
        return {"items": [encoded(one, tensors, first) for one in value]}
    return value


def decoded(code: Any, tensors: Sequence[Tensor]) -> object:
    if not isinstance(code, dict):
        return code
    if "tensor" in code:
        return tensors[code["tensor"]]
    if "kind" in code:
        return KINDS[code["kind"]](**{name: decoded(one, tensors) for name, one in code["fields"].items()})
    return tuple(decoded(one, tensors) for one in code["items"])


def stream_of(device: torch.device) -> WeightStream | None:
    """None: its tensors are in the host's memory themselves."""
    return WeightStream(device) if device.type == "cuda" else None


def bytes_of(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.numel() * tensor.itemsize


def flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor; of one that is not contiguous, a copy."""
    return (tensor.to_dense() if tensor.is_mkldnn else tensor).contiguous().view(-1).view(torch.uint8)


def placed(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each begins, and the bytes of all, at least one."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-bytes_of(tensor) // ALIGNED) * ALIGNED
    return starts, max(1, end)


def copied(tensors: Sequence[Tensor], starts: Sequence[int], to: Tensor) -> list[int]:
    """Copy them to the file; their sums."""
    stream = next(filter(None, map(stream_of, dict.fromkeys(tensor.device for tensor in tensors))), None)
    sums: list[int] = []
    try:
        if stream is not None:
            sums = sum_of(tensors)
        for tensor, start in zip(tensors, starts, strict=True):
            source = tensor if tensor.is_meta else flat(tensor)
            if stream is None:
                sums += sum_of([source])
            place = to[start : start + bytes_of(tensor)]
            if stream is not None and stream.takes(place, source):
                stream.copy(place, source)
            elif len(place):
                place.copy_(source)
        if stream is not None:
            stream.flush()
    finally:
        if stream is not None:
            stream.close()
    return sums


def sum_of(tensors: Sequence[Tensor]) -> list[int]:
    """Of each one's bytes, taken as the widest integers that they are a whole number of, modulo 2^64; the device is
    waited for once."""
    found = []
    for tensor in tensors:
        size = bytes_of(tensor)
        if size:
            width = next(width for width in (8, 4, 2, 1) if size % width == 0)
            found.append(flat(tensor).view(BITS[width]).sum(dtype=torch.int64))
        else:
            found.append(torch.zeros((), dtype=torch.int64))
    by_device: dict[torch.device, list[Tensor]] = {}
    for total in found:
        by_device.setdefault(total.device, []).append(total)
    values = {device: iter(torch.stack(totals).tolist()) for device, totals in by_device.items()}
    return [next(values[total.device]) for total in found]


def form_of(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return name_of(tensor.dtype), tuple(tensor.shape)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def mapped(file: int, size: int) -> Tensor:
    """The file's bytes; writing to them writes the file."""
    memory = mmap.mmap(file, size)
    with suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages, where the kernel has large ones for such files
        memory.madvise(mmap.MADV_SEQUENTIAL)  # else each is moved to the list of active pages as it is unmapped
    return torch.frombuffer(memory, dtype=torch.uint8)
