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
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor

from penstock.engine_core.loading.digests import BITS
from penstock.engine_core.loading.streaming import WeightStream
from penstock.engine_core.models.layers import Destination, Destinations, pack
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


class KeptTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's place in the file."""

    dtype: str
    shape: tuple[int, ...]
    first: int  # byte
    sum: int  # of its numbers' bits
    packed: bool = False  # as oneDNN has it; here it is dense
    empty: bool = False  # only its shape is kept

    @property
    def nbytes(self) -> int:
        return 0 if self.empty else torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


class KeptMade(msgspec.Struct, frozen=True, array_like=True):
    """`Owner.made`: see `encoded`."""

    made: Any
    tensors: tuple[KeptTensor, ...]


class Table(msgspec.Struct, frozen=True):
    """What the file holds, and of what."""

    key: str  # of all that decides about a rank's weights, and how they lie
    path: str  # of the folder that they are from, as the scheduler says it; empty: the one that the server started with
    version: str
    tensors: dict[str, KeptTensor]  # of destinations, by part and name
    made: tuple[KeptMade, ...]  # of each owner, in the order of destinations


def write(file: int, parts: Parts, key: str, path: str, version: str, room: int) -> None:
    """Copy the weights of these parts to an empty file. On a CPU they are laid out as checkpoints have them, and not
    packed again: nothing is computed with them from here on. Raises OSError, and MemoryError where they take more bytes
    than there is room for."""
    with torch.inference_mode():
        made = [owner.made for owner in owners(parts)]
        for owner, one in zip(owners(parts), made, strict=True):
            if not one:
                owner.reopen()
        named = dict(held(parts))
        found: list[Tensor] = list(named.values())
        codes = []
        for one in made:
            count = len(found)
            codes.append((encoded(one, found, count), count, len(found)))
        starts, size = placed(found)
        if size > room:
            raise MemoryError(f"weights take {size} bytes, and {room} of the host's memory are free")
        os.ftruncate(file, max(1, size))
        sums = copied(found, starts, mapped(file, max(1, size)))
    kept = [KeptTensor(name_of(tensor.dtype), tuple(tensor.shape), start, total, tensor.is_mkldnn, tensor.is_meta)
            for tensor, start, total in zip(found, starts, sums, strict=True)]  # fmt: skip
    states = tuple(KeptMade(code, tuple(kept[first:end])) for code, first, end in codes)
    table = msgspec.json.encode(Table(key, path, version, dict(zip(named, kept, strict=False)), states))
    os.pwrite(file, table + len(table).to_bytes(8, "little") + MAGIC, max(1, size))


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
    kept = [*table.tensors.values(), *(tensor for one in table.made for tensor in one.tensors)]
    if any(one.first < 0 or one.first + one.nbytes > size - 16 - length for one in kept):
        raise KeptWeightsError("it is shorter than its tensors")
    return table


class Restoring:
    """A model that is being filled from a copy: threads write to a GPU while the caller goes on. Weights are there, and
    may be used, once `finish` has returned; after any error they must be read from files."""

    def __init__(self, file: int, parts: Parts, key: str, device: torch.device) -> None:
        """Begin. Raises KeptWeightsError for a copy of another model, or a damaged one."""
        table = read_table(file)
        if table.key != key:
            raise KeptWeightsError("it is of another model, or of other options")
        self.path, self.version = table.path, table.version
        self._parts = parts
        self._sums: list[tuple[Tensor, int]] = []
        self._bytes = mapped(file, os.fstat(file).st_size)
        self._stream = stream_of(device)
        try:
            with torch.inference_mode():
                self._begin(table, device)
        except BaseException:
            self.close()
            raise

    def _begin(self, table: Table, device: torch.device) -> None:
        named = dict(held(self._parts))
        if {name: form_of(tensor) for name, tensor in named.items()} != {
            name: (kept.dtype, kept.shape) for name, kept in table.tensors.items()
        }:
            raise KeptWeightsError("its tensors are not those of the model")
        for name, tensor in named.items():
            self._fill(tensor, table.tensors[name])
        found = list(owners(self._parts))
        if len(found) != len(table.made):
            raise KeptWeightsError("its layers are not those of the model")
        for owner, kept in zip(found, table.made, strict=True):
            there: list[Tensor] = []
            same = encoded(owner.made, there, 0) == kept.made
            if same and [form_of(each) for each in there] == [(one.dtype, one.shape) for one in kept.tensors]:
                for tensor, one in zip(there, kept.tensors, strict=True):
                    self._fill(tensor, one)
            else:
                owner.remake(cast("tuple[object, ...]", decoded(kept.made, [self._new(one, device)
                                                                            for one in kept.tensors])))  # fmt: skip

    def _new(self, kept: KeptTensor, device: torch.device) -> Tensor:
        """In new memory."""
        made = torch.empty(kept.shape, dtype=getattr(torch, kept.dtype), device="meta" if kept.empty else device)
        if not kept.empty:
            self._fill(made, kept)
        return packed(made) if kept.packed else made

    def _fill(self, tensor: Tensor, kept: KeptTensor) -> None:
        stored = self._bytes[kept.first : kept.first + kept.nbytes].view(tensor.dtype).view(kept.shape)
        if self._stream is not None and self._stream.takes(tensor, stored):
            self._stream.copy(tensor, stored)
        else:
            tensor.copy_(stored)
        if self._stream is not None:
            self._sums.append((tensor, kept.sum))
        elif sum_of([tensor]) != [kept.sum]:
            raise KeptWeightsError("its bytes are damaged")

    def finish(self) -> None:
        """Wait for the last byte. Raises KeptWeightsError where what arrived is not what was kept."""
        try:
            if self._stream is not None:
                self._stream.flush()
            with torch.inference_mode():
                if sum_of([tensor for tensor, _ in self._sums]) != [expected for _, expected in self._sums]:
                    raise KeptWeightsError("its bytes are damaged")
                for part in self._parts.values():
                    pack(places(part))
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the copy, which stays."""
        if self._stream is not None:
            self._stream.close()
        self._sums.clear()


def places(part: Part) -> dict[str, Destination]:
    return dict(part.destinations())


def owners(parts: Parts) -> Iterator[Owner]:
    for part in parts.values():
        yield from dict.fromkeys(one.owner for one in places(part).values() if one.owner is not None)


def held(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """The tensors of destinations."""
    for name, part in parts.items():
        for tensor, place in places(part).items():
            if place.tensor is not None:
                yield f"{name} {tensor}", place.tensor


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


def placed(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each begins, and the bytes of all."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        if not tensor.is_meta:
            end += -(-tensor.numel() * tensor.itemsize // ALIGNED) * ALIGNED
    return starts, end


def copied(tensors: Sequence[Tensor], starts: Sequence[int], to: Tensor) -> list[int]:
    """Copy them to the file; their sums."""
    stream = next(filter(None, map(stream_of, dict.fromkeys(tensor.device for tensor in tensors))), None)
    sums: list[int] = []
    try:
        if stream is not None:
            sums = sum_of(tensors)
        for tensor, start in zip(tensors, starts, strict=True):
            dense = tensor.to_dense() if tensor.is_mkldnn else tensor
            if stream is None:
                sums += sum_of([dense])
            if dense.is_meta:
                continue
            place = to[start : start + dense.numel() * dense.itemsize].view(dense.dtype).view(dense.shape)
            if stream is not None and stream.takes(place, dense):
                stream.copy(place, dense)
            else:
                place.copy_(dense)
        if stream is not None:
            stream.flush()
    finally:
        if stream is not None:
            stream.close()
    return sums


def sum_of(tensors: Sequence[Tensor]) -> list[int]:
    """Of each one's numbers' bits, modulo 2^64; the device is waited for once."""
    found = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        if tensor.is_meta:
            total = torch.zeros((), dtype=torch.int64)
        elif tensor.numel():
            total = tensor.view(BITS[tensor.itemsize]).sum(dtype=torch.int64)
        found.append(total)
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
    with suppress(OSError, ValueError):  # fewer pages, where the kernel has large ones for such files
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
