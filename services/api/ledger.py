"""What the api processes of one server have answered, each in a file of the run directory that the others can read.

One port belongs to all of them, so a scrape reaches any one: it answers for itself as of now, and for the others as of
their last entry, at most a second old.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from protocol.figures import HistogramStatistics
from services.api.metrics import Traffic, TrafficStatistics
from services.api.pipeline import PipelineStatistics


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One api process's numbers."""

    index: int
    traffic: TrafficStatistics
    pipeline: PipelineStatistics
    first_token: HistogramStatistics
    inter_token: HistogramStatistics
    request: HistogramStatistics

    @classmethod
    def of(cls, index: int, traffic: Traffic, pipeline: PipelineStatistics) -> Entry:
        timings = traffic.timings
        return cls(
            index,
            traffic.statistics(),
            pipeline,
            timings.first_token.statistics(),
            timings.inter_token.statistics(),
            timings.request.statistics(),
        )


class Ledger:
    """The file of one of `processes` api processes, and the way to those of the others."""

    def __init__(self, run_dir: Path, index: int, processes: int) -> None:
        self._run_dir = run_dir
        self._index = index
        self._processes = processes
        self._written = b""
        self._decoder = msgspec.msgpack.Decoder(Entry)

    def write(self, entry: Entry) -> None:
        """Replace this process's entry, if it has changed. Does nothing where nobody would read it."""
        if self._processes == 1:
            return
        data = msgspec.msgpack.encode(entry)
        if data == self._written:
            return
        fresh = self._path(self._index, ".new")
        fresh.write_bytes(data)
        fresh.replace(self._path(self._index))
        self._written = data

    def others(self) -> list[Entry]:
        """The entries of the other processes, of those that have written one."""
        found = []
        for index in range(self._processes):
            if index == self._index:
                continue
            try:
                found.append(self._decoder.decode(self._path(index).read_bytes()))
            except (FileNotFoundError, msgspec.DecodeError):
                continue  # it has not written yet, or is of another release
        return found

    def close(self) -> None:
        """Take this process's entry away."""
        for suffix in ("", ".new"):
            self._path(self._index, suffix).unlink(missing_ok=True)

    def _path(self, index: int, suffix: str = "") -> Path:
        return self._run_dir / f"api-{index}.entry{suffix}"
