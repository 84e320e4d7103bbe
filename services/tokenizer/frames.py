"""What workers of every kind share: frames over their standard streams, and how much of the machine they take."""

from __future__ import annotations

import resource
from typing import BinaryIO

from services.tokenizer.orders import LENGTH


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def address_space() -> int:
    """Bytes of address space of this process. Source: proc(5), statm."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
