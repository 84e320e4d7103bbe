"""What workers of every kind share: frames over their standard streams, and how much of the machine they take."""

from __future__ import annotations

import ctypes
import resource
from typing import BinaryIO

from penstock.services.tokenizer.compile_protocol import LENGTH


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def limit_memory(more: int, *, for_good: bool = False) -> None:
    """Let this process take `more` bytes of address space beside what it has; never more than it may already."""
    lower(resource.RLIMIT_AS, address_space() + more, for_good=for_good)


def lower(kind: int, most: int, *, for_good: bool = True) -> None:
    """Lower a limit, the hard one too if `for_good`; one that is lower already stays."""
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
    """Bytes that this process has allocated and not freed; 0 where the C library doesn't tell."""
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)  # since glibc 2.33
    if tell is None:
        return 0
    tell.restype = MallocInfo
    found = tell()
    return int(found.uordblks + found.hblkhd)


def address_space() -> int:
    """Bytes of address space of this process. Source: proc(5), statm."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
