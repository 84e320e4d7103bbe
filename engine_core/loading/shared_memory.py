"""Tensors in another process's memory: of a GPU by CUDA IPC handles, of the host by files below /dev/shm.

A handle is of a whole allocation; a tensor is bytes of it from an offset on. Nothing is unpickled. Source: CUDA driver
API, 6.13: cuIpcGetMemHandle, cuIpcOpenMemHandle, cuMemGetAddressRange.
"""

from __future__ import annotations

import base64
import math
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine_core.distributed.custom_all_reduce import HANDLE_BYTES, CudaMemory, DeviceMemory
from penstock.kernels.chip import uuid_of
from penstock.protocol.control import HOST, WeightTensor
from penstock.protocol.errors import ModelError

FOLDER = Path("/dev/shm")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
UUID = "GPU-"  # that some tools put before a GPU's own
DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32,
}  # fmt: skip


class DeviceBytes:
    """Bytes of a GPU's memory, as torch takes them: it refuses what is said to be read alone."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def place_of(device: torch.device) -> str:
    """What handles of this device's memory stand under."""
    return HOST if device.type == "cpu" else uuid_of(device)


def handle_of(tensor: WeightTensor, place: str) -> bytes:
    """Raises ModelError where there is none for this device, or one that cannot be."""
    found = next((handle for name, handle in tensor.handles if name.removeprefix(UUID) == place), None)
    if found is None:
        given = ", ".join(name for name, _ in tensor.handles)
        raise ModelError(f"tensor {tensor.name}: no handle for {place}; those that there are: {given}")
    if place == HOST:
        if not NAME.fullmatch(found.decode(errors="replace")):
            raise ModelError(f"tensor {tensor.name}: {found!r} is no name of a file in {FOLDER}")
    elif len(found) != HANDLE_BYTES:
        raise ModelError(f"tensor {tensor.name}: a CUDA IPC handle has {HANDLE_BYTES} bytes, this one {len(found)}")
    return found


def bytes_of(tensor: WeightTensor) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


@contextmanager
def opened(
    tensors: Iterable[WeightTensor], device: torch.device, memory: DeviceMemory | None = None
) -> Iterator[dict[str, Tensor]]:
    """The tensors by name, as long as the context. Raises ModelError naming the one whose memory cannot be opened, or
    does not hold it."""
    place, buffers, found = place_of(device), {}, {}
    with ExitStack() as stack:
        for tensor in tensors:
            handle = handle_of(tensor, place)
            if handle not in buffers:
                buffers[handle] = stack.enter_context(
                    host_bytes(handle, tensor.name) if place == HOST else device_bytes(handle, device, memory)
                )
            buffer, first, size = buffers[handle], tensor.offset, bytes_of(tensor)
            if first < 0 or first % DTYPES[tensor.dtype].itemsize or first + size > len(buffer):
                held = f"its memory has {len(buffer)} bytes, it would be {size} from {first} on"
                raise ModelError(f"tensor {tensor.name}: {held}")
            found[tensor.name] = buffer[first : first + size].view(DTYPES[tensor.dtype]).view(tensor.shape)
        try:
            yield found
        finally:
            found.clear()
            buffers.clear()


@contextmanager
def host_bytes(handle: bytes, tensor: str) -> Iterator[Tensor]:
    """A file's, read alone."""
    path = FOLDER / handle.decode()
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"tensor {tensor}: {path}: {error.strerror}") from None
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise ModelError(f"tensor {tensor}: {path} is no file, or an empty one")
        # Private pages, so that torch may have memory that it could write to; nothing does.
        mapped = mmap.mmap(number, 0, mmap.MAP_PRIVATE)
    finally:
        os.close(number)
    yield torch.frombuffer(mapped, dtype=torch.uint8)


@contextmanager
def device_bytes(handle: bytes, device: torch.device, memory: DeviceMemory | None) -> Iterator[Tensor]:
    """An allocation's."""
    driver = memory or CudaMemory()
    try:
        address = driver.open(handle)
    except OSError as error:
        raise ModelError(f"a CUDA IPC handle cannot be opened: {error}") from None
    try:
        yield torch.as_tensor(DeviceBytes(address, driver.extent(address)[1]), device=device)
    finally:
        torch.cuda.synchronize(device)
        driver.close(address)


def share(named: Iterable[tuple[str, Tensor]], memory: DeviceMemory | None = None) -> list[dict[str, object]]:
    """`tensors` of POST /update_weights_from_tensor for contiguous tensors on a GPU, which must live and stay as they
    are until it is answered. Raises ValueError for a tensor that is none, and OSError with the driver's error: memory
    of torch's expandable segments has no such handles."""
    driver, found = memory or CudaMemory(), []
    for name, tensor in named:
        if tensor.device.type != "cuda" or not tensor.is_contiguous():
            raise ValueError(f"{name}: a contiguous tensor on a GPU is needed")
        torch.cuda.synchronize(tensor.device)
        start, _ = driver.extent(tensor.data_ptr())
        handle = base64.b64encode(driver.handle(start)).decode()
        found.append(
            {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
             "offset": tensor.data_ptr() - start, "handles": {place_of(tensor.device): handle}}
        )  # fmt: skip
    return found
