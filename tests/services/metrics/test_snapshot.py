"""Snapshots in files of the run directory and between hosts: who is told of, who no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from zlib import crc32

import pytest

from penstock.engine_core.histogram import Histogram
from penstock.protocol.links import TEXT, Role, Welcome
from penstock.services.links.link import Peer
from penstock.services.metrics.definitions import PART, Kind, Metric
from penstock.services.metrics.snapshot import (
    DECODER,
    HEADER,
    SILENCE,
    RemoteSnapshots,
    Snapshot,
    SnapshotFile,
    encode,
    newest,
    read_snapshots,
)
from tests.services.metrics.snapshots import every, message

CHILD = """
import os, sys, time
from pathlib import Path
from zlib import crc32
from penstock.services.metrics.snapshot import Snapshot, SnapshotFile
file = SnapshotFile(Path(sys.argv[1]), "executor", 0)
file.write([Snapshot("executor", 0, 1, os.getpid(), time.time())])
print("written", flush=True)
sys.stdin.read()
"""


def peer(index: int = 0) -> Peer:
    welcome = Welcome(version=1, role="tokenizer", index=index, incarnation=1, pid=0)
    return Peer(b"", welcome, TEXT.window, 0.0)


def some(role: str, index: int = 0, time: float = 0.0, incarnation: int = 1) -> Snapshot:
    return Snapshot(role, index, incarnation, 1, time)


def test_values_go_by_their_labels() -> None:
    histogram = Histogram(PART)
    histogram.observe(0.1)
    found = some("api")
    found.collect(
        (
            Metric("plain", Kind.GAUGE, "A", lambda source: source),
            Metric("one", Kind.COUNTER, "B", lambda source: {"x": source, "y": 2}, ("a",)),
            Metric("two", Kind.COUNTER, "C", lambda source: {("x", "y"): source}, ("a", "b")),
            Metric("none", Kind.COUNTER, "D", lambda source: {}, ("a",)),
            Metric("times", Kind.HISTOGRAM, "E", lambda source: histogram.statistics()),
        ),
        True,
    )
    assert found.values == {"plain": {(): 1.0}, "one": {("x",): 1.0, ("y",): 2.0}, "two": {("x", "y"): 1.0}}
    assert found.histograms == {"times": {(): histogram.statistics()}}


def test_a_snapshot_is_what_it_was_and_small() -> None:
    """A packet or three, once a second."""
    found = every(Role.SCHEDULER, engine_running=3)
    data = encode([found])
    assert DECODER.decode(data) == (found,)
    assert len(data) < 10_000


def test_each_process_reads_what_the_others_wrote(tmp_path: Path) -> None:
    files = [SnapshotFile(tmp_path, Role.API, index) for index in range(3)]
    assert read_snapshots(tmp_path, 0.0) == []
    files[1].write([every(Role.API, 1, completion_tokens=10)])
    files[2].write([every(Role.API, 2), every(Role.EXECUTOR, 5)])
    assert read_snapshots(tmp_path, 0.0) == [
        every(Role.API, 1, completion_tokens=10), every(Role.API, 2), every(Role.EXECUTOR, 5),
    ]  # fmt: skip
    files[2].write([every(Role.API, 2)])
    assert read_snapshots(tmp_path, 0.0) == [every(Role.API, 1, completion_tokens=10), every(Role.API, 2)]
    files[1].close()
    assert read_snapshots(tmp_path, 0.0) == [every(Role.API, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["api-2.metrics"]
    assert (tmp_path / "api-2.metrics").stat().st_mode & 0o777 == 0o600
    files[2].close()


@pytest.mark.parametrize(("role", "lost"), [(Role.API, True), (Role.SCHEDULER, True), (Role.EXECUTOR, False)])
def test_a_process_that_writes_no_more_is_not_told_of_unless_it_may_be_in_a_step(
    tmp_path: Path, role: Role, *, lost: bool
) -> None:
    file = SnapshotFile(tmp_path, role, 1)
    file.write([some(role, 1, time=100.0)])
    assert len(read_snapshots(tmp_path, 100.0 + SILENCE)) == 1
    assert len(read_snapshots(tmp_path, 100.1 + SILENCE)) == (0 if lost else 1)
    file.write([some(role, 1, time=120.0)])
    assert len(read_snapshots(tmp_path, 120.0)) == 1
    file.close()


def test_a_process_that_was_killed_is_not_told_of(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert [each.pid for each in read_snapshots(tmp_path, 0.0)] == [child.pid]
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert read_snapshots(tmp_path, 0.0) == []
    after = SnapshotFile(tmp_path, Role.EXECUTOR, 0)
    after.write([some("executor", incarnation=2)])
    assert [each.incarnation for each in read_snapshots(tmp_path, 0.0)] == [2]
    after.close()
    assert list(tmp_path.iterdir()) == []


def test_a_life_that_ends_late_leaves_its_successors_file(tmp_path: Path) -> None:
    first, second = (SnapshotFile(tmp_path, Role.EXECUTOR, 0) for _ in range(2))
    first.write([some("executor", incarnation=1)])
    second.write([some("executor", incarnation=2)])
    first.close()
    assert [each.incarnation for each in read_snapshots(tmp_path, 0.0)] == [2]
    second.close()


def test_a_disk_that_takes_nothing_costs_metrics_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, path = SnapshotFile(tmp_path, Role.API, 1), tmp_path / "api-1.metrics"
    path.mkdir()
    for _ in range(3):
        file.write([some("api", 1)])
    assert read_snapshots(tmp_path, 0.0) == []
    path.rmdir()
    file.write([some("api", 1)])
    assert read_snapshots(tmp_path, 0.0) == [some("api", 1)]
    path.unlink()
    file.write([some("api", 1, time=1.0)])
    assert read_snapshots(tmp_path, 0.0) == [some("api", 1, time=1.0)]
    path.unlink()
    path.mkdir()
    file.write([some("api", 1)])
    assert [record.getMessage() for record in caplog.records] == ["no_entry"] * 2
    file.close()


def test_with_no_descriptor_left_snapshots_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SnapshotFile(tmp_path, Role.API, 1)
    file.write([some("api", 1)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", None)
        file.write([some("api", 1, time=1.0)])
    assert read_snapshots(tmp_path, 0.0) == [some("api", 1, time=1.0)]
    file.close()


def record(payload: bytes) -> bytes:
    return HEADER.pack(len(payload), crc32(payload)) + payload


@pytest.mark.parametrize("data", [b"", b"\x01", record(b"\x90")[:4] + bytes(5), record(b"\xc1"), record(b"\x91\x01")])
def test_what_is_no_snapshot_is_passed_over(tmp_path: Path, data: bytes) -> None:
    file = SnapshotFile(tmp_path, Role.API, 1)
    file.write([])
    (tmp_path / "api-1.metrics").write_bytes(data)
    assert read_snapshots(tmp_path, 0.0) == []
    file.close()


def test_the_beginning_of_one_snapshot_and_the_end_of_another_are_none(tmp_path: Path) -> None:
    """As a reader finds them between two pages of a write."""
    file = SnapshotFile(tmp_path, Role.EXECUTOR, 0)
    file.write([some("executor", time=1.0)])
    assert [each.time for each in read_snapshots(tmp_path, 1.0)] == [1.0]
    other = encode([some("executor", time=2.0)])
    with next(tmp_path.iterdir()).open("r+b") as torn:
        torn.seek(HEADER.size)
        torn.write(other)
    assert read_snapshots(tmp_path, 1.0) == []
    file.close()


def test_a_reader_never_sees_half_a_snapshot(tmp_path: Path) -> None:
    """However many it finds half written."""
    file, end, found, whole = SnapshotFile(tmp_path, Role.API, 1), threading.Event(), [], 0
    versions = [every(Role.API, 1, prompt_tokens=number) for number in range(2)]
    versions[0].values["padding"] = dict.fromkeys(((str(number),) for number in range(5000)), 1.0)
    file.write([versions[1]])

    def write() -> None:
        while not end.is_set():
            for version in versions:
                file.write([version])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while whole < 100:
            found.append(read_snapshots(tmp_path, 0.0))
            whole += len(found[-1])
    finally:
        end.set()
        writer.join()
    file.close()
    assert all(each in ([versions[0]], [versions[1]], []) for each in found)


def test_a_peer_that_is_gone_takes_its_processes_with_it() -> None:
    remote, first, second = RemoteSnapshots(), peer(0), peer(1)
    remote.receive(first, message(some("tokenizer", 0), some("scheduler")))
    remote.receive(second, message(some("tokenizer", 1), some("scheduler", time=1.0)))
    both = newest(remote.all())
    assert [(each.role, each.index, each.time) for each in both] == [
        ("tokenizer", 0, 0.0), ("scheduler", 0, 1.0), ("tokenizer", 1, 0.0),
    ]  # fmt: skip
    remote.remove(second)
    remote.remove(second)
    assert [each.role for each in newest(remote.all())] == ["tokenizer", "scheduler"]
    remote.remove(first)
    assert remote.all() == []


def test_snapshots_replace_those_before() -> None:
    remote, one = RemoteSnapshots(), peer()
    remote.receive(one, message(some("executor", 0), some("executor", 1)))
    remote.receive(one, message(some("executor", 1)))
    assert [each.index for each in remote.all()] == [1]


def test_of_two_lives_the_newer_counts() -> None:
    found = newest([some("executor", incarnation=8, time=2.0), some("executor", incarnation=7, time=1.0)])
    assert [each.incarnation for each in found] == [8]
