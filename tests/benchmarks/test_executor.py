"""The executor without a device: which tokens it owes for a plan, when, and to whom."""

from __future__ import annotations

from array import array

from benchmarks.load.executor import BLOCKS, Device, FakeExecutor
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import STEPS, Welcome
from penstock.protocol.message import Message
from penstock.protocol.steps import ExecutorReady, StepPlan, StepResult
from penstock.services.links.link import Arrival, Joined, Left, Peer
from penstock.services.tracing.executor import ExecutorTraces
from penstock.services.tracing.tracer import Tracer


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def plan(step: int, **columns: bytes) -> StepPlan:
    return StepPlan(step=step, epoch=3, **columns)


def tokens(result: StepResult) -> list[int]:
    return list(memoryview(result.token_ids).cast("i"))


class FakePort:
    """The link to a scheduler that the test plays."""

    def __init__(self) -> None:
        self.peer = Peer(b"", Welcome(version=1, role="scheduler", index=0, incarnation=1, pid=0, epoch=3),
                         STEPS.window, 0.0)  # fmt: skip
        self.arrivals: list[Arrival] = []
        self.sent: list[Message] = []

    def receive(self) -> list[Arrival]:
        taken, self.arrivals = self.arrivals, []
        return taken

    def send(self, peer: Peer, message: Message) -> bool:
        assert peer is self.peer
        self.sent.append(message)
        return True

    def arrives(self, *messages: Message | Joined | Left) -> None:
        self.arrivals += [Arrival(self.peer, message) for message in messages]


def test_a_step_has_a_token_for_each_row_that_samples() -> None:
    device = Device(0.5, 300)
    device.launch(plan(1, chunks=ints(4, 0, 64, 0, 7, 0, 20, 1)), 10.0)
    device.launch(plan(2, decode_on=ints(7, 9), chunks=ints(4, 64, 8, 1)), 10.1)
    device.launch(plan(3, decode_on=ints(4), decode_off=ints(9)), 12.0)
    assert device.due == 10.5
    results = [device.collect() for _ in range(3)]
    assert [(result.step, len(tokens(result))) for result in results] == [(1, 1), (2, 3), (3, 2)]
    assert all(100 <= token < 200 for result in results for token in tokens(result))
    assert device.due is None


def test_steps_run_one_after_the_other() -> None:
    device = Device(0.5, 300)
    for step, now in ((1, 10.0), (2, 10.1), (3, 20.0)):
        device.launch(plan(step), now)
    dues = []
    while (due := device.due) is not None:
        dues.append(due)
        device.collect()
    assert dues == [10.5, 11.0, 20.5]


def test_the_scheduler_is_told_and_answered_in_time() -> None:
    port = FakePort()
    executor = FakeExecutor(port, ModelConfig(block_size=32), Device(1.0, 300), ExecutorTraces(Tracer()))  # type: ignore[arg-type]
    port.arrives(Joined())
    executor.turn(0.0)
    (ready,) = port.sent
    assert isinstance(ready, ExecutorReady)
    assert (ready.epoch, ready.blocks, ready.block_size) == (3, BLOCKS, 32)
    port.arrives(plan(1, decode_on=ints(2)), plan(2))
    executor.turn(5.0)
    assert len(port.sent) == 1
    executor.turn(6.0)
    executor.turn(6.5)
    executor.turn(7.0)
    results = [message for message in port.sent[1:] if isinstance(message, StepResult)]
    assert [(result.step, result.epoch, len(tokens(result))) for result in results] == [(1, 3, 1), (2, 3, 1)]


def test_a_lost_scheduler_is_not_answered_and_a_new_one_starts_afresh() -> None:
    port = FakePort()
    device = Device(1.0, 300)
    executor = FakeExecutor(port, ModelConfig(), device, ExecutorTraces(Tracer()))  # type: ignore[arg-type]
    port.arrives(Joined(), plan(1, decode_on=ints(2)))
    executor.turn(0.0)
    port.arrives(Left("gone"))
    executor.turn(9.0)
    assert len(port.sent) == 1
    port.arrives(Joined())
    executor.turn(10.0)
    assert device.due is None
    port.arrives(plan(1, chunks=ints(0, 0, 4, 1)))
    executor.turn(10.0)
    executor.turn(11.0)
    result = port.sent[-1]
    assert isinstance(result, StepResult)
    assert len(tokens(result)) == 1
