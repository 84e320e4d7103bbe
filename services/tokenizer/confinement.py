"""Child processes in which workers do what a request may have made malicious.

CPU time and memory of a child are limited for good; it opens and writes no file, makes no connection, and starts no
process."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
from collections.abc import Callable, Mapping

from penstock.services.supervisor.process import PARENT, follow_parent
from penstock.services.tokenizer.worker_protocol import TIME_SIGNAL, Limits, Refusal, enlarge, limit_memory, lower

MOST_ANSWER = 256 << 20  # bytes of one child's answer
OUT_OF_MEMORY = os.EX_UNAVAILABLE
TIME_CODES = (-TIME_SIGNAL, -signal.SIGXCPU)
# Of a process whose memory or stack ran out; the first is our own exit code for it.
MEMORY_CODES = (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGKILL)


class Child:
    """A child process for one job, which `forked` has made. Closes its ends of the pipes."""

    def __init__(self, process: int, jobs: int, answers: int) -> None:
        self._process = process
        self._jobs, self._answers = jobs, answers  # pipes
        self._code: int | None = None

    def ask(self, job: bytes) -> bytes:
        """Its answer, or what there is of one where it ends before. Called once."""
        with contextlib.suppress(BrokenPipeError):
            write_all(self._jobs, job)
        os.close(self._jobs)
        body = read_all(self._answers, MOST_ANSWER)
        if len(body) > MOST_ANSWER:
            os.kill(self._process, signal.SIGKILL)
        return body

    def end(self, *, kill: bool = False) -> int:
        """Wait for its end: its exit code, EX_OK where it completed."""
        if self._code is None:
            if kill:
                os.kill(self._process, signal.SIGKILL)
            _, status = os.waitpid(self._process, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code


def forked(
    work: Callable[[bytes], bytes], seconds: float, memory: int, prepare: Callable[[], None] | None = None
) -> Child:
    """A child that is forked before its job is there. Its answer is what `work` makes of the job, with `seconds` of CPU
    time and `memory` bytes beyond what `prepare` has taken. Called by processes with one thread."""
    jobs, to_child = os.pipe()
    from_child, answers = os.pipe()
    for pipe in (to_child, answers):
        enlarge(pipe)
    own = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            os.close(to_child)  # the parent's end, or the job would never be whole
            if prepare is not None:
                prepare()
            confine(memory, own)
            job = read_all(jobs)
            limit_time(seconds)
            write_all(answers, work(job))
            os.close(answers)  # the answer is whole: nobody waits until its memory is given back
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:  # guard: design 7, the child must not go on as the worker
            os._exit(os.EX_SOFTWARE)
        os._exit(os.EX_OK)
    os.close(jobs)
    os.close(answers)
    return Child(process, to_child, from_child)


def in_child(work: Callable[[], bytes], seconds: float, memory: int) -> tuple[bytes, int]:
    """What `work` returns in a child process, and its exit code."""
    child = forked(lambda _: work(), seconds, memory)
    return child.ask(b""), child.end()


def limit_passed(code: int, limits: Limits) -> Refusal | None:
    """The limit that a child's exit code tells of; None: it ended for another reason."""
    if code in TIME_CODES:
        return limits.too_slow
    return limits.too_large if code in MEMORY_CODES else None


def confine(memory: int, parent: int) -> None:
    """Limit this process for good: it ends with its parent, opens and writes no file, and starts no process."""
    follow_parent({PARENT: str(parent)})
    limit_memory(memory, for_good=True)
    for kind, most in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        lower(kind, most)


def limit_time(seconds: float) -> None:
    """Limit this process to so much CPU time from now on, for good."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    lower(resource.RLIMIT_CPU, math.ceil(used + seconds) + 1)  # after the timer, which the process could reset
    signal.setitimer(signal.ITIMER_PROF, seconds)


def write_all(descriptor: int, body: bytes) -> None:
    rest = memoryview(body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_all(descriptor: int, most: float = math.inf) -> bytes:
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
