"""Snapshots of the processes' metrics, in files of the run directory that the api processes read.

Between hosts, which share no run directory, snapshots travel as one opaque message, `MetricsSnapshots`, from executors
through schedulers and tokenizers to api processes; each receiver keeps them in a `RemoteSnapshots`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.engine_core.histogram import HistogramStatistics
from penstock.protocol.links import Role
from penstock.protocol.snapshots import MetricsSnapshots
from penstock.services.links.link import Peer
from penstock.services.metrics.definitions import Metric, S
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

SILENCE = 10.0  # seconds without a new snapshot after which a process counts as lost
SUFFIX = ".metrics"
HEADER = struct.Struct("<II")  # length and CRC-32 of the snapshots
ATTEMPTS = 3  # to read a file while it is written


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """Every metric of one process at one time, by name and label values."""

    role: str
    index: int
    incarnation: int
    pid: int
    time: float  # unix seconds
    values: dict[str, dict[tuple[str, ...], float]] = {}  # counters and gauges
    histograms: dict[str, dict[tuple[str, ...], HistogramStatistics]] = {}

    def collect(self, table: Iterable[Metric[S]], source: S) -> None:
        for metric in table:
            found = metric.read(source)
            for labels, value in (found if isinstance(found, Mapping) else {(): found}).items():
                key = (labels,) if isinstance(labels, str) else labels
                if isinstance(value, HistogramStatistics):
                    self.histograms.setdefault(metric.name, {})[key] = value
                else:
                    self.values.setdefault(metric.name, {})[key] = float(value)


DECODER = msgspec.msgpack.Decoder(tuple[Snapshot, ...])


def encode(snapshots: Sequence[Snapshot]) -> bytes:
    return msgspec.msgpack.encode(snapshots)


class SnapshotFile:
    """A file with a process's newest snapshot, and those that it received from other hosts.

    The process locks the file as long as it runs, so a file without a lock belonged to a process that was killed.
    Snapshots are written in place, with one system call and no new descriptor; a checksum detects partial ones.
    """

    def __init__(self, run_dir: Path, role: Role, index: int) -> None:
        self._path = run_dir / f"{role}-{index}{SUFFIX}"
        self._file: int | None = None
        self._failed = False

    def write(self, snapshots: Sequence[Snapshot]) -> None:
        """Replace the contents. A failing disk loses this process's metrics only, and is logged once."""
        payload = encode(snapshots)
        record = HEADER.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            if self._file is None or os.fstat(self._file).st_nlink == 0:  # the directory was cleared
                self._open()
            assert self._file is not None
            os.pwrite(self._file, record, 0)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logs.error(log, "no_entry", reason=error.strerror)
            self._failed = True

    def close(self) -> None:
        """Remove the file, unless a later process of this name has replaced it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                if os.fstat(self._file).st_nlink:
                    self._path.unlink()
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        self._path.unlink(missing_ok=True)
        fresh = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fresh, fcntl.LOCK_EX)
        if self._file is not None:
            os.close(self._file)
        self._file = fresh


def read_snapshots(run_dir: Path, wall: float) -> list[Snapshot]:
    """Snapshots of the running processes that share `run_dir`, at `wall` in unix seconds."""
    found: list[Snapshot] = []
    for path in sorted(run_dir.glob(f"*{SUFFIX}")):
        snapshots = read_file(path)
        # An executor may be in a step for longer than SILENCE.
        if snapshots and (snapshots[0].role == Role.EXECUTOR or wall - snapshots[0].time <= SILENCE):
            found += snapshots
    return found


def read_file(path: Path) -> tuple[Snapshot, ...]:
    """Snapshots of one file, its writer's first; none if the writer is dead, or of another release."""
    with contextlib.suppress(OSError, msgspec.DecodeError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            for _ in range(ATTEMPTS):
                file.seek(0)
                data = file.read()
                length, checksum = HEADER.unpack_from(data) if len(data) >= HEADER.size else (0, 0)
                payload = data[HEADER.size : HEADER.size + length]
                if length and zlib.crc32(payload) == checksum:
                    return DECODER.decode(payload)
    return ()


class RemoteSnapshots:
    """The newest snapshots from each peer on another host."""

    def __init__(self) -> None:
        self._received: dict[Peer, tuple[Snapshot, ...]] = {}

    def receive(self, peer: Peer, message: MetricsSnapshots) -> None:
        self._received[peer] = DECODER.decode(message.snapshots)

    def remove(self, peer: Peer) -> None:
        """Forget a peer that is gone, and the processes known only from it."""
        self._received.pop(peer, None)

    def all(self) -> list[Snapshot]:
        return [snapshot for snapshots in self._received.values() for snapshot in snapshots]


def newest(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """The newest snapshot of each process, in order of first occurrence."""
    found: dict[tuple[str, int], Snapshot] = {}
    for snapshot in snapshots:
        key = snapshot.role, snapshot.index
        if key not in found or found[key].time < snapshot.time:
            found[key] = snapshot
    return list(found.values())
