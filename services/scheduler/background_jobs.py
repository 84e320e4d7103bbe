"""Work beside the loop: native code that releases the GIL, in threads whose results the loop collects.

The loop sleeps in poll; a descriptor becomes readable when a job is done.
"""

from __future__ import annotations

import os
import select
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, ParamSpec, TypeVar

K = TypeVar("K")
T = TypeVar("T")
P = ParamSpec("P")


class BackgroundJobs(Generic[K, T]):
    """Jobs of one kind, each with a key. Owned by the loop's thread; the jobs run in `threads`."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._done: deque[tuple[K, Future[T]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._release = weakref.finalize(self, os.close, self._wake)  # at most once: the number may be reused
        self.running = 0  # jobs that were started and not collected

    def fileno(self) -> int:
        return self._wake

    def start(self, key: K, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `work`; `collect` returns it under this key."""
        self.running += 1
        job = self._threads.submit(work, *args, **kwargs)
        job.add_done_callback(self._finisher(key))
        return job

    def collect(self) -> list[tuple[K, Future[T]]]:
        """Jobs that are done, in the order in which they ended."""
        if not self.running:
            return []
        try:
            told = os.eventfd_read(self._wake)  # those whose thread is about to tell are collected when it has
        except BlockingIOError:
            return []
        self.running -= told
        return [self._done.popleft() for _ in range(told)]

    def wait(self, seconds: float) -> bool:
        """Whether there is something to collect after at most `seconds`. Waiting releases the GIL."""
        return self.running > 0 and bool(select.select([self._wake], [], [], seconds)[0])

    def close(self) -> None:
        """Wait for running jobs, without collecting them."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._release()

    def _finisher(self, key: K) -> Callable[[Future[T]], None]:
        def finish(future: Future[T]) -> None:
            self._done.append((key, future))
            os.eventfd_write(self._wake, 1)

        return finish
