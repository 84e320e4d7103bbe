"""Asynchronous copies between host and device: one pinned upload per step, results downloaded on a copy stream.

On a CPU both are views of the same memory.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TYPES: Mapping[np.dtype[Any], torch.dtype] = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
ALIGNMENT = 16  # bytes; every array of a packed buffer starts at a multiple
SMALLEST = 1 << 16  # bytes of a pinned buffer


def pinned_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host, pinned for a GPU and no larger than it must be: PyTorch's own has sizes that are powers of
    two. Raises MemoryError if the system does not let it be pinned."""
    memory = torch.empty(*shape, dtype=dtype)
    pin(memory, device)
    return memory


def pin(memory: Tensor, device: torch.device) -> None:
    """Pin memory of the host for a GPU, as long as it is there. Raises MemoryError."""
    if device.type == "cuda" and memory.numel():
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
        if (status := int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))) != 0:
            raise MemoryError(f"{memory.nbytes} bytes of the host's memory cannot be pinned (CUDA error {status})")


class PinnedPool:
    """Buffers of one size, pinned for a GPU, that are used again: pinning takes long, and launches wait meanwhile.

    A thread takes them, and the one that launches gives those back that it has sent.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._dtype, self._device = size, dtype, device
        self._free: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def take(self) -> Tensor:
        """Zeros. Raises MemoryError."""
        if self._free:
            memory, read = self._free.popleft()
            if read is not None:
                read.synchronize()
            return memory.zero_()
        pages = mmap.mmap(-1, self._size * self._dtype.itemsize)  # its own: none is pinned twice
        memory = torch.frombuffer(pages, dtype=self._dtype).zero_()  # written, so that pinning has something to find
        pin(memory, self._device)
        return memory

    def give(self, memory: Tensor, *, sent: bool = True) -> None:
        """Have it used again, once the device has done what is enqueued now if it may have been sent there."""
        read = None
        if sent and self._device.type == "cuda":
            read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            read.record(torch.cuda.current_stream(self._device))
        self._free.append((memory, read))


@dataclass(frozen=True)
class Staging:
    """A pinned buffer and the event after which it may be written again."""

    memory: Tensor  # uint8 [bytes]
    bytes: NDArray[np.uint8]  # the same
    copied: torch.cuda.Event


class Upload:
    """Sends arrays to the device, packed into one pinned buffer and copied asynchronously.

    Buffers are used round robin. One is rewritten only when its last copy has ended; there are enough for the copies of
    the steps in flight, so this never waits in practice.
    """

    def __init__(self, device: torch.device, buffers: int = 32) -> None:
        self.device = device
        self._ring: list[Staging | None] = [None] * buffers
        self._turn = 0

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Device tensors with the arrays' contents, shapes and types.

        Arrays must be C-contiguous, writable and left unchanged: on a CPU the tensors are views of them.
        """
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        staging = self._buffer(end)
        for start, array in zip(starts, arrays, strict=True):
            staging.bytes[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        packed = staging.memory[:end].to(self.device, non_blocking=True)
        staging.copied.record()  # in the stream of the copy, whichever that is now
        tensors = []
        for start, array in zip(starts, arrays, strict=True):
            part = packed[start : start + array.nbytes].view(TYPES[array.dtype])
            tensors.append(part if array.ndim == 1 else part.view(array.shape))
        return tensors

    def put(self, array: NDArray[Any], target: Tensor) -> None:
        """Overwrite the beginning of `target`, a flat device tensor of the array's type, with the array."""
        staging = self._buffer(array.nbytes)
        staging.bytes[: array.nbytes] = array.view(np.uint8)
        target[: len(array)].copy_(staging.memory[: array.nbytes].view(target.dtype), non_blocking=True)
        staging.copied.record()  # in the stream of the copy, whichever that is now

    def _buffer(self, size: int) -> Staging:
        self._turn = (self._turn + 1) % len(self._ring)
        staging = self._ring[self._turn]
        if staging is not None:
            staging.copied.synchronize()
        if staging is None or len(staging.bytes) < size:
            memory = torch.empty(max(SMALLEST, 2 * size), dtype=torch.uint8, pin_memory=True)
            staging = Staging(memory, memory.numpy(), torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._ring[self._turn] = staging
        return staging


class Download:
    """Copies results to the host on a copy stream; an event tells when they have arrived."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done: torch.cuda.Event | None = None

    def fetch(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Host tensors, readable once the event (None: at once) has happened.

        The caller keeps the device tensors until then, and calls `guard` before it enqueues what overwrites them.
        """
        if self._stream is None:
            return list(tensors), None
        self._made.record()
        self._stream.wait_event(self._made)
        fetched = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        with torch.cuda.stream(self._stream):
            for host, tensor in zip(fetched, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._done.record(self._stream)
        return fetched, self._done

    def guard(self) -> None:
        """Let the device's next work start only when the last fetch has been copied."""
        if self._stream is not None and self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)
