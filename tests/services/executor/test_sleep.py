"""The real process at a scheduler's link: told to sleep it goes on as another image, and loads when it is woken."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import shared_hash
from penstock.protocol.steps import ExecutorAsleep, ExecutorReady, Sleep, Wake
from penstock.services.executor.sleep import ASLEEP, beating, sleeps
from penstock.services.supervisor.process import ExitCode
from penstock.services.supervisor.sd_notify import Heartbeat, Notice, NoticeSocket
from tests.services.executor.folder import write_folder
from tests.services.executor.test_main import DEADLINE, Scheduler, end, spawn

INTERVAL = 200_000  # microseconds


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def imported(pid: int) -> None:
    """Wait until it has torch: nobody has told it to load."""
    deadline = time.monotonic() + DEADLINE
    while "libtorch" not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.02)


@contextmanager
def told_meanwhile(notices: NoticeSocket) -> Iterator[list[Notice]]:
    """What arrives, read at once: the kernel keeps ten datagrams, and drops what a load sends beyond them. Heartbeats,
    which nobody has asked for, would be more."""
    told: list[Notice] = []
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            select.select([notices], [], [], 0.05)
            told.extend(notices.receive())

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        thread.join()


def test_one_process_sleeps_wakes_and_ends(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    model = ModelConfig(model=str(write_folder(tmp_path / "tiny")), load_format="dummy", max_num_seqs=2)
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    notices = NoticeSocket(tmp_path / "notify.sock")
    process = spawn(run_dir, model, NOTIFY_SOCKET=str(notices.path))
    try:
        scheduler = Scheduler(context, run_dir, shared_hash(model), 1)
        peer, _ = scheduler.wait(ExecutorReady)
        assert scheduler.port.send(peer, Sleep())
        sleeping, _ = scheduler.wait(ExecutorAsleep)
        assert sleeping.pid == peer.pid == process.pid
        assert sleeping.incarnation != peer.incarnation
        imported(process.pid)
        open_files = [os.readlink(f"/proc/{process.pid}/fd/{name}") for name in os.listdir(f"/proc/{process.pid}/fd")]
        assert not any("tiny" in name for name in open_files)
        assert (run_dir / "executor-0.starts").read_text() == "1", "it has ended in order"
        scheduler.port.close()  # it waits for the next one

        scheduler = Scheduler(context, run_dir, shared_hash(model), 2)
        sleeping, _ = scheduler.wait(ExecutorAsleep)
        notices.receive()
        with told_meanwhile(notices) as told:
            assert scheduler.port.send(sleeping, Wake())
            peer, ready = scheduler.wait(ExecutorReady)
        assert isinstance(ready, ExecutorReady)
        assert (peer.pid, ready.epoch) == (process.pid, 2)
        assert any("loading" in notice.fields.get("STATUS", "") for notice in told)

        assert scheduler.port.send(peer, Sleep())
        scheduler.wait(ExecutorAsleep)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == ExitCode.ORDERLY
        assert not (run_dir / "executor-0.starts").exists()
        scheduler.port.close()
    finally:
        end(process)
        notices.close()


def test_heartbeats_go_on_while_it_loads(tmp_path: Path) -> None:
    """Whatever the main thread does, and no longer than it does."""
    notices = NoticeSocket(tmp_path / "notify.sock")
    heartbeat = Heartbeat({"NOTIFY_SOCKET": str(notices.path), "WATCHDOG_USEC": str(INTERVAL)})
    with beating(heartbeat):
        beats = 0
        while beats < 3:
            beats += sum(notice.fields.get("WATCHDOG") == "1" for notice in notices.receive())
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]
    notices.close()


def test_without_a_heartbeat_nothing_beats() -> None:
    with beating(None):
        assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_the_image_that_waits_is_marked() -> None:
    assert sleeps({ASLEEP: "1"})
    assert not sleeps({})
