"""The worker's end of the protocol between a worker process and its owner (`worker_pool`), and limits of a worker.

Both ends send frames, a head and msgpack, over the worker's standard streams. The worker reports with an empty frame
that it is ready, and then answers one frame at a time until its input ends. What is large in an answer may stand in
memory that both share. No Pillow is imported here: an image worker alone needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.protocol.errors import InvalidRequest

HEAD = struct.Struct("<II")  # before each frame: its length, and how many bytes of the shared memory belong to it
TIME_SIGNAL = signal.SIGPROF  # of ITIMER_PROF, which limits a worker's CPU time; it ends the process
PIPE = 1 << 20  # bytes that a writer may be ahead of its reader: pixels are megabytes, and the default is 64 kB


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why a worker refuses a request: the fields of an `InvalidRequest`."""

    message: str
    code: str | None = None
    param: str | None = None


def refusal(error: InvalidRequest) -> Refusal:
    """An error for the owner to raise."""
    return Refusal(error.message, error.code, error.param)


class Done(msgspec.Struct, frozen=True, tag=True):
    """A compiled grammar, as `engine_core.grammar.compilation.Compiled`."""

    source: str
    approximations: tuple[str, ...]
    seconds: float
    memory: int = 0
    unique: bytes = b""


COMPILED: msgspec.msgpack.Decoder[Done | Refusal] = msgspec.msgpack.Decoder(Done | Refusal)


class Limits(msgspec.Struct, frozen=True):
    """The limits of one job, and how its request hears of them."""

    seconds: float  # of CPU
    memory: int  # bytes
    work: str  # what takes longer, in words
    option: str  # in front of -timeout and -memory
    code: str
    param: str | None = None

    @property
    def too_slow(self) -> Refusal:
        return self._refusal(f"{self.seconds:g} s ({self.option}-timeout)")

    @property
    def too_large(self) -> Refusal:
        limit = f"{self.memory >> 20} MiB ({self.option}-memory)"
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        own = "" if hard == resource.RLIM_INFINITY else ", or than the server's own limit leaves (ulimit -v)"
        return self._refusal(limit + own)

    def _refusal(self, limit: str) -> Refusal:
        return Refusal(f"{self.work} takes more than {limit}", self.code, self.param)


class ImageSettings(msgspec.Struct, frozen=True):
    """What an image worker needs of the model, and the limits of one picture."""

    processor: ProcessorSpec
    most_pixels: int  # of a file
    seconds: float  # of CPU
    memory: int  # bytes

    @property
    def limits(self) -> Limits:
        return Limits(self.seconds, self.memory, "decoding it", "--media", "image_too_complex")


class ImageJob(msgspec.Struct, frozen=True):
    """A file to decode."""

    data: bytes
    detail: str


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """A picture, whose pixels are in the shared memory: uint8 [height, width, 3], RGB."""

    height: int
    width: int

    @property
    def bytes(self) -> int:
        return 3 * self.height * self.width


DECODED: msgspec.msgpack.Decoder[Decoded | Refusal] = msgspec.msgpack.Decoder(Decoded | Refusal)


def requests() -> Iterator[bytes]:
    """Report that this worker is ready, then yield the owner's frames."""
    reply(b"")
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        yield frame


def reply(body: bytes, shared: int = 0) -> None:
    """shared: bytes of the shared memory that are the answer's."""
    write_frame(sys.stdout.buffer, body, shared)


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(HEAD.size)
    return stream.read(HEAD.unpack(head)[0]) if len(head) == HEAD.size else None


def write_frame(stream: BinaryIO, body: bytes, shared: int = 0) -> None:
    stream.write(HEAD.pack(len(body), shared))
    stream.write(body)
    stream.flush()


def enlarge(pipe: int) -> None:
    """Let a pipe hold PIPE bytes, as far as this user's share of the system's buffers allows."""
    with contextlib.suppress(PermissionError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)


def limit_memory(more: int, *, for_good: bool = False) -> None:
    """Limit this process to `more` bytes of address space beyond what it has; a lower limit stays."""
    lower(resource.RLIMIT_AS, address_space() + more, for_good=for_good)


def lower(kind: int, most: int, *, for_good: bool = True) -> None:
    """Lower a limit, with `for_good` the hard one too; a lower limit stays."""
    _, hard = resource.getrlimit(kind)
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (soft, soft if for_good else hard))


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`. Source: mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def allocated() -> int:
    """Bytes that this process has allocated and not freed; 0 if the C library cannot say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # since glibc 2.33
    if mallinfo is None:
        return 0
    mallinfo.restype = MallocInfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def address_space() -> int:
    """Bytes of address space of this process. Source: proc(5), statm."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
