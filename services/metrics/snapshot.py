"""Figures of processes: how each gathers its own, and how those that others told are kept and passed on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.engine_core.histogram import Histogram
from penstock.protocol.figures import Census, HistogramStatistics, ProcessFigures, Sample, Spread
from penstock.services.links.link import Peer, PortStatistics, Self
from penstock.services.supervisor import process
from penstock.services.tracing.tracer import Tracer

INTERVAL = 1.0  # seconds between two censuses of one process
LOOK = 0.5  # seconds between looks at an asyncio loop's lag
LAG = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds
PART = (10e-6, 25e-6, 50e-6, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
STATM = Path("/proc/self/statm")


class Sheet:
    """Figures of one process while they are gathered. Names and labels are those of services/metrics/definitions.py."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._spreads: list[Spread] = []

    def put(self, name: str, value: float, *labels: str) -> None:
        self._samples.append(Sample(name, float(value), labels))

    def spread(self, name: str, statistics: HistogramStatistics, *labels: str) -> None:
        self._spreads.append(Spread(name, statistics, labels))

    def figures(self, me: Self, wall: float) -> ProcessFigures:
        """All of it, as of `wall` in unix seconds."""
        return ProcessFigures(
            role=me.role,
            index=me.index,
            incarnation=me.incarnation,
            pid=os.getpid(),
            time=wall,
            samples=tuple(self._samples),
            spreads=tuple(self._spreads),
        )


class Vitals:
    """What every process has to tell. `lag` is how late its loop is, which the loop observes."""

    def __init__(self, me: Self, run_dir: Path, lag: Histogram, tracer: Tracer | None = None) -> None:
        self.me = me
        self._tracer = tracer if tracer is not None else Tracer()
        self._lag = lag
        self._starts = process.starts(process.starts_file(run_dir, me.role, me.index))
        self._began = time.time() - process.age()
        self._memory = resident_bytes()

    def sheet(self) -> Sheet:
        """A sheet with them."""
        sheet, usage = Sheet(), resource.getrusage(resource.RUSAGE_SELF)
        sheet.put("process_info", 1, str(os.getpid()), f"{self.me.incarnation:08x}")
        sheet.put("process_starts", self._starts)
        sheet.put("process_cpu_seconds", usage.ru_utime + usage.ru_stime)
        with contextlib.suppress(OSError):  # no descriptor is left: the figure stays what it was
            self._memory = resident_bytes()
        sheet.put("process_resident_memory_bytes", self._memory)
        sheet.put("process_start_time_seconds", self._began)
        sheet.spread("loop_lag_seconds", self._lag.statistics())
        traces = self._tracer.statistics()
        sheet.put("trace_spans", traces.delivered)
        sheet.put("trace_spans_dropped", traces.dropped)
        sheet.put("trace_spans_waiting", traces.waiting)
        return sheet


class Register:
    """The last census of each peer that tells any."""

    def __init__(self) -> None:
        self._told: dict[Peer, tuple[ProcessFigures, ...]] = {}

    def note(self, peer: Peer, census: Census) -> None:
        self._told[peer] = census.processes

    def processes(self, peers: Iterable[Peer]) -> tuple[ProcessFigures, ...]:
        """What these peers told, and what any other did is forgotten: each process once, as it was last heard of by
        whichever way, in order of role and index."""
        self._told = {peer: self._told[peer] for peer in peers if peer in self._told}
        found: dict[tuple[str, int], ProcessFigures] = {}
        for told in self._told.values():
            for figures in told:
                key = figures.role, figures.index
                if key not in found or found[key].time < figures.time:
                    found[key] = figures
        return tuple(found[key] for key in sorted(found))


def add_link(sheet: Sheet, name: str, ports: Iterable[PortStatistics], queued: int) -> None:
    """One link's traffic at this end, over all its ports; `queued` messages wait above them."""
    several = tuple(ports)
    sheet.put("link_peers", sum(port.peers for port in several), name)
    sheet.put("link_messages", sum(port.messages_in for port in several), name, "in")
    sheet.put("link_messages", sum(port.messages_out for port in several), name, "out")
    sheet.put("link_bytes", sum(port.bytes_in for port in several), name, "in")
    sheet.put("link_bytes", sum(port.bytes_out for port in several), name, "out")
    sheet.put("link_refused_messages", sum(port.refused_sends for port in several), name)
    sheet.put("link_refused_handshakes", sum(port.refused_handshakes for port in several), name)
    sheet.put("link_unacknowledged_messages", sum(port.unacknowledged for port in several), name)
    sheet.put("link_queued_messages", queued, name)


def resident_bytes(statm: Path = STATM) -> int:
    """Memory of this process that is in RAM. Source: proc(5), statm."""
    return int(statm.read_bytes().split()[1]) * resource.getpagesize()


async def lagging(lag: Histogram) -> None:
    """Observe how late the running loop is, until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LOOK
        await asyncio.sleep(LOOK)
        lag.observe(max(0.0, loop.time() - due))


async def telling(tell: Callable[[], None]) -> None:
    """Tell a census now and then, until it is cancelled."""
    while True:
        await asyncio.sleep(INTERVAL)
        tell()
