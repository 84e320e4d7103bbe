"""An executor without a device: `python -m benchmarks.load.executor RUN_DIR MODEL SECONDS` answers each plan after so
many seconds of pretended work, one step after the other, with random tokens.

It joins the scheduler as a real one does, so that everything but the model is measured as it is. Drafts and masks are
not answered: the loads that it is for ask for neither.
"""

from __future__ import annotations

import random
import sys
import time
from array import array
from collections import deque
from pathlib import Path

import zmq

from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import TraceConfig
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import STEPS, Role, new_incarnation, shared_hash
from penstock.protocol.steps import ExecutorReady, StepPlan, StepResult
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Arrival, Joined, Left, Link, Peer
from penstock.services.supervisor.process import Stop
from penstock.services.tracing.executor import ExecutorTraces
from penstock.services.tracing.startup import tracer_of

BLOCKS = 1 << 16
STEP_TOKENS = 8192
TICK = 0.2  # seconds


class Device:
    """Which slots decode, and when each step will have been computed."""

    def __init__(self, seconds: float, vocab: int) -> None:
        self._seconds = seconds
        self._decoding: set[int] = set()
        self._free = 0.0  # when the last step will be done
        self._steps: deque[tuple[float, StepPlan, int]] = deque()
        chance = random.Random(0)
        self._tokens = array("i", (chance.randrange(vocab // 3, vocab * 2 // 3) for _ in range(1 << 16)))
        self._at = 0

    @property
    def due(self) -> float | None:
        """When the oldest step is done; None without one."""
        return self._steps[0][0] if self._steps else None

    def launch(self, plan: StepPlan, now: float) -> None:
        """Queue a step behind those that run."""
        self._decoding.difference_update(memoryview(plan.decode_off).cast("i"))
        self._decoding.update(memoryview(plan.decode_on).cast("i"))
        sampled = sum(memoryview(plan.chunks).cast("i")[3::4])
        self._free = max(self._free, now) + self._seconds
        self._steps.append((self._free, plan, len(self._decoding) + sampled))

    def collect(self) -> StepResult:
        """The result of the oldest step."""
        _, plan, entries = self._steps.popleft()
        at = self._at = (self._at + entries) % (len(self._tokens) - entries)
        return StepResult(step=plan.step, epoch=plan.epoch, token_ids=self._tokens[at : at + entries].tobytes())

    def reset(self) -> None:
        self._decoding.clear()
        self._steps.clear()


class FakeExecutor:
    """The link to the scheduler, and the device behind it."""

    def __init__(self, port: Link, model: ModelConfig, device: Device, traces: ExecutorTraces) -> None:
        self._port = port
        self._traces = traces
        self._device = device
        self._scheduler: Peer | None = None
        self._model = model

    def turn(self, now: float) -> None:
        """Take what arrived; answer every step whose time has come."""
        for arrival in self._port.receive():
            self._take(arrival, now)
        while self._scheduler is not None and self._device.due is not None and self._device.due <= now:
            result = self._device.collect()
            self._port.send(self._scheduler, result)
            self._traces.collect(result, now)

    def _take(self, arrival: Arrival, now: float) -> None:
        match arrival.message:
            case StepPlan() as plan:
                self._device.launch(plan, now)
                self._traces.begin(plan, now)
            case Joined():
                self._scheduler = arrival.peer
                self._device.reset()
                ready = ExecutorReady(
                    epoch=arrival.peer.epoch, blocks=BLOCKS, block_size=self._model.block_size, step_tokens=STEP_TOKENS,
                    device="none", dtype="none", weight_bytes=0, cache_bytes=0, load_seconds=0.0,
                )  # fmt: skip
                self._port.send(arrival.peer, ready)
            case Left():
                self._scheduler = None


def serve(run_dir: Path, model: ModelConfig, seconds: float, stop: Stop) -> None:
    """Answer plans until the process is told to end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    port = Link.connect(context, STEPS, Identity(Role.EXECUTOR, 0, new_incarnation(), shared_hash(model)), run_dir)
    device = Device(seconds, read_spec(Path(model.model)).vocab_size)
    tracer = tracer_of(TraceConfig(), Role.EXECUTOR, 0)  # by the environment alone
    traces = ExecutorTraces(tracer)
    executor = FakeExecutor(port, model, device, traces)
    poller = zmq.Poller()
    poller.register(port.socket, zmq.POLLIN)
    poller.register(stop.fileno(), zmq.POLLIN)
    next_tick = 0.0
    while not stop.asked:
        now = time.monotonic()
        if now >= next_tick:
            next_tick = now + TICK
            port.tick(now)
            traces.tick(now)
        executor.turn(now)
        until = min(next_tick, device.due if device.due is not None else next_tick) - time.monotonic()
        poller.poll(int(max(0.0, until) * 1000))
    port.close()
    context.term()
    tracer.close()


def main() -> int:
    run_dir, model, seconds = sys.argv[1:]
    serve(Path(run_dir), ModelConfig(model=model), float(seconds), Stop())
    return 0


if __name__ == "__main__":
    sys.exit(main())
