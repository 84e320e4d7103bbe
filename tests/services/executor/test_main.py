"""The real process at a scheduler's link: it joins, runs plans, outlives schedulers, ends on SIGTERM, may be
stopped, and leaves a report when it fails."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from penstock.engine_core.histogram import Histogram
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import STEPS, Role, shared_hash
from penstock.protocol.message import Message
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import ExecutorReady, SlotStart, StepPlan, StepResult
from penstock.services.executor import main
from penstock.services.executor.main import COLLECT_SECONDS, IDLE_SECONDS, collection_due
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Left, Link, Peer
from penstock.services.metrics.definitions import LAG
from penstock.services.supervisor.process import ExitCode
from penstock.services.supervisor.sd_notify import NoticeSocket
from tests.services.executor.folder import write_folder

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 60.0  # seconds for anything to happen


class Scheduler:
    """A binder of the steps link that waits for what it is told to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, shared: int, incarnation: int) -> None:
        self.port = Link.bind(context, STEPS, Identity(Role.SCHEDULER, 0, incarnation, shared), run_dir)
        self.port.epoch = incarnation
        self.arrivals: list[tuple[Peer, object]] = []

    def wait(self, kind: type[Message] | type[Left]) -> tuple[Peer, object]:
        """The next message of a kind; what else arrived before it is dropped."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            while self.arrivals:
                peer, message = self.arrivals.pop(0)
                if isinstance(message, kind):
                    return peer, message
            self.port.tick(time.monotonic())
            self.arrivals += [(arrival.peer, arrival.message) for arrival in self.port.receive()]
            if not self.arrivals:
                self.port.socket.poll(50)
        raise AssertionError(f"no {kind.__name__} came")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def spawn(run_dir: Path, model: ModelConfig, *words: str, **environ: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "penstock.services.cli", "executor", f"--run-dir={run_dir}", f"--model={model.model}",
        "--load-format=dummy", f"--max-num-seqs={model.max_num_seqs}", "--device=cpu", "--cpu-threads=1",
        *words,
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return ModelConfig(model=str(write_folder(tmp_path / "tiny")), load_format="dummy", max_num_seqs=2)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def request_plan(epoch: int) -> StepPlan:
    start = SlotStart(
        slot=0, token_ids=np.array([1, 2, 3], "<i4").tobytes(), prompt_tokens=3, computed=0,
        blocks=np.array([1], "<i4").tobytes(), sampling=Sampling(temperature=0.7), seed=11,
    )  # fmt: skip
    return StepPlan(step=1, epoch=epoch, starts=(start,), chunks=np.array([0, 0, 3, 1], "<i4").tobytes())


def test_a_life(context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, model: ModelConfig) -> None:
    process = spawn(run_dir, model)
    try:
        first = Scheduler(context, run_dir, shared_hash(model), 1)
        peer, ready = first.wait(ExecutorReady)
        assert isinstance(ready, ExecutorReady)
        assert (ready.epoch, ready.block_size) == (1, 16)
        assert peer.pid == process.pid
        assert first.port.send(peer, request_plan(1))
        assert first.port.send(peer, StepPlan(step=2, epoch=1, decode_on=np.array([0], "<i4").tobytes()))
        before = [first.wait(StepResult)[1] for _ in range(2)]
        first.port.close()

        second = Scheduler(context, run_dir, shared_hash(model), 2)
        peer, ready = second.wait(ExecutorReady)
        assert isinstance(ready, ExecutorReady)
        assert ready.epoch == 2
        assert second.port.send(peer, request_plan(2))
        _, again = second.wait(StepResult)
        assert isinstance(again, StepResult)
        assert isinstance(before[0], StepResult)
        assert again.token_ids == before[0].token_ids  # the same request, another life of the scheduler

        process.send_signal(signal.SIGTERM)
        second.port.close()  # a scheduler that has drained; until then there may be more to do
        assert process.wait(DEADLINE) == 0
    finally:
        end(process)


class Asked:
    """A `Stop` that has been asked."""

    asked = True

    def __init__(self, reader: int) -> None:
        self._reader = reader

    def fileno(self) -> int:
        return self._reader

    def drain(self) -> None:
        pass


class Quiet:
    """Every part of a process whose loop runs with nothing to do. Its scheduler goes after so many iterations."""

    idle, awaits_masks, busy, has_work = True, False, True, True  # so that it does not wait
    adapters, wakers = None, ()

    def __init__(self, socket: zmq.Socket[bytes], iterations: int) -> None:
        self.socket = socket
        self.iterations = iterations

    @property
    def peers(self) -> tuple[str, ...]:
        return ("scheduler",) if self.iterations > 0 else ()

    def receive(self) -> list:
        self.iterations -= 1
        return []

    def take(self, arrivals: list) -> None:
        assert arrivals == []

    def iterate(self) -> None:
        pass

    def tick(self, *now: float) -> None:
        pass


@pytest.mark.parametrize(
    ("idle", "drain", "iterations"), [(math.inf, math.inf, 0), (0.0, math.inf, 1000), (math.inf, 0.0, 1000)]
)
def test_told_to_end_it_serves_until_nobody_needs_it(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, idle: float, drain: float, iterations: int
) -> None:
    """Until its scheduler has gone; or nothing came for a while, or the drain limit is over, while there is one."""
    monkeypatch.setattr(main, "LEAVE_SECONDS", idle)
    reader, writer = os.pipe()
    with context.socket(zmq.PAIR) as socket:
        quiet: Any = Quiet(socket, 1000)
        lag = Histogram(LAG)
        main.run_until_stopped(quiet, quiet, Asked(reader), quiet, lag, drain)  # type: ignore[arg-type]
        assert quiet.iterations == iterations
    os.close(reader)
    os.close(writer)


def test_stopped_and_continued_it_goes_on(
    context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, model: ModelConfig, tmp_path: Path
) -> None:
    """Under a supervisor that has patience. Whoever watches hears nothing of it meanwhile."""
    listener = NoticeSocket(tmp_path / "notify.sock")
    model = msgspec.structs.replace(model, enable_lora=True)
    scheduler = Scheduler(context, run_dir, shared_hash(model), 1)
    process = spawn(run_dir, model, "--enable-lora", NOTIFY_SOCKET=str(listener.path), WATCHDOG_USEC="1000000")

    def beats(seconds: float) -> int:
        """Beats until one comes or the time is over."""
        end, heard = time.monotonic() + seconds, 0
        while not heard and time.monotonic() < end:
            select.select([listener], [], [], max(0.0, end - time.monotonic()))
            found = [notice.fields for notice in listener.receive() if notice.fields.get("WATCHDOG") == "1"]
            assert all("X_PENSTOCK_ADAPTERS" in fields for fields in found), "each says it again: one may be lost"
            heard = len(found)
        return heard

    try:
        peer, _ = scheduler.wait(ExecutorReady)
        assert scheduler.port.send(peer, request_plan(1))
        scheduler.wait(StepResult)
        assert beats(DEADLINE)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        listener.receive()
        assert scheduler.port.send(peer, StepPlan(step=2, epoch=1, decode_on=np.array([0], "<i4").tobytes()))
        assert beats(1.0) == 0
        process.send_signal(signal.SIGCONT)
        _, result = scheduler.wait(StepResult)
        assert isinstance(result, StepResult)
        assert result.step == 2
        assert beats(DEADLINE)
    finally:
        end(process)
        scheduler.port.close()
        listener.close()


def test_a_bug_ends_it_and_leaves_a_report(
    context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, model: ModelConfig
) -> None:
    scheduler = Scheduler(context, run_dir, shared_hash(model), 1)
    process = spawn(run_dir, model)
    try:
        peer, _ = scheduler.wait(ExecutorReady)
        chunk = np.array([0, 0, 3, 1], "<i4").tobytes()
        assert scheduler.port.send(peer, StepPlan(step=1, epoch=1, blocks=b"odd", chunks=chunk))
        assert process.wait(DEADLINE) == ExitCode.FAILED
        (left,) = (run_dir / "crashes").iterdir()
        report = json.loads(left.read_bytes())
        assert (report["reason"], report["epoch"], report["pid"]) == ("crashed", 1, process.pid)
        assert [plan["step"] for plan in report["plans"]] == [1]
        assert "Traceback" in report["trace"]
    finally:
        end(process)
        scheduler.port.close()


def test_garbage_is_collected_once_in_a_rest_and_now_and_then_without_one() -> None:
    assert not collection_due(now=10.0, worked=9.9, collected=5.0)
    assert collection_due(now=10.0 + COLLECT_SECONDS, worked=10.0 + COLLECT_SECONDS, collected=10.0)
    assert collection_due(now=10.0 + IDLE_SECONDS, worked=10.0, collected=5.0)
    assert not collection_due(now=99.0, worked=10.0, collected=10.0 + IDLE_SECONDS)


def test_other_model_options_than_the_scheduler(
    context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, model: ModelConfig
) -> None:
    """The handshake is refused; the exit code and one line say so."""
    scheduler = Scheduler(context, run_dir, shared_hash(model) + 1, 1)
    process = spawn(run_dir, model)
    try:
        limit = time.monotonic() + DEADLINE
        while process.poll() is None and time.monotonic() < limit:
            scheduler.port.tick(time.monotonic())
            assert scheduler.port.receive() == []
            scheduler.port.socket.poll(50)
        assert process.wait(DEADLINE) == 5
        assert process.stderr is not None
        assert b"other model options" in process.stderr.read().splitlines()[-1]
        scheduler.port.close()
    finally:
        end(process)


def test_keys_that_cannot_be_used_are_told_before_the_model_is_looked_at(run_dir: Path) -> None:
    process = spawn(
        run_dir,
        ModelConfig(model=str(run_dir / "no-model")),
        "--scheduler-address=tcp://127.0.0.1:1024",
        f"--link-keys={run_dir / 'no-keys'}",
    )
    try:
        _, told = process.communicate(timeout=DEADLINE)
        assert process.returncode == ExitCode.CONFIG
        assert "--link-keys" in told.decode().splitlines()[-1]
    finally:
        end(process)
