"""The executor's side of the link, with a scripted port and a real runner."""

from __future__ import annotations

import itertools
import select
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.block_files import BlockFiles
from penstock.engine_core.execution.model_runner import Runner
from penstock.engine_core.execution.step_output import Launched
from penstock.engine_core.execution.storage_copies import StorageCopier
from penstock.protocol.config import Config
from penstock.protocol.control import CheckWeights, WeightsAnswer, WriteWeights
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.links import STEPS, Welcome
from penstock.protocol.message import Message
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import (
    BlocksCopied,
    CopyBlocks,
    ExecutorReady,
    SlotStart,
    StepMasks,
    StepPlan,
    StepResult,
)
from penstock.protocol.storage_blocks import BlocksListed, ListBlocks
from penstock.services.executor.crash_report import Reports
from penstock.services.executor.startup import Engine, start
from penstock.services.executor.steps import Steps
from penstock.services.executor.watchdog import UNKNOWN, Watchdog
from penstock.services.executor.weight_updates import WeightUpdates
from penstock.services.links.link import GOODBYE, UNREACHABLE, Arrival, Joined, Left, Peer, end_of
from tests.services.executor.folder import write_folder

PROMPT = np.array([5, 6, 7, 8], "<i4")


class FakePort:
    """Keeps what is sent; refuses while told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[Peer, Message]] = []
        self.full = False

    def send(self, peer: Peer, message: Message) -> bool:
        if not self.full:
            self.sent.append((peer, message))
        return not self.full


def peer(incarnation: int = 1, epoch: int = 5) -> Peer:
    welcome = Welcome(version=1, role="scheduler", index=0, incarnation=incarnation, pid=2**22 + 1, epoch=epoch)
    return Peer(b"", welcome, STEPS.window, 0.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model = str(write_folder(tmp_path_factory.mktemp("models") / "tiny"))
    options = ModelConfig(model=model, load_format="dummy", dtype="float32", max_num_seqs=4, max_num_batched_tokens=64)
    return start(Config(model=options, executor=ExecutorConfig(device="cpu", cpu_threads=1)), 0)


@pytest.fixture
def port() -> FakePort:
    return FakePort()


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog()


@pytest.fixture
def steps(port: FakePort, engine: Engine, watchdog: Watchdog, tmp_path: Path) -> Steps:
    sink: Any = port
    reports = Reports(tmp_path, "executor-0", engine.ready, prompts=False)
    return Steps(sink, engine.runner, engine.ready, watchdog, reports)


def first(step: int, epoch: int = 5, slot: int = 0) -> StepPlan:
    """The plan that starts a request and samples its first token."""
    begin = SlotStart(
        slot=slot, token_ids=PROMPT.tobytes(), prompt_tokens=len(PROMPT), computed=0,
        blocks=np.array([1 + slot, 10 + slot], "<i4").tobytes(), sampling=Sampling(temperature=0.0), seed=0,
    )  # fmt: skip
    chunks = np.array([slot, 0, len(PROMPT), 1], "<i4").tobytes()
    return StepPlan(step=step, epoch=epoch, starts=(begin,), chunks=chunks)


def then(step: int, epoch: int = 5, on: int | None = 0) -> StepPlan:
    """A decode step."""
    slots = b"" if on is None else np.array([on], "<i4").tobytes()
    return StepPlan(step=step, epoch=epoch, decode_on=slots)


def run(steps: Steps, who: Peer, *messages: Message | Joined | Left) -> None:
    steps.take([Arrival(who, message) for message in messages])
    while steps.busy:
        before = steps.statistics()
        steps.iterate()
        if steps.statistics() == before:
            break


def results(port: FakePort) -> list[StepResult]:
    return [message for _, message in port.sent if isinstance(message, StepResult)]


class Ended(Exception):
    """In place of the process's end."""


@pytest.mark.parametrize(("group", "ends"), [(ALONE, False), (Group(0, 2, 0, 1, None, None, None, None, False), True)])
def test_a_group_that_its_scheduler_lost_begins_anew(
    group: Group, ends: bool, port: FakePort, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that is new has planned for nobody; one that lived on has planned for the others meanwhile."""

    def leave(*, reason: str) -> None:
        raise Ended(reason)

    monkeypatch.setattr("penstock.services.executor.steps.leave", leave)
    sink: Any = port
    reports = Reports(tmp_path, "executor-0", engine.ready, prompts=False)
    steps = Steps(sink, engine.runner, engine.ready, Watchdog(), reports, group)
    old, new = peer(1), peer(2)
    run(steps, old, Joined(), Left("process 7 ended"))
    run(steps, new, Joined(), Left("unreachable"))
    with pytest.raises(Ended, match="out of step") if ends else nullcontext():
        run(steps, peer(2), Joined())
    assert len([one for _, one in port.sent if isinstance(one, ExecutorReady)]) == (2 if ends else 3)


def test_joining_is_answered_with_what_the_executor_holds(steps: Steps, port: FakePort, engine: Engine) -> None:
    who = peer(epoch=42)
    run(steps, who, Joined())
    ((to, ready),) = port.sent
    assert to is who
    assert isinstance(ready, ExecutorReady)
    assert (ready.epoch, ready.blocks, ready.device, ready.dtype) == (42, engine.ready.blocks, "cpu", "float32")


def test_plans_are_run_in_order_and_answered_one_by_one(steps: Steps, port: FakePort) -> None:
    run(steps, peer(), Joined(), first(1), then(2), then(3, on=None))
    found = results(port)
    assert [(result.step, result.epoch) for result in found] == [(1, 5), (2, 5), (3, 5)]
    assert all(len(result.token_ids) == 4 and result.busy > 0 for result in found)
    statistics = steps.statistics()
    assert (statistics.plans, statistics.results, statistics.dropped) == (3, 3, 0)
    assert not steps.busy


def test_results_wait_for_credit(steps: Steps, port: FakePort) -> None:
    run(steps, peer(), Joined())
    port.full = True
    run(steps, peer(), first(1), then(2))
    assert results(port) == []
    assert steps.busy
    port.full = False
    steps.iterate()
    assert [result.step for result in results(port)] == [1, 2]


def test_nothing_of_a_lost_scheduler_reaches_the_next(steps: Steps, port: FakePort) -> None:
    old, new = peer(1), peer(2, epoch=9)
    run(steps, old, Joined(), first(1), then(2))
    port.full = True
    run(steps, old, then(3, on=None))
    steps.take([Arrival(old, then(4, on=None)), Arrival(old, Left("restarted"))])
    port.full = False
    run(steps, new, Joined(), StepPlan(step=1, epoch=9))
    fresh = [message for to, message in port.sent if to is new]
    assert isinstance(fresh[0], ExecutorReady)
    assert isinstance(fresh[1], StepResult)
    assert fresh[1].token_ids == b""  # the slot that decoded for the old one is empty
    assert len(fresh) == 2
    assert steps.statistics().dropped == 1


class FakeWeights:
    """Counts the results that were there before each folder was read."""

    folder = Path("/began")

    def __init__(self, port: FakePort) -> None:
        self.port = port
        self.read: list[tuple[str, int]] = []

    def check(self, folder: Path) -> None:
        pass

    def write(self, folder: Path) -> None:
        self.read.append((str(folder), len(results(self.port))))


def test_weights_are_read_behind_the_plans_before(port: FakePort, engine: Engine, tmp_path: Path) -> None:
    """And the next scheduler learns which they are."""
    weights = FakeWeights(port)
    sink: Any = port
    source: Any = weights
    reports = Reports(tmp_path, "executor-0", engine.ready, prompts=False)
    steps = Steps(sink, engine.runner, engine.ready, Watchdog(), reports, weights=WeightUpdates(source))
    run(steps, peer(), Joined(), WriteWeights(1, "/new", "7"), first(1), then(2))
    assert weights.read == [("/new", 2)]
    assert [message for _, message in port.sent if isinstance(message, WeightsAnswer)] == [WeightsAnswer(1)]
    run(steps, peer(2), Joined())
    ready = port.sent[-1][1]
    assert isinstance(ready, ExecutorReady)
    assert (ready.weights_path, ready.weight_version) == ("/new", "7")


def test_blocks_on_disk_are_told_of_other_weights(port: FakePort, engine: Engine, tmp_path: Path) -> None:
    """They come with other weights: what is written from then on is of this life alone."""
    storage = BlockFiles(tmp_path, 1 << 16, 64, bytes(32))
    sink: Any = port
    source: Any = FakeWeights(port)
    copies = BlockCopier([torch.zeros(3, 16)], 2, torch.device("cpu"))
    copies.storage = StorageCopier(storage, copies.host.numpy(), threads=1)
    reports = Reports(tmp_path, "executor-0", engine.ready, prompts=False)
    weights = WeightUpdates(source)
    steps = Steps(sink, engine.runner, engine.ready, Watchdog(), reports, weights=weights, copies=copies)
    assert steps.wakers == (copies.storage.fileno(),)
    run(steps, peer(), Joined(), CheckWeights(1, "/new"), first(1), ListBlocks(1, 5))
    until_listed(steps, port, 1)
    assert storage.identity == bytes(32)
    run(steps, peer(), WriteWeights(2, "/new", "7"))
    run(steps, peer(), ListBlocks(2, 5))
    until_listed(steps, port, 2)
    assert storage.identity != bytes(32)
    copies.storage.close()


def until_listed(steps: Steps, port: FakePort, number: int) -> None:
    while not any(isinstance(message, BlocksListed) and message.number == number for _, message in port.sent):
        assert select.select(steps.wakers, [], [], 30.0)[0]
        steps.iterate()


class End:
    """The event at a step's end."""

    def __init__(self) -> None:
        self.over = self.awaited = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.awaited |= not self.over
        self.over = True


class SlowDevice:
    """A runner whose steps end when they are told to, or when somebody waits for them."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.ends = runner, list[End]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def draft(self, launched: Launched) -> Launched:
        end: Any = End()
        self.ends.append(end)
        return replace(launched, done=end)


def test_nothing_waits_for_the_end_of_a_long_step(
    port: FakePort, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are made and answered beside two steps on the device; a third step waits for the first one's end."""
    monkeypatch.setattr("penstock.services.executor.steps.LONG", len(PROMPT))
    device = SlowDevice(engine.runner)
    sink: Any = port
    runner: Any = device
    copies = BlockCopier([torch.zeros(3, 16)], 2, torch.device("cpu"))
    reports = Reports(tmp_path, "executor-0", engine.ready, prompts=False)
    steps = Steps(sink, runner, engine.ready, Watchdog(), reports, copies=copies)
    run(steps, peer(), Joined(), first(1), first(2, slot=1), first(3, slot=2))
    assert (steps.statistics().plans, steps.has_work, steps.busy) == (2, False, True)
    run(steps, peer(), CopyBlocks(number=1, epoch=5, to_host=True, blocks=np.array([1, 0], "<i4").tobytes()))
    assert [message.number for _, message in port.sent if isinstance(message, BlocksCopied)] == [1]
    assert results(port) == []
    device.ends[0].over = True
    run(steps, peer())
    assert [result.step for result in results(port)] == [1]
    assert steps.statistics().plans == 3
    assert not any(end.awaited for end in device.ends)


def test_a_short_step_is_awaited_with_another_one_behind_it(
    port: FakePort, engine: Engine, watchdog: Watchdog, tmp_path: Path
) -> None:
    device = SlowDevice(engine.runner)
    sink: Any = port
    runner: Any = device
    steps = Steps(sink, runner, engine.ready, watchdog, Reports(tmp_path, "executor-0", engine.ready, prompts=False))
    run(steps, peer(), Joined(), first(1), then(2))
    assert [end.awaited for end in device.ends] == [True, False]
    assert [result.step for result in results(port)] == [1]


def test_a_new_epoch_begins_with_empty_slots(steps: Steps, port: FakePort) -> None:
    run(steps, peer(), Joined(), first(1), then(2), StepPlan(step=3, epoch=6), first(4, epoch=6))
    assert [len(result.token_ids) // 4 for result in results(port)] == [1, 1, 0, 1]
    assert results(port)[3].token_ids == results(port)[0].token_ids


def test_a_goodbye_of_an_earlier_scheduler_changes_nothing(steps: Steps, port: FakePort) -> None:
    old, new = peer(1), peer(2)
    run(steps, old, Joined())
    run(steps, new, Joined(), first(1))
    run(steps, old, Left("late"))
    run(steps, new, then(2))
    assert [result.step for result in results(port)] == [1, 2]


MASK = np.array([0, 1], "<u4").tobytes()  # of 64 tokens: number 32 alone


def masks(step: int, epoch: int = 5, *, fresh: bool = True) -> StepMasks:
    zero = np.zeros(1, "<i4").tobytes()
    return StepMasks(
        step=step, epoch=epoch, entries=zero, slots=zero, new_slots=zero if fresh else b"", bits=MASK if fresh else b""
    )


def masked(plan: StepPlan) -> StepPlan:
    return msgspec.structs.replace(plan, masked=np.zeros(1, "<i4").tobytes())


def tokens(port: FakePort) -> list[list[int]]:
    return [np.frombuffer(result.token_ids, "<i4").tolist() for result in results(port)]


def test_a_masked_plan_begins_and_waits_for_its_masks(steps: Steps, port: FakePort) -> None:
    """Later plans wait behind it, and the loop may sleep."""
    who = peer()
    run(steps, who, Joined(), masked(first(1)), then(2))
    assert steps.statistics().plans == 1
    assert not steps.busy
    assert steps.awaits_masks
    assert not steps.idle
    assert results(port) == []
    run(steps, who, masks(1))
    assert steps.idle
    assert not steps.awaits_masks
    assert [result.step for result in results(port)] == [1, 2]
    assert tokens(port)[0] == [32]
    assert all(result.busy > 0 for result in results(port))


def test_the_wait_for_masks_is_no_work(steps: Steps, port: FakePort, monkeypatch: pytest.MonkeyPatch) -> None:
    who = peer()
    run(steps, who, Joined(), first(1))
    clock = itertools.count(time.perf_counter(), 10.0)
    monkeypatch.setattr("penstock.services.executor.steps.time.perf_counter", lambda: next(clock))
    run(steps, who, masked(then(2)), masks(2))
    found = results(port)[-1]
    assert (found.step, round(found.busy, 3)) == (2, 20.0), "two readings apart for each half"
    assert found.waited >= 10.0


def test_masks_that_come_with_or_before_their_turn(steps: Steps, port: FakePort) -> None:
    run(steps, peer(), Joined(), first(1), masked(then(2)), masks(2), masked(then(3, on=None)), masks(3, fresh=False))
    assert [result.step for result in results(port)] == [1, 2, 3]
    assert tokens(port)[1:] == [[32], [32]]
    assert steps.statistics().stray_masks == 0


def test_masks_of_no_waiting_plan_are_dropped(steps: Steps, port: FakePort) -> None:
    who = peer()
    run(steps, who, Joined(), masks(7), masks(1, epoch=4), masked(first(1)))
    assert steps.statistics().stray_masks == 2
    assert results(port) == []
    run(steps, who, masks(1))
    assert [result.step for result in results(port)] == [1]


def test_a_new_epoch_drops_a_plan_that_waits(steps: Steps, port: FakePort) -> None:
    who = peer()
    run(steps, who, Joined(), masked(first(1)))
    run(steps, who, first(1, epoch=6), masks(1), then(2, epoch=6))
    assert [(result.step, result.epoch) for result in results(port)] == [(1, 6), (2, 6)]
    run(steps, who, masked(then(3, epoch=6, on=None)), masks(3, epoch=6))
    assert [result.step for result in results(port)] == [1, 2, 3]
    assert steps.statistics().stray_masks == 1


def test_a_scheduler_that_leaves_takes_its_waiting_plan_along(steps: Steps, port: FakePort) -> None:
    old, new = peer(1), peer(2, epoch=9)
    run(steps, old, Joined(), masked(first(1)), then(2))
    steps.take([Arrival(old, Left("restarted"))])
    run(steps, new, Joined(), first(1, epoch=9))
    assert [(result.step, result.epoch) for result in results(port)] == [(1, 9)]


def test_the_watchdog_waits_for_steps_alone(steps: Steps, port: FakePort, watchdog: Watchdog) -> None:
    who, forever = peer(), float("inf")
    run(steps, who, Joined())
    assert watchdog.allowed == forever
    steps.take([Arrival(who, first(1)), Arrival(who, then(2))])
    steps.iterate()  # the first is launched and collected
    assert watchdog.allowance(len(PROMPT)) < UNKNOWN
    assert watchdog.allowed == forever
    run(steps, who)
    assert steps.decoding == {0}
    assert set(watchdog._seconds) == {1, len(PROMPT).bit_length()}
    run(steps, who, then(1, epoch=6, on=None))
    assert steps.decoding == set()


def test_the_wait_for_masks_is_not_watched(steps: Steps, watchdog: Watchdog) -> None:
    who = peer()
    run(steps, who, Joined())
    steps.take([Arrival(who, msgspec.structs.replace(first(1), masked=np.array([0], "<i4").tobytes()))])
    steps.iterate()
    assert steps.awaits_masks
    assert watchdog.allowed == float("inf")


def in_group(port: FakePort, engine: Engine, watchdog: Watchdog, folder: Path, rank: int, stages: int = 1) -> Steps:
    """One of two ranks, whose exchange is left out."""
    sink: Any = port
    reports = Reports(folder, f"executor-{rank}", engine.ready, prompts=False)
    return Steps(sink, engine.runner, engine.ready, watchdog, reports, Group(rank, 2, stages=stages))


def test_one_member_answers_and_the_others_keep_step(
    port: FakePort, engine: Engine, watchdog: Watchdog, tmp_path: Path
) -> None:
    steps = in_group(port, engine, watchdog, tmp_path, 1)
    run(steps, peer(), Joined(), first(1), masked(then(2)), then(3, on=None))
    assert isinstance(port.sent[0][1], ExecutorReady), "each says what it holds"
    assert results(port) == []
    assert steps.statistics().plans == 3, "masks are not waited for where nobody samples"
    assert steps.idle


def test_a_step_that_waits_for_masks_elsewhere_is_not_watched(
    port: FakePort, engine: Engine, watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, told = [], []
    monkeypatch.setattr(watchdog, "begin", watched.append)
    monkeypatch.setattr(watchdog, "tell", lambda positions, seconds: told.append(positions))
    steps = in_group(port, engine, watchdog, tmp_path, 1)
    run(steps, peer(), Joined(), masked(first(1)), then(2))
    assert told == [1]
    assert set(watched) == {1}


def test_neither_are_those_of_a_stage_that_may_wait_for_what_was_sampled_there(
    port: FakePort, engine: Engine, watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(watchdog, "tell", lambda positions, seconds: told.append(positions))
    steps = in_group(port, engine, watchdog, tmp_path, 0, stages=2)
    run(steps, peer(), Joined(), first(1), masked(then(2)))
    assert told == [len(PROMPT)]
    run(steps, peer(), *[then(step, on=None) for step in range(3, 7)])
    assert told == [len(PROMPT), 1, 1], "the plan with masks and the two behind it are not"


def test_what_a_lost_scheduler_asked_of_a_group_is_run_to_its_end(
    port: FakePort, engine: Engine, watchdog: Watchdog, tmp_path: Path
) -> None:
    """The other ranks have begun it, and would wait for this one."""
    steps = in_group(port, engine, watchdog, tmp_path, 0)
    old, before = peer(1), engine.runner.statistics().steps
    run(steps, old, Joined(), first(1), masked(then(2)))
    assert steps.awaits_masks
    steps.take([Arrival(old, masked(then(3, on=None))), Arrival(old, then(4, on=None)), Arrival(old, Left("killed"))])
    assert steps.idle
    assert engine.runner.statistics().steps - before == 4
    assert steps.statistics().dropped == 3
    run(steps, peer(2, epoch=9), Joined(), first(1, epoch=9))
    assert [(result.step, result.epoch) for result in results(port)] == [(1, 5), (1, 9)]


def test_so_is_what_an_epoch_asked_that_is_over(
    port: FakePort, engine: Engine, watchdog: Watchdog, tmp_path: Path
) -> None:
    steps = in_group(port, engine, watchdog, tmp_path, 0)
    sampled = engine.runner.statistics().sampled
    run(steps, peer(), Joined(), masked(first(1)))
    run(steps, peer(), first(1, epoch=6))
    assert engine.runner.statistics().sampled - sampled == 2
    assert results(port)[-1].epoch == 6


@pytest.mark.parametrize(
    ("reason", "level"), [(GOODBYE, "INFO"), (end_of(2**22 + 1), "INFO"), (UNREACHABLE, "WARNING")]
)
def test_a_scheduler_that_ends_is_no_warning_and_one_that_is_lost_is(
    steps: Steps, reason: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = peer()
    with caplog.at_level("INFO", "penstock.services.executor.steps"):
        steps.take([Arrival(scheduler, Joined()), Arrival(scheduler, Left(reason))])
    assert [record.levelname for record in caplog.records if "scheduler_left" in record.getMessage()] == [level]
