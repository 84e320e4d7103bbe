"""What a compile worker and its owner say to each other: a `Grammar` in, `Done` or `Refusal` out."""

from __future__ import annotations

import signal
import struct

import msgspec

LENGTH = struct.Struct("<I")  # before each frame, which is msgpack
TIME_SIGNAL = signal.SIGPROF  # of ITIMER_PROF, by which a worker bounds its CPU seconds; it ends the process


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why a grammar is not served."""

    message: str
    code: str | None = None


class Done(msgspec.Struct, frozen=True, tag=True):
    """As `engine_core.grammar.compilation.Compiled`."""

    source: str
    approximations: tuple[str, ...]
    seconds: float
    slowest: float
    memory: int = 0


OUTCOME: msgspec.msgpack.Decoder[Done | Refusal] = msgspec.msgpack.Decoder(Done | Refusal)
