"""What workers have made of requests, and what they are making: equal requests share one job and its outcome."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from penstock.protocol.errors import Overloaded
from penstock.services.tokenizer.worker_pool import MOST_WAITING, WorkerPool

T = TypeVar("T")


class OutcomeCache(Generic[T]):
    """Outcomes by their key, least recently used first, bounded in bytes and entries. Used on one asyncio loop."""

    def __init__(
        self, pool: WorkerPool, what: str, size_of: Callable[[T], int], most_bytes: int, most_entries: float = math.inf
    ) -> None:
        """what: the jobs, in the error of those for which there is no room."""
        self._pool = pool
        self._what = what
        self._size_of = size_of
        self._most = most_bytes, most_entries
        self._kept: OrderedDict[bytes, T] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[T]] = {}
        self.bytes = 0
        self.hits = 0  # requests whose outcome was kept, or being made

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: bytes, work: Callable[[], Awaitable[T]]) -> T:
        """The outcome for `key`, which `work` makes if nobody else has or does. The job outlives a request that is
        cancelled. Raises Overloaded, and what `work` raises."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            self.hits += 1
            return found
        task = self._running.get(key)
        if task is not None:
            self.hits += 1
        elif self._pool.waiting >= MOST_WAITING:
            raise Overloaded(f"too many {self._what}")
        else:
            task = self._running[key] = asyncio.get_running_loop().create_task(self._run(key, work))
            task.add_done_callback(retrieved)
        return await asyncio.shield(task)

    def keep(self, key: bytes, outcome: T) -> None:
        self._kept[key] = outcome
        self.bytes += self._size_of(outcome)
        most_bytes, most_entries = self._most
        while len(self._kept) > most_entries or self.bytes > most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= self._size_of(oldest)

    def close(self) -> None:
        for task in self._running.values():
            task.cancel()

    async def _run(self, key: bytes, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        finally:
            del self._running[key]


def retrieved(task: asyncio.Task[T]) -> None:
    """Nobody may be waiting any more for what it raised."""
    if not task.cancelled():
        task.exception()
