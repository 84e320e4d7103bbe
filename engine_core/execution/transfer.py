"""Between host and device without waiting: one pinned copy up per step, results down on a stream of their own.

On a CPU both are views of the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes; every array of a packed buffer starts at a multiple


@dataclass(frozen=True)
class Staging:
    """A pinned buffer and the event after which it may be written again."""

    memory: Tensor  # uint8 [bytes]
    copied: torch.cuda.Event


class Upload:
    """Sends arrays to the device, packed into one pinned buffer and copied without waiting.

    Buffers are used in turn. One is written again only when its last copy has ended; there are enough for the copies of
    the steps in flight, so that it has.
    """

    def __init__(self, device: torch.device, buffers: int = 32) -> None:
        self.device = device
        self._ring: list[Staging | None] = [None] * buffers
        self._turn = 0

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Device tensors with the arrays' contents, shapes and types.

        The arrays must be C-contiguous, writable and not be changed afterwards: on a CPU the tensors are views of them.
        """
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        starts = [0, *ends[:-1]]
        staging = self._buffer(ends[-1])
        host = staging.memory.numpy()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        packed = staging.memory[: ends[-1]].to(self.device, non_blocking=True)
        staging.copied.record()
        tensors = []
        for start, array in zip(starts, arrays, strict=True):
            kind = torch.from_numpy(array).dtype
            tensors.append(packed[start : start + array.nbytes].view(kind).view(array.shape))
        return tensors

    def put(self, array: NDArray[Any], target: Tensor) -> None:
        """Overwrite the first of `target`, a device tensor of the array's type, with the array."""
        staging = self._buffer(array.nbytes)
        staging.memory.numpy()[: array.nbytes] = array.reshape(-1).view(np.uint8)
        target[: len(array)].copy_(staging.memory[: array.nbytes].view(target.dtype), non_blocking=True)
        staging.copied.record()

    def _buffer(self, size: int) -> Staging:
        self._turn = (self._turn + 1) % len(self._ring)
        staging = self._ring[self._turn]
        if staging is not None:
            staging.copied.synchronize()
        if staging is None or len(staging.memory) < size:
            room = max(1 << 16, 2 * size)
            staging = Staging(
                torch.empty(room, dtype=torch.uint8, pin_memory=True),
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
            )
            self._ring[self._turn] = staging
        return staging


class Download:
    """Brings results to the host on a copy stream; an event says when they are there."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Host tensors, readable once the event (None: at once) has happened.

        The caller keeps the device tensors until then, and calls `guard` before it enqueues what overwrites them.
        """
        if self._stream is None:
            return list(tensors), None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            fetched = []
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                fetched.append(host.copy_(tensor, non_blocking=True))
            self._done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._done.record(self._stream)
        return fetched, self._done

    def guard(self) -> None:
        """Let the device's next work begin only when what was fetched last has left it."""
        if self._stream is not None and self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)
