"""What the operator asks of a scheduler between fake executors: pauses, and updates with every loss on the way."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from penstock.protocol.config import Config
from penstock.protocol.control import (
    IN_MEMORY,
    PARTIAL,
    AbortAll,
    AskDigests,
    AskState,
    CheckWeights,
    Controlled,
    Digest,
    EngineStatus,
    FlushCache,
    HoldWeights,
    JoinGroup,
    MeetTrainer,
    Pause,
    PauseMode,
    Resume,
    SleepEngine,
    SumWeights,
    UpdateWeights,
    WeightsAnswer,
    WeightTensor,
    WriteWeights,
)
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import Role
from penstock.protocol.message import Message
from penstock.protocol.messages import Finish, Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import ExecutorReady, Sleep, StepPlan
from penstock.services.scheduler.operator_queue import HOLD_SECONDS, LOST_BEFORE, LOST_WITHIN, NOT_READY, SUPERSEDED
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop
from tests.services.scheduler.fakes import WINDOW, FakeExecutor, FakePort, Transcript, without_grammars

PATH = "/weights/new"
UPDATE = UpdateWeights(7, PATH, "1")


class Bench:
    """A loop between one tokenizer and the executors of one group."""

    def __init__(self, executors: int = 1) -> None:
        self.now = 1000.0
        self.tokens, self.steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
        config = Config(model=ModelConfig(max_num_seqs=8, max_num_batched_tokens=64, tensor_parallel_size=executors))
        self.loop = SchedulerLoop(config, ModelFacts(256, 4096), self.tokens, self.steps, *without_grammars(), self.now)
        self.tokenizer = self.tokens.join()
        self.executors = [FakeExecutor(self.steps, index) for index in range(executors)]
        self.transcript = Transcript()

    def iterate(self) -> None:
        self.now += 0.001
        self.loop.iterate(self.now, 5000.0 + self.now)

    def begin(self, *held: tuple[str, str]) -> None:
        """Executors are ready, with these weights."""
        for at, executor in enumerate(self.executors):
            executor.ready()
            if held:
                arrival = self.steps.arrivals[-1]
                assert isinstance(arrival.message, ExecutorReady)
                path, version = held[at]
                self.steps.arrivals.pop()
                ready = ExecutorReady(**{
                    name: getattr(arrival.message, name) for name in ExecutorReady.__struct_fields__
                } | {"weights_path": path, "weight_version": version})  # fmt: skip
                self.steps.arrives(executor.peer, ready)
        self.iterate()

    def restart(self, at: int = 0, *held: tuple[str, str]) -> None:
        """An executor dies, and another one takes its place; so do its group's others."""
        for executor in self.executors:
            self.steps.leave(executor.peer)
        self.iterate()
        self.steps.sent.clear()
        self.executors = [FakeExecutor(self.steps, index) for index in range(len(self.executors))]
        self.begin(*held)

    def ask(self, *messages: Message) -> list[Controlled]:
        for message in messages:
            self.tokens.arrives(self.tokenizer, message)
        self.iterate()
        return self.answers()

    def answers(self) -> list[Controlled]:
        return self.tokens.take(Controlled, self.tokenizer)

    def asked(self, kind: type[Message]) -> list[Message]:
        """Of all executors."""
        return [message for executor in self.executors for message in self.steps.take(kind, executor.peer)]

    def say(self, error: str = "", digests: tuple[tuple[Digest, ...], ...] = ()) -> list[Controlled]:
        """All executors answer what they were asked last."""
        for at, executor in enumerate(self.executors):
            for kind in (CheckWeights, WriteWeights, MeetTrainer, SumWeights):
                for message in self.steps.take(kind, executor.peer):
                    executor.peer.credit += 1
                    self.steps.arrives(
                        executor.peer, WeightsAnswer(message.number, error, digests[at] if digests else ())
                    )
        self.iterate()
        return self.answers()

    def submit(self, number: int, tokens: int = 50) -> None:
        ids = np.arange(20, dtype=np.int32).tobytes()
        request = SubmitTokens(id=number, token_ids=ids, sampling=Sampling(max_tokens=tokens))
        self.tokens.arrives(self.tokenizer, request)

    def step(self) -> int:
        """Answer the plans that came; how many."""
        count = 0
        for executor in self.executors[1:]:
            executor.collect()
        for plan in self.executors[0].collect():
            self.executors[0].answer(plan)
            count += 1
        self.iterate()
        self.transcript.read(self.tokens.take(TokenBatch, self.tokenizer))
        self.tokenizer.credit = WINDOW
        return count


def test_without_executors_nothing_is_done() -> None:
    bench = Bench()
    assert bench.ask(Pause(1, PauseMode.KEEP), UPDATE) == [Controlled(1, NOT_READY), Controlled(7, NOT_READY)]


@pytest.mark.parametrize("mode", PauseMode)
def test_a_pause_is_answered_once_it_holds(mode: PauseMode) -> None:
    bench = Bench()
    bench.begin()
    bench.submit(1, tokens=6)
    bench.iterate()
    assert bench.ask(Pause(2, mode)) == [], "steps are in flight"
    found: list[Controlled] = []
    while not found:
        assert bench.step() or bench.steps.arrivals
        found = bench.answers()
    assert found == [Controlled(2, requests=mode is PauseMode.KEEP, paused=mode)]
    ends = {PauseMode.ABORT: {1: [Finish.ABORT]}, PauseMode.WAIT: {1: [Finish.LENGTH]}, PauseMode.KEEP: {}}
    assert bench.transcript.ends == ends[mode]
    assert bench.ask(AskState(3))[0].paused == mode
    assert bench.tokens.take(EngineStatus, bench.tokenizer)[-1].paused == mode
    assert bench.ask(Resume(4))[0].paused == ""


def test_a_pause_that_is_awaited_ends_with_the_next() -> None:
    bench = Bench()
    bench.begin()
    bench.submit(1)
    bench.iterate()
    assert bench.ask(Pause(2, PauseMode.WAIT)) == []
    assert bench.ask(Pause(2, PauseMode.WAIT)) == [], "the same by another way"
    assert bench.ask(Pause(3, PauseMode.WAIT)) == [Controlled(2, SUPERSEDED)]
    found = bench.ask(Resume(4))
    assert [(answer.id, answer.error) for answer in found] == [(3, SUPERSEDED), (4, "")]


@pytest.mark.parametrize("executors", [1, 2])
def test_all_look_before_one_writes_and_nothing_runs_meanwhile(executors: int) -> None:
    bench = Bench(executors)
    bench.begin()
    bench.submit(1)
    bench.iterate()
    bench.step()
    assert bench.ask(UPDATE) == []
    checks = bench.steps.take(CheckWeights)
    assert [check.path for check in checks] == [PATH] * executors
    assert bench.step() > 0, "a look disturbs no step"
    for at, executor in enumerate(bench.executors):
        assert not bench.steps.take(WriteWeights)
        bench.steps.arrives(executor.peer, WeightsAnswer(checks[at].number))
        bench.iterate()
    assert not bench.steps.take(WriteWeights), "steps are in flight"
    while bench.step():
        pass
    writes = [message for _, message in bench.steps.sent if isinstance(message, WriteWeights)]
    assert [(write.path, write.version) for write in writes] == [(PATH, "1")] * executors
    assert not [message for _, message in bench.steps.sent if isinstance(message, StepPlan)]
    (found,) = bench.say()
    assert found == Controlled(7, requests=1, version="1")
    plans = bench.steps.take(StepPlan, bench.executors[0].peer)
    assert plans[0].starts[0].computed == 0, "it is computed again, from its tokens"


def test_a_folder_that_one_refuses_is_read_by_none() -> None:
    bench = Bench(2)
    bench.begin()
    assert bench.ask(UPDATE) == []
    assert bench.say("it is another model") == [Controlled(7, "it is another model")]
    assert not bench.steps.take(WriteWeights)
    bench.submit(1, tokens=3)
    bench.iterate()
    while bench.step():
        pass
    assert bench.transcript.ends == {1: [Finish.LENGTH]}


def test_a_look_alone_ends_with_it() -> None:
    bench = Bench()
    bench.begin()
    bench.ask(UpdateWeights(7, PATH, "1", check_only=True))
    assert bench.say() == [Controlled(7)]
    assert not bench.steps.take(WriteWeights)


def test_changes_wait_for_one_another_and_resumes_do_not_end_them() -> None:
    bench = Bench()
    bench.begin()
    bench.submit(1)
    bench.iterate()
    bench.ask(Pause(2, PauseMode.KEEP), UPDATE, FlushCache(8))
    bench.say()
    while bench.step():
        pass
    bench.answers()
    assert [answer.id for answer in bench.ask(Resume(9))] == [9]
    assert not bench.steps.take(StepPlan), "weights are being written"
    assert [answer.id for answer in bench.say()] == [7, 8]
    assert bench.steps.take(StepPlan)


def test_requests_end_before_an_update_that_says_so() -> None:
    bench = Bench()
    bench.begin()
    bench.submit(1)
    bench.iterate()
    bench.ask(UpdateWeights(7, PATH, "1", abort=True))
    bench.say()
    while bench.step():
        pass
    assert bench.say()[0].requests == 0
    assert bench.transcript.ends == {1: [Finish.ABORT]}


def test_all_are_ended() -> None:
    bench = Bench()
    bench.begin()
    bench.submit(1)
    bench.iterate()
    assert bench.ask(AbortAll(3)) == [Controlled(3)]
    bench.step()
    assert bench.transcript.ends == {1: [Finish.ABORT]}


@pytest.mark.parametrize(("looked", "error"), [(False, LOST_BEFORE), (True, LOST_WITHIN.format("0"))])
def test_an_executor_that_dies_in_an_update_leaves_the_weights_before(looked: bool, error: str) -> None:
    bench = Bench()
    bench.begin()
    bench.ask(UPDATE)
    if looked:
        bench.say()
    bench.restart()
    assert bench.answers() == [Controlled(7, error)]
    assert not bench.steps.take(CheckWeights), "it has what it should have"
    bench.submit(1, tokens=3)
    bench.iterate()
    while bench.step():
        pass
    assert bench.transcript.ends == {1: [Finish.LENGTH]}


def updated(executors: int = 1) -> Bench:
    bench = Bench(executors)
    bench.begin()
    bench.ask(UPDATE)
    bench.say()
    assert bench.say()[0].version == "1"
    return bench


def test_a_group_that_begins_anew_reads_what_it_should_have_before_its_first_step() -> None:
    bench = updated()
    bench.submit(1)
    bench.iterate()
    bench.restart()
    assert [check.path for check in bench.asked(CheckWeights)] == [PATH]
    assert not bench.steps.take(StepPlan)
    bench.steps.arrives(bench.executors[0].peer, WeightsAnswer(3))
    bench.iterate()
    assert [(write.path, write.version) for write in bench.steps.take(WriteWeights)] == [(PATH, "1")]
    assert not bench.steps.take(StepPlan)
    bench.steps.arrives(bench.executors[0].peer, WeightsAnswer(4))
    bench.iterate()
    assert bench.steps.take(StepPlan)
    assert bench.ask(AskState(9))[0].version == "1"


def test_a_folder_that_is_gone_by_then_leaves_the_weights_of_the_start() -> None:
    bench = updated()
    bench.restart()
    assert bench.say("no such file") == []
    bench.submit(1)
    bench.iterate()
    assert bench.steps.take(StepPlan)
    assert bench.ask(AskState(9))[0].version == "0"


def test_a_folder_that_kills_executors_is_tried_once() -> None:
    bench = updated()
    bench.restart()
    bench.say()
    bench.restart()
    assert not bench.steps.take(CheckWeights)
    assert bench.ask(AskState(9))[0].version == "0"


def test_a_new_scheduler_takes_the_weights_that_are_there() -> None:
    bench = Bench(2)
    bench.begin((PATH, "5"), (PATH, "5"))
    assert bench.ask(AskState(9))[0].version == "5"
    assert not bench.steps.take(CheckWeights)


def test_members_that_differ_read_the_same() -> None:
    """The scheduler before this one was killed between two of them."""
    bench = Bench(2)
    bench.begin((PATH, "5"), ("", "0"))
    bench.say()
    assert [(write.path, write.version) for write in bench.steps.take(WriteWeights)] == [(PATH, "5")] * 2


def test_members_that_differ_and_cannot_read_the_same_begin_anew() -> None:
    bench = Bench(2)
    bench.begin((PATH, "5"), ("", "0"))
    bench.say("no such file")
    assert bench.steps.peers == ()


TENSORS = (WeightTensor("a", "float32", (1,), (("cpu", b"x"),)),)
PART = UpdateWeights(7, IN_MEMORY, "1", tensors=TENSORS)


def held_with_a_part() -> Bench:
    """A request runs, and an update of several parts has had its first one."""
    bench = Bench()
    bench.begin()
    bench.submit(1, tokens=6)
    bench.iterate()
    assert bench.ask(HoldWeights(6)) == [], "the steps in flight are first"
    while bench.step():
        pass
    assert bench.answers() == [Controlled(6, requests=1)]
    assert bench.ask(msgspec.structs.replace(PART)) == []
    assert bench.say() == []
    (write,) = bench.asked(WriteWeights)
    assert (write.path, write.tensors) == (PARTIAL, TENSORS)  # type: ignore[attr-defined]
    bench.executors[0].peer.credit += 1
    bench.steps.arrives(bench.executors[0].peer, WeightsAnswer(write.number))  # type: ignore[attr-defined]
    bench.iterate()
    assert bench.answers()[0].version == "0"
    assert bench.step() == 0
    return bench


def test_nothing_sleeps_between_the_parts_of_an_update() -> None:
    """A sleep would lose those that have been written, and the next one give them a version."""
    bench = held_with_a_part()
    bench.ask(Pause(8, PauseMode.KEEP))
    (answer,) = bench.ask(SleepEngine(9))
    assert "POST /finish_weight_update before" in answer.error
    assert not bench.asked(Sleep)


def test_nothing_runs_between_the_parts_of_an_update() -> None:
    bench = held_with_a_part()
    assert bench.ask(FlushCache(8))[0].error == ""
    assert bench.step() == 0, "it is still held"
    bench.ask(HoldWeights(9, "5"))
    (write,) = bench.asked(WriteWeights)
    assert (write.path, write.version, write.tensors) == (IN_MEMORY, "5", ())  # type: ignore[attr-defined]
    bench.steps.arrives(bench.executors[0].peer, WeightsAnswer(write.number))  # type: ignore[attr-defined]
    bench.iterate()
    assert bench.answers()[0].version == "5"
    while bench.step():
        pass
    assert bench.transcript.ends == {1: [Finish.LENGTH]}
    assert "no update has begun" in bench.ask(HoldWeights(10, "6"))[0].error


def test_a_trainer_that_does_not_come_back_costs_its_weights_alone() -> None:
    bench = held_with_a_part()
    bench.now += HOLD_SECONDS
    bench.iterate()
    bench.iterate()
    assert [check.path for check in bench.asked(CheckWeights)] == [""]  # type: ignore[attr-defined]
    bench.steps.arrives(bench.executors[0].peer, WeightsAnswer(3))
    bench.iterate()
    (write,) = bench.asked(WriteWeights)
    assert (write.path, write.version) == ("", "0")  # type: ignore[attr-defined]
    bench.steps.arrives(bench.executors[0].peer, WeightsAnswer(4))
    bench.iterate()
    while bench.step():
        pass
    assert bench.transcript.ends == {1: [Finish.LENGTH]}


def test_a_trainer_that_has_given_nothing_yet_costs_nothing() -> None:
    bench = Bench()
    bench.begin()
    assert bench.ask(HoldWeights(6)) == [Controlled(6)]
    bench.submit(1, tokens=3)
    bench.iterate()
    assert bench.step() == 0
    bench.now += HOLD_SECONDS
    bench.iterate()
    while bench.step():
        pass
    assert bench.transcript.ends == {1: [Finish.LENGTH]}


def test_an_executor_that_dies_between_two_parts_ends_the_update() -> None:
    bench = held_with_a_part()
    bench.restart()
    assert not bench.steps.take(CheckWeights), "it has what it should have"
    while bench.step():
        pass
    assert bench.transcript.ends == {1: [Finish.LENGTH]}


@pytest.mark.parametrize("begins_with", [("", "0"), (PARTIAL, "9")])
def test_weights_of_no_folder_are_lost_with_an_executor(begins_with: tuple[str, str]) -> None:
    bench = Bench()
    bench.begin()
    bench.ask(PART)
    bench.say()
    assert bench.say()[0].version == "1"
    bench.restart(0, begins_with)
    assert [check.path for check in bench.asked(CheckWeights)] == ([] if begins_with[0] == "" else [""])  # type: ignore[attr-defined]
    assert bench.ask(AskState(9))[0].version == "0"


def test_weights_of_no_folder_are_found_by_a_new_scheduler() -> None:
    bench = Bench()
    bench.begin((IN_MEMORY, "4"))
    assert not bench.steps.take(CheckWeights)
    assert bench.ask(AskState(9))[0].version == "4"


def test_weights_of_no_version_are_not_served_by_a_new_scheduler() -> None:
    bench = Bench()
    bench.begin((PARTIAL, "4"))
    assert [check.path for check in bench.asked(CheckWeights)] == [""]  # type: ignore[attr-defined]
    bench.submit(1)
    bench.iterate()
    assert not bench.steps.take(StepPlan)


def test_executors_meet_trainers_while_steps_run() -> None:
    bench = Bench(2)
    bench.begin()
    bench.submit(1)
    bench.iterate()
    join = JoinGroup(7, "group", "127.0.0.1", 1, 1, 3)
    assert bench.ask(join) == []
    assert bench.step()
    assert bench.say("nobody is there") == [Controlled(7, "nobody is there", requests=1)]


def test_sums_of_slices_are_added_and_copies_compared() -> None:
    bench = Bench(2)
    bench.begin()
    bench.submit(1)
    bench.iterate()
    first = (Digest("a", "float32", 0.0, (1 << 64) - 1, "0"), Digest("b", "float32", 0.0, 5, ""))
    second = (Digest("a", "float32", 0.0, 3, "1"), Digest("b", "float32", 0.0, 5, ""))
    bench.ask(AskDigests(7))
    while bench.step():
        pass
    told = bench.say(digests=(first, second))[0]
    assert (told.error, {each.name: each.value for each in told.digests}) == ("", {"a": 2, "b": 5})
    bench.ask(AskDigests(8))
    while bench.step():
        pass
    assert "tensor b" in bench.say(digests=(first, (msgspec.structs.replace(second[1], value=6),)))[0].error
    bench.iterate()
    assert bench.step(), "requests go on"
