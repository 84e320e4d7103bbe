"""Large parts of weight files on their way to a GPU: threads copy them from the mapped file into pinned memory, from
which they go on while the next ones are read. Weights to be kept in the host's memory go the other way. An H200 had
16 GB from the page cache in 0.6 s so, and in 2.1 s by copies straight from the mapped file."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor

LEAST = 4 << 20  # bytes of a part that goes this way
CHUNK = 16 << 20  # bytes of a buffer
THREADS = 4  # at most, each with a buffer


class WeightStream:
    """Copies between the host's memory and one device. It is flushed before a file is closed, and closed before the
    weights are used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # which may still use the weights
        threads = max(1, min(THREADS, len(os.sched_getaffinity(0)) // 2))
        self._threads = ThreadPoolExecutor(threads, "weights")
        self._buffers: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(threads):
            self._buffers.put(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=cuda))
        self._copies: list[Future[None]] = []

    def takes(self, part: Tensor, stored: Tensor) -> bool:
        """Whether this part of a weight can go this way: it is large, and its bytes are those of the file."""
        alike = part.dtype == stored.dtype and part.is_contiguous() and stored.is_contiguous()
        return alike and self._device in (part.device, stored.device) and part.nbytes >= LEAST

    def copy(self, part: Tensor, stored: Tensor) -> None:
        """Begin to copy; `part` is written by the time of `flush`."""
        to, source = part.view(-1).view(torch.uint8), stored.view(-1).view(torch.uint8)
        for first in range(0, part.nbytes, CHUNK):
            end = min(first + CHUNK, part.nbytes)
            self._copies.append(self._threads.submit(self._chunk, to[first:end], source[first:end]))

    def flush(self) -> None:
        """Wait until all is there. Raises what a copy raised: OSError where a file cannot be read."""
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.result()
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """What has not begun is not copied."""
        self._threads.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()

    @torch.inference_mode()
    def _chunk(self, to: Tensor, source: Tensor) -> None:
        buffer = self._buffers.get()
        try:
            held = buffer[: len(source)]
            read = source.device.type == "cpu"
            if read:
                held.copy_(source)
            with torch.cuda.stream(self._stream):  # of None: nothing happens
                (to if read else held).copy_(held if read else source, non_blocking=True)
            if self._stream is not None:
                self._stream.record_event().synchronize()  # other threads read meanwhile
            if not read:
                to.copy_(held)
        finally:
            self._buffers.put(buffer)
