"""Large parts of weight files on their way to a GPU: threads copy them from the mapped file into pinned memory, from
which they go on while the next ones are read. Weights to be kept in the host's memory go the other way, to a file of
that memory, which is read and written rather than mapped: 16 GB of new pages would be that many faults. An H200 had
16 GB from the page cache in 0.6 s so, and in 2.1 s by copies straight from the mapped file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

LEAST = 4 << 20  # bytes of a part that goes this way
CHUNK = 16 << 20  # bytes of a buffer
THREADS = 4  # at most, each with a buffer
Move = Callable[[Tensor], object]  # to fill a buffer, or to take what it holds


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

    def takes(self, part: Tensor) -> bool:
        """Whether this part of a weight can go this way: it is large, and one run of the device's memory."""
        return part.is_contiguous() and part.device == self._device and part.nbytes >= LEAST

    def copy(self, part: Tensor, stored: Tensor) -> None:
        """Begin to fill a part, which is written by the time of `flush`, with a tensor of the same type."""
        source = stored.view(-1).view(torch.uint8)
        self._each(part, self._fill, lambda first, buffer: buffer.copy_(source[first : first + len(buffer)]))

    def read(self, part: Tensor, file: int, start: int) -> None:
        """Begin to fill a part with a file's bytes from `start` on."""
        self._each(part, self._fill, lambda first, buffer: read(file, start + first, buffer))

    def write(self, part: Tensor, file: int, start: int) -> None:
        """Begin to write a part to a file, from `start` on."""
        self._each(part, self._drain, lambda first, buffer: write(file, start + first, buffer))

    def _each(self, part: Tensor, way: Callable[[Tensor, Move], None], move: Callable[[int, Tensor], object]) -> None:
        """Have threads take each chunk of a part this way; `move` is given the chunk's place in the part."""
        flat = part.view(-1).view(torch.uint8)
        for first in range(0, len(flat), CHUNK):
            self._copies.append(self._threads.submit(way, flat[first : first + CHUNK], partial(move, first)))

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

    def _fill(self, chunk: Tensor, move: Move) -> None:
        with self._buffer(len(chunk)) as buffer:
            move(buffer)
            self._transfer(chunk, buffer)

    def _drain(self, chunk: Tensor, move: Move) -> None:
        with self._buffer(len(chunk)) as buffer:
            self._transfer(buffer, chunk)
            move(buffer)

    @contextmanager
    def _buffer(self, size: int) -> Iterator[Tensor]:
        buffer = self._buffers.get()
        try:
            with torch.inference_mode():
                yield buffer[:size]
        finally:
            self._buffers.put(buffer)

    def _transfer(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):  # of None: nothing happens
            to.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.record_event().synchronize()  # other threads read meanwhile


def read(file: int, start: int, into: Tensor) -> None:
    """Fill a tensor of bytes, in the host's memory, with those of a file. Raises EOFError where it has fewer."""
    left = memoryview(into.numpy())
    while len(left):
        count = os.preadv(file, [left], start)
        if not count:
            raise EOFError("the file ends early")
        left, start = left[count:], start + count


def write(file: int, start: int, source: Tensor) -> None:
    """Write a tensor of bytes, in the host's memory, to a file. Raises OSError."""
    left = memoryview(source.numpy())
    while len(left):
        count = os.pwrite(file, left, start)
        left, start = left[count:], start + count
