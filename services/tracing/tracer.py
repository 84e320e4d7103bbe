"""One process's tracer: spans go into a bounded queue, a thread tells them to the collector.

Telling a span costs its owner an append. A full queue drops what comes, an export that fails drops what it held, and
both are counted; nobody ever waits, but the end of the process, for LAST_WORDS at most, and of the processes of one
server the first one alone where their collector hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from penstock.protocol.config import TraceConfig
from penstock.services.supervisor import logs
from penstock.services.tracing.clock import Clock, wall_offset
from penstock.services.tracing.context import Ids
from penstock.services.tracing.settings import Settings, service_attributes, settings
from penstock.services.tracing.silence import Silence, silence_of
from penstock.services.tracing.span import Span, Value

log = logging.getLogger(__name__)

LAST_WORDS = 1.0  # seconds that the end of a process waits for the collector
PATIENCE = 0.5  # seconds of an export after which the end of the process does not wait for it at all
COMPLAINT_SECONDS = 60.0  # between log lines about a collector that takes nothing
LATE, HANGS, FAILS = "the collector did not take them in time", "the collector hangs", "the collector takes none"


class Undelivered(Exception):
    """The collector did not take an export; the text says why."""


class Collector(Protocol):
    """Used by one thread."""

    def export(self, spans: Sequence[Span]) -> None:
        """Hand spans over; blocks for a while. Raises Undelivered."""

    def close(self) -> None: ...


class TraceStatistics(msgspec.Struct, frozen=True):
    """Spans since the start, and those that wait."""

    told: int  # all that were to be told
    delivered: int
    dropped: int  # for want of room in the queue, with an export that failed, or with the end of the process
    waiting: int


class Tracer:
    """Takes spans from the threads of one process. `clock` turns their times into wall time, `silence` is what the
    processes of its server know of the collector at their end."""

    def __init__(
        self,
        found: Settings,
        resource: Mapping[str, Value],
        clock: Clock,
        way: Collector | None = None,
        silence: Silence | None = None,
    ) -> None:
        self.settings = found
        self.clock = clock
        self.ids = Ids()
        self._resource = resource
        self._way = way  # made by the thread, where none is given: what it imports takes long
        self._silence = Silence(None) if silence is None else silence
        self._queue: deque[Span] = deque()
        self._awake = threading.Event()
        self._ending = False
        self._lock = threading.Lock()  # of what is exporting and of what has become of spans
        self._given_up = False
        self._told = self._delivered = self._full = self._lost = 0
        self._complained = float("-inf")
        self._exporting: float | None = None  # since when
        self._flying = 0  # spans of that export
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def tell(self, span: Span) -> None:
        """Have it exported soon, unless the queue is full."""
        self._told += 1
        if len(self._queue) >= self.settings.queue:
            self._full += 1
            return
        self._queue.append(span)
        if len(self._queue) >= self.settings.batch and not self._awake.is_set():
            self._awake.set()

    def statistics(self) -> TraceStatistics:
        return TraceStatistics(self._told, self._delivered, self._full + self._lost, len(self._queue))

    def finish(self) -> None:
        """Tell at once what waits: this is the end. `close` need not wait for what was told meanwhile."""
        self._ending = True
        self._awake.set()

    def close(self, limit: float = LAST_WORDS) -> None:
        """Tell what waits, for `limit` seconds at most, and without waiting where the collector is known to hang; the
        rest is dropped, counted, and lost with the process."""
        self.finish()
        stuck = self._stuck()
        warned = not stuck and self._waiting() and self._silence.known()
        self._thread.join(0.0 if stuck or warned else limit)
        if self._thread.is_alive():
            if self._flying and not warned:
                self._silence.note()
            self._drop(HANGS if stuck or warned else LATE)

    def _stuck(self) -> bool:
        """Whether an export has taken so long that it would be in vain to wait for it."""
        with self._lock:
            return self._exporting is not None and time.monotonic() - self._exporting >= PATIENCE

    def _waiting(self) -> bool:
        """Whether anything is still to be delivered."""
        with self._lock:
            return bool(self._flying or self._queue)

    def _drop(self, reason: str) -> None:
        """What has not been delivered by now never will be."""
        with self._lock:
            self._given_up = True
            dropped = self._flying + len(self._queue)
            self._lost += dropped
            self._flying = 0
            self._queue.clear()
        if dropped:
            logs.warning(log, "traces_lost", endpoint=self.settings.endpoint, dropped=dropped, reason=reason)

    def _run(self) -> None:
        from penstock.services.tracing.collector import OtlpCollector

        way = self._way if self._way is not None else OtlpCollector(self.settings, self._resource, self.clock)
        while not self._ending:
            self._awake.wait(self.settings.delay)
            self._awake.clear()
            self._deliver(way)
        self._deliver(way)
        self._drop(FAILS)  # nothing, unless that failed
        way.close()

    def _deliver(self, way: Collector) -> None:
        """Export all that waits, batch by batch; after a failure the rest waits for the next time."""
        while batch := self._batch():
            reason: str | None = None
            try:
                way.export(batch)
            except Undelivered as error:
                reason = str(error)
            if not self._settled(len(batch), reason):
                return

    def _batch(self) -> list[Span]:
        """What is exported next; empty where nothing is left."""
        with self._lock:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self.settings.batch))]
            self._flying = len(batch)
            self._exporting = time.monotonic() if batch else None
        return batch

    def _settled(self, count: int, reason: str | None) -> bool:
        """An export has ended, well unless there is a reason why not. Whether to go on."""
        with self._lock:
            self._flying, self._exporting = 0, None
            if self._given_up:
                return False  # they are counted among the lost
            if reason is None:
                self._delivered += count
                return True
            self._lost += count
        self._complain(reason)
        return False

    def _complain(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._complained >= COMPLAINT_SECONDS:
            self._complained = now
            logs.warning(log, "traces_not_delivered", endpoint=self.settings.endpoint, reason=reason,
                            dropped=self._full + self._lost)  # fmt: skip


def tracer_of(config: TraceConfig, role: str, index: int) -> Tracer | None:
    """The tracer of a process, None where no traces are told. Raises ConfigError."""
    found = settings(config)
    if found is None:
        return None
    return Tracer(found, service_attributes(found, role, index), Clock(wall_offset()), silence=silence_of())
