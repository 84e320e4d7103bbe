"""One process's tracer: spans go into a bounded queue, a thread tells them to the collector.

Telling a span costs its owner an append. A full queue drops what comes, an export that fails drops what it held, and
both are counted; nobody ever waits, but the end of the process, for LAST_WORDS at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from protocol.config import TraceConfig
from protocol.links import Role
from services import journal
from services.tracing.clock import Clock, clock_of
from services.tracing.context import Ids
from services.tracing.settings import Settings, service_attributes, settings
from services.tracing.span import Span, Value

log = logging.getLogger(__name__)

LAST_WORDS = 1.0  # seconds that the end of a process waits for the collector; a server's processes end one by one
PATIENCE = 0.5  # seconds of an export after which the end of the process does not wait for it at all
COMPLAINT_SECONDS = 60.0  # between log lines about a collector that takes nothing


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
    dropped: int  # for want of room in the queue, or with an export that failed
    waiting: int


class Tracer:
    """Takes spans from the threads of one process. `clock` turns their times into wall time."""

    def __init__(
        self, found: Settings, resource: Mapping[str, Value], clock: Clock, way: Collector | None = None
    ) -> None:
        self.settings = found
        self.clock = clock
        self.ids = Ids()
        self._resource = resource
        self._way = way  # made by the thread, where none is given: what it imports takes long
        self._queue: deque[Span] = deque()
        self._awake = threading.Event()
        self._ending = False
        self._told = self._delivered = self._full = self._lost = 0
        self._complained = float("-inf")
        self._exporting: float | None = None  # since when
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

    def close(self, limit: float = LAST_WORDS) -> None:
        """Tell what waits, for `limit` seconds at most; the rest is lost with the process."""
        self._ending = True
        self._awake.set()
        since = self._exporting
        self._thread.join(0.0 if since is not None and time.monotonic() - since >= PATIENCE else limit)
        if self._thread.is_alive():
            reason = "the collector did not take them in time"
            journal.warning(log, "traces_lost", spans=len(self._queue), reason=reason)

    def _run(self) -> None:
        from services.tracing.collector import OtlpCollector

        way = self._way if self._way is not None else OtlpCollector(self.settings, self._resource, self.clock)
        while not self._ending:
            self._awake.wait(self.settings.delay)
            self._awake.clear()
            self._deliver(way)
        self._deliver(way)
        way.close()

    def _deliver(self, way: Collector) -> None:
        """Export all that waits, batch by batch; after a failure the rest waits for the next time."""
        while self._queue:
            count = min(len(self._queue), self.settings.batch)
            batch = [self._queue.popleft() for _ in range(count)]
            self._exporting = time.monotonic()
            try:
                way.export(batch)
            except Undelivered as error:
                self._lost += count
                self._complain(str(error))
                return
            finally:
                self._exporting = None
            self._delivered += count

    def _complain(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._complained >= COMPLAINT_SECONDS:
            self._complained = now
            journal.warning(log, "traces_not_delivered", endpoint=self.settings.endpoint, reason=reason,
                            dropped=self._full + self._lost)  # fmt: skip


def tracer_of(config: TraceConfig, role: str, index: int) -> Tracer | None:
    """The tracer of a process, None where no traces are told. Raises ConfigError."""
    found = settings(config)
    if found is None:
        return None
    return Tracer(found, service_attributes(found, role, index), clock_of(leads=role == Role.SCHEDULER))
