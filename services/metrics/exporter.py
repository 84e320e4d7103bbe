"""Exports a process's metrics: once a second, a snapshot file that the api processes read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.engine_core.histogram import Histogram
from penstock.protocol.links import Role
from penstock.protocol.snapshots import MetricsSnapshots
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Link
from penstock.services.metrics import definitions
from penstock.services.metrics.definitions import LinkStatistics, ProcessStatistics
from penstock.services.metrics.snapshot import RemoteSnapshots, Snapshot, SnapshotFile, encode, newest, read_snapshots
from penstock.services.supervisor import process
from penstock.services.tracing.tracer import Tracer

if TYPE_CHECKING:
    from penstock.protocol.steps import ExecutorReady
    from penstock.services.client.engine_client import EngineClient
    from penstock.services.executor.steps import Steps
    from penstock.services.http.server import ConnectionLimiter
    from penstock.services.metrics.requests import Traffic
    from penstock.services.openai.responses.store import ResponseStore
    from penstock.services.scheduler.server_loop import SchedulerLoop
    from penstock.services.tokenizer.grammar_compiler import GrammarCompiler
    from penstock.services.tokenizer.image_decoder import ImageDecoder
    from penstock.services.tokenizer.server_loop import TokenizerLoop
    from penstock.services.tokenizer.templates import Templates

INTERVAL = 1.0  # seconds between two snapshots of one process
LAG_INTERVAL = 0.5  # seconds between measurements of an asyncio loop's lag
STATM = Path("/proc/self/statm")
Collector = Callable[[Snapshot], None]
End = Link | AsyncLink


class Exporter:
    """Owns a process's snapshot file. `collector` reads the metrics of the role into a snapshot; `lag` is the delay of
    the process's event loop.

    `other_host` is the link towards the api processes if they run on another host. `remote` holds snapshots that
    arrived from other hosts; a process that has it also forwards the snapshots in its run directory.
    """

    def __init__(
        self,
        me: Identity,
        run_dir: Path,
        lag: Histogram,
        collector: Collector,
        tracer: Tracer,
        *,
        remote: RemoteSnapshots | None = None,
        other_host: End | None = None,
    ) -> None:
        self._me = me
        self._run_dir = run_dir
        self.lag = lag
        self._collector = collector
        self._tracer = tracer
        self._remote = remote
        self._other_host = other_host
        self._file = SnapshotFile(run_dir, me.role, me.index)
        self._starts = process.starts(process.starts_file(run_dir, me.role, me.index))
        self._start_time = time.time() - process.age()
        self._resident = resident_bytes()
        self._next = float("-inf")

    def tick(self, now: float, wall: float) -> None:
        if now >= self._next:
            self._next = now + INTERVAL
            self.export(wall)

    def export(self, wall: float) -> None:
        """Write the file, and send it to peers. A peer without credit gets the next snapshot, which is cumulative."""
        own = self.snapshot(wall)
        self._file.write([own, *(self._remote.all() if self._remote is not None else ())])
        peers = [peer for peer in self._other_host.peers if peer.credit > 0] if self._other_host is not None else []
        if self._other_host is not None and peers:
            known = [own] if self._remote is None else [each for each in self._all(own) if each.role != Role.API]
            self._other_host.send_each(peers, MetricsSnapshots(encode(known)))

    def snapshots(self, wall: float) -> list[Snapshot]:
        """The newest snapshot of every process; of this one a new one."""
        return self._all(self.snapshot(wall))

    def snapshot(self, wall: float) -> Snapshot:
        """A new snapshot of this process."""
        me, usage = self._me, resource.getrusage(resource.RUSAGE_SELF)
        with contextlib.suppress(OSError):  # without file descriptors the gauge keeps its value
            self._resident = resident_bytes()
        found = Snapshot(me.role, me.index, me.incarnation, os.getpid(), wall)
        cpu, lag = usage.ru_utime + usage.ru_stime, self.lag.statistics()
        statistics = ProcessStatistics(found.pid, me.incarnation, self._starts, cpu, self._resident, self._start_time,
                                       lag, self._tracer.statistics())  # fmt: skip
        found.collect(definitions.PROCESS, statistics)
        self._collector(found)
        return found

    def close(self) -> None:
        self._file.close()

    def _all(self, own: Snapshot) -> list[Snapshot]:
        remote = self._remote.all() if self._remote is not None else ()
        return newest((own, *remote, *read_snapshots(self._run_dir, own.time)))


def collect_link(into: Snapshot, name: str, ports: Iterable[End], queued: int) -> None:
    statistics = LinkStatistics(name, tuple(port.statistics() for port in ports), queued)
    into.collect(definitions.LINK, statistics)


def collect_executor(steps: Steps, port: End, ready: ExecutorReady, into: Snapshot) -> None:
    found = steps.statistics()
    collect_link(into, "steps", [port], found.waiting)
    into.collect(definitions.READY, ready)
    into.collect(definitions.STEPS, found)


def scheduler_collector(loop: SchedulerLoop, tokens: End, steps: End, clock: Callable[[], float]) -> Collector:
    looked, busy = clock(), 0.0

    def collect(into: Snapshot) -> None:
        nonlocal looked, busy
        found, now = loop.statistics(), clock()
        passed, worked = now - looked, found.times.busy - busy
        looked, busy = now, found.times.busy
        collect_link(into, "tokens", [tokens], found.queued)
        collect_link(into, "steps", [steps], 0)
        into.collect(definitions.STATUS, loop.status(now, into.time))
        into.collect(definitions.DEVICE, min(1.0, max(0.0, 1.0 - worked / passed)) if passed > 0 else 1.0)
        into.collect(definitions.LOOP, found)
        if found.scheduler is not None:
            into.collect(definitions.SCHEDULING, found.scheduler)

    return collect


def collect_tokenizer(
    loop: TokenizerLoop,
    compiler: GrammarCompiler,
    templates: Templates,
    decoder: ImageDecoder | None,
    text: End,
    tokens: Sequence[End],
    into: Snapshot,
) -> None:
    found = loop.statistics()
    dispatch = found.frontend.dispatch
    collect_link(into, "text", [text], found.frontend.outward)
    collect_link(into, "tokens", tokens, dispatch.upward)
    into.collect(definitions.TOKENIZER_LOOP, found)
    into.collect(definitions.PLACEMENT, dispatch.placement)
    into.collect(definitions.GRAMMAR_COMPILER, compiler.statistics())
    into.collect(definitions.TEMPLATES, templates.statistics())
    if decoder is not None:
        into.collect(definitions.IMAGE_DECODER, decoder.statistics())


def collect_api(
    clients: Sequence[EngineClient], text: Sequence[End], traffic: Traffic, limiter: ConnectionLimiter,
    responses: ResponseStore, into: Snapshot,
) -> None:  # fmt: skip
    every = [client.statistics() for client in clients]
    names = every[0].__struct_fields__
    found = msgspec.structs.replace(every[0], **{name: sum(getattr(one, name) for one in every) for name in names})
    collect_link(into, "text", text, found.held + found.aborts_owed)
    into.collect(definitions.TRAFFIC, traffic)
    into.collect(definitions.CLIENT, found)
    into.collect(definitions.API_READY, any(client.ready(time.monotonic()) for client in clients))
    into.collect(definitions.RESPONSES, responses.statistics())
    into.collect(definitions.ROOM, limiter.statistics())


def resident_bytes(statm: Path = STATM) -> int:
    """Resident memory of this process. Source: proc(5), statm."""
    return int(statm.read_bytes().split()[1]) * resource.getpagesize()


async def keep_exporting(exporter: Exporter) -> None:
    """Measure the running loop's lag, and export once a second, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        exporter.tick(due := loop.time(), time.time())
        await asyncio.sleep(LAG_INTERVAL)
        exporter.lag.observe(max(0.0, loop.time() - due - LAG_INTERVAL))
