"""What the api processes of one server have to tell, each in a file of the run directory that the others can read.

One port belongs to all of them, so a scrape reaches any one: it answers for itself as of now, and for the others as of
their last entry, at most a second old. Who has written none for STALE seconds has died or hangs, and is not counted.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from penstock.protocol.figures import HistogramStatistics, ProcessFigures
from penstock.services.client.engine_client import PipelineStatistics
from penstock.services.metrics.requests import Traffic, TrafficStatistics
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

STALE = 5.0  # seconds; an entry falls due every second


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One api process's numbers."""

    index: int
    traffic: TrafficStatistics
    pipeline: PipelineStatistics
    first_token: HistogramStatistics
    inter_token: HistogramStatistics
    request: HistogramStatistics
    e2e: HistogramStatistics
    process: ProcessFigures

    @classmethod
    def of(cls, index: int, traffic: Traffic, pipeline: PipelineStatistics, process: ProcessFigures) -> Entry:
        timings = traffic.timings
        return cls(
            index,
            traffic.statistics(),
            pipeline,
            timings.first_token.statistics(),
            timings.inter_token.statistics(),
            timings.request.statistics(),
            timings.e2e.statistics(),
            process,
        )


class Ledger:
    """The file of one of `processes` api processes, and the way to those of the others."""

    def __init__(self, run_dir: Path, index: int, processes: int) -> None:
        self._run_dir = run_dir
        self._index = index
        self._processes = processes
        self._decoder = msgspec.msgpack.Decoder(Entry)
        self._written = True  # the last entry, or none was due yet

    def write(self, entry: Entry) -> None:
        """Replace this process's entry. Does nothing where nobody would read it. A disk that takes none costs figures
        and no request: the log says so, once."""
        if self._processes == 1:
            return
        fresh, before = self._path(self._index, ".new"), self._written
        try:
            fresh.write_bytes(msgspec.msgpack.encode(entry))
            fresh.replace(self._path(self._index))
            self._written = True
        except OSError as error:
            self._written = False
            if before:
                logs.error(log, "no_entry", reason=error.strerror)

    def others(self, wall: float) -> list[Entry]:
        """The entries of the other processes that are there, as of `wall` in unix seconds."""
        found = []
        for index in range(self._processes):
            if index == self._index:
                continue
            try:
                entry = self._decoder.decode(self._path(index).read_bytes())
            except (OSError, msgspec.DecodeError):
                continue  # it has not written yet, or is of another release
            if wall - entry.process.time <= STALE:
                found.append(entry)
        return found

    def close(self) -> None:
        """Take this process's entry away."""
        for suffix in ("", ".new"):
            with contextlib.suppress(OSError):
                self._path(self._index, suffix).unlink()

    def _path(self, index: int, suffix: str = "") -> Path:
        return self._run_dir / f"api-{index}.entry{suffix}"
