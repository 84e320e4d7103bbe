"""Child processes in which workers do what a request may have made malicious.

CPU time and memory of a child are limited for good; it opens and writes no file, makes no connection, and starts no
process."""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable, Mapping

from penstock.services.supervisor.process import PARENT, follow_parent
from penstock.services.tokenizer.worker_protocol import TIME_SIGNAL, enlarge, limit_memory, lower

MOST_ANSWER = 256 << 20  # bytes of one child's answer
OUT_OF_MEMORY = os.EX_UNAVAILABLE
TIME_CODES = (-TIME_SIGNAL, -signal.SIGXCPU)
# Of a process whose memory or stack ran out; the first is our own exit code for it.
MEMORY_CODES = (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGKILL)


def in_child(work: Callable[[], bytes], seconds: float, memory: int) -> tuple[bytes, int]:
    """What `work` returns in a child process with `seconds` of CPU time and `memory` bytes, and the child's exit code:
    EX_OK where it completed. Called by processes with one thread."""
    reader, writer = os.pipe()
    enlarge(writer)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            confine(seconds, memory, own)
            write_all(writer, work())
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:  # guard: design 7, the child must not go on as the worker
            os._exit(os.EX_SOFTWARE)
        os._exit(os.EX_OK)
    os.close(writer)
    body = read_all(reader, MOST_ANSWER)
    if len(body) > MOST_ANSWER:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return body, os.waitstatus_to_exitcode(status)


def confine(seconds: float, memory: int, parent: int) -> None:
    """Limit this process for good: it ends with its parent, opens and writes no file, and starts no process."""
    follow_parent({PARENT: str(parent)})
    limit_memory(memory, for_good=True)
    for kind, most in (
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),  # after the timer, which the process could reset
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        lower(kind, most)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def unlimit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def write_all(descriptor: int, body: bytes) -> None:
    rest = memoryview(body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_all(descriptor: int, most: int) -> bytes:
    """Read until the other end closes, or there are more than `most` bytes. Closes the descriptor."""
    parts: list[bytes] = []
    length = 0
    while length <= most and (part := os.read(descriptor, 1 << 20)):
        parts.append(part)
        length += len(part)
    os.close(descriptor)
    return b"".join(parts)


def environment(names: Mapping[str, str]) -> dict[str, str]:
    """The part of a tokenizer's environment that Python needs to start, without secrets."""
    return {name: value for name, value in names.items() if name in ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ")}
