from __future__ import annotations

import msgspec
import numpy as np
import pytest

from penstock.engine_core.scheduling.executor_group import MEMBERS_LIMIT, MISSING_LIMIT
from penstock.protocol.config import Config, RunConfig
from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.protocol.links import Role
from penstock.protocol.messages import Abort, Finish, Rejected, Sampling, StopHit, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import StepResult
from penstock.services.links.link import UNREACHABLE, end_of
from penstock.services.scheduler.engine_status import PLACES, STATUS_DELAY
from penstock.services.scheduler.housekeeping import IDLE_SECONDS
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop
from penstock.services.scheduler.step_times import LONG_STEP
from penstock.services.supervisor.restart_policy import LIMIT, RestartPolicy
from tests.services.scheduler.fakes import WINDOW, FakeExecutor, FakePort, Transcript, without_grammars


class Bench:
    """A loop between one tokenizer and one executor, with a clock that tests turn."""

    def __init__(self, overlap: bool = True, size: int = 8, speculative: str = "", run_dir: str = "") -> None:
        self.now = 1000.0
        self.tokens, self.steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
        config = Config(
            model=ModelConfig(max_num_seqs=size, max_num_batched_tokens=64),
            scheduler=SchedulerConfig(overlap=overlap, speculative_config=speculative),
            run=RunConfig(run_dir=run_dir),
        )
        self.loop = SchedulerLoop(config, ModelFacts(256, 4096), self.tokens, self.steps, *without_grammars(), self.now)
        self.tokenizer = self.tokens.join()
        self.executor = FakeExecutor(self.steps)
        self.transcript = Transcript()

    def iterate(self, seconds: float = 0.001) -> float:
        self.now += seconds
        return self.loop.iterate(self.now, 5000.0 + self.now)

    def ready(self, **words) -> None:
        self.executor.ready(**words)
        self.iterate()

    def submit(self, number: int, prompt: int = 20, **sampling) -> None:
        ids = np.arange(prompt, dtype=np.int32).tobytes()
        request = SubmitTokens(id=number, token_ids=ids, sampling=Sampling(**{"max_tokens": 5, **sampling}))
        self.tokens.arrives(self.tokenizer, request)

    def read(self, *, give_credit: bool = True) -> Transcript:
        batches = self.tokens.take(TokenBatch, self.tokenizer)
        self.transcript.read(batches)
        if give_credit:
            self.tokenizer.credit = WINDOW
        return self.transcript

    def step(self) -> None:
        for plan in self.executor.collect():
            self.executor.answer(plan)
        self.iterate()
        self.read()

    def run(self, limit: int = 200) -> Transcript:
        for _ in range(limit):
            if not self.loop.unfinished and not self.steps.arrivals:
                break
            self.step()
        assert self.loop.unfinished == 0
        return self.read()

    def statuses(self) -> list[EngineStatus]:
        return self.tokens.take(EngineStatus, self.tokenizer)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_runs_to_its_end(overlap):
    bench = Bench(overlap)
    bench.ready()
    bench.submit(1)
    bench.iterate()
    transcript = bench.run()
    assert len(transcript.tokens[1]) == 5
    assert transcript.ends == {1: [Finish.LENGTH]}
    assert bench.loop.statistics().results == bench.loop.statistics().plans


@pytest.mark.parametrize("plans", [(0, 0), (12, 12), (12, 11)])
def test_a_group_begins_where_all_have_run_the_same_plans(plans):
    """The scheduler before this one may have been killed between two sends."""
    tokens, steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
    config = Config(model=ModelConfig(max_num_seqs=8, max_num_batched_tokens=64, tensor_parallel_size=2))
    loop = SchedulerLoop(config, ModelFacts(256, 4096), tokens, steps, *without_grammars(), 1000.0)
    members = [FakeExecutor(steps, index) for index in range(2)]
    for member, run in zip(members, plans, strict=True):
        member.ready(plans=run)
    loop.iterate(1000.1, 6000.1)
    loop.iterate(1000.2, 6000.2)
    assert loop.ready == (len(set(plans)) == 1)
    assert len(steps.peers) == (2 if loop.ready else 0), "both are given up, and begin another life"
    again = members if loop.ready else [FakeExecutor(steps, index) for index in range(2)]
    for member in again:
        member.ready()
    loop.iterate(1000.3, 6000.3)
    assert loop.ready


def test_a_member_that_hangs_does_not_keep_the_others_waiting_for_ever():
    tokens, steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
    config = Config(model=ModelConfig(max_num_seqs=8, max_num_batched_tokens=64, tensor_parallel_size=2))
    loop = SchedulerLoop(config, ModelFacts(256, 4096), tokens, steps, *without_grammars(), 1000.0)
    FakeExecutor(steps, 0).ready()
    loop.iterate(1001.0, 6001.0)
    loop.iterate(1000.9 + MEMBERS_LIMIT, 6000.0)
    assert len(steps.peers) == 1
    loop.iterate(1001.2 + MEMBERS_LIMIT, 6000.0)
    assert steps.peers == (), "it ends, its group's bond breaks, and so does the one that hangs"
    for index in range(2):
        FakeExecutor(steps, index).ready()
    loop.iterate(1100.0, 6100.0)
    assert loop.ready


@pytest.mark.parametrize(("overlap", "depth"), [(True, 2), (False, 1)])
def test_so_many_plans_are_in_flight(overlap, depth):
    bench = Bench(overlap)
    bench.ready()
    bench.submit(1, max_tokens=50)
    bench.iterate()
    plans = bench.executor.collect()
    assert len(plans) == depth
    bench.iterate()
    assert bench.executor.collect() == []
    bench.executor.answer(plans[0])
    bench.iterate()
    assert len(bench.executor.collect()) == 1


@pytest.mark.parametrize(
    ("overlap", "busy", "first"),
    [(True, 0.0, "plan"), (True, LONG_STEP, "batch"), (False, 0.0, "plan"), (False, LONG_STEP, "plan")],
)
def test_the_next_plan_leaves_before_the_result_is_delivered_unless_the_device_has_a_long_step(overlap, busy, first):
    bench = Bench(overlap=overlap)
    order: list[str] = []
    for port, name in ((bench.steps, "plan"), (bench.tokens, "batch")):
        port.sent = Recorder(order, name)  # type: ignore[assignment]
    bench.ready()
    bench.submit(1)
    bench.iterate()
    plans = [message for _, message in bench.steps.sent]
    order.clear()
    bench.executor.answer(plans[0], busy)
    bench.iterate()
    assert order == [first, {"plan": "batch", "batch": "plan"}[first]]


class Recorder(list):
    def __init__(self, order, name):
        super().__init__()
        self.order, self.name = order, name

    def append(self, entry):
        super().append(entry)
        self.order.append(self.name)


def test_before_the_executor_is_ready_requests_are_refused():
    bench = Bench()
    bench.tokenizer.credit = 1
    bench.iterate()
    bench.submit(1)
    bench.submit(2)
    bench.iterate()
    (status,) = bench.statuses()
    assert not status.ready
    assert bench.tokens.take(Rejected) == []  # the status took the only credit
    bench.tokenizer.credit = WINDOW
    bench.iterate()
    refused = bench.tokens.take(Rejected)
    assert [(one.id, one.status, one.code) for one in refused] == [(1, 503, "not_ready"), (2, 503, "not_ready")]
    assert bench.loop.statistics().refused == 2


def test_a_full_link_merges_and_loses_nothing():
    bench = Bench()
    bench.ready()
    bench.tokenizer.credit = 0
    bench.submit(1, max_tokens=9)
    bench.iterate()
    for _ in range(20):
        for plan in bench.executor.collect():
            bench.executor.answer(plan)
        bench.iterate()
    assert bench.tokens.take(TokenBatch) == []
    bench.tokenizer.credit = WINDOW
    bench.iterate()
    transcript = bench.read()
    assert transcript.batches == 1
    assert len(transcript.tokens[1]) == 9
    assert transcript.ends == {1: [Finish.LENGTH]}


def test_an_abort_and_a_stop_string_end_their_requests():
    bench = Bench()
    bench.ready()
    for number in (1, 2, 3):
        bench.submit(number, max_tokens=100)
    bench.iterate()
    bench.step()
    bench.tokens.arrives(bench.tokenizer, Abort(1))
    bench.tokens.arrives(bench.tokenizer, StopHit(2, 0, 1))
    bench.tokens.arrives(bench.tokenizer, Abort(999))
    bench.iterate()
    transcript = bench.run()
    assert transcript.ends == {1: [Finish.ABORT], 2: [Finish.STOP], 3: [Finish.LENGTH]}
    assert len(transcript.tokens[3]) == 100


def test_a_tokenizer_that_leaves_takes_its_requests_along():
    bench = Bench()
    bench.ready()
    bench.submit(1, max_tokens=100)
    bench.iterate()
    bench.tokens.leave(bench.tokenizer)
    bench.iterate()
    assert bench.loop.unfinished == 0
    other = bench.tokens.join()
    bench.tokenizer = other
    bench.submit(2)
    bench.iterate()
    assert bench.run().ends == {2: [Finish.LENGTH]}


def test_answers_go_to_the_tokenizer_that_asked():
    bench = Bench()
    bench.ready()
    other = bench.tokens.join(1)
    bench.submit(1)
    request = SubmitTokens(id=2, token_ids=np.arange(20, dtype=np.int32).tobytes(), sampling=Sampling(max_tokens=3))
    bench.tokens.arrives(other, request)
    bench.iterate()
    mine = bench.run()
    theirs = Transcript()
    theirs.read(bench.tokens.take(TokenBatch, other))
    assert set(mine.ends) == {1}
    assert set(theirs.ends) == {2}


@pytest.mark.parametrize("overlap", [True, False])
def test_an_executor_that_comes_back_goes_on_where_it_was(overlap):
    bench = Bench(overlap)
    bench.ready()
    bench.submit(1, max_tokens=40)
    bench.submit(2, max_tokens=40)
    bench.iterate()
    for _ in range(10):
        bench.step()
    lost = bench.executor.collect()
    before = {number: len(tokens) for number, tokens in bench.transcript.tokens.items()}
    assert all(5 < count < 40 for count in before.values())
    bench.statuses()
    bench.steps.leave(bench.executor.peer)
    bench.iterate()
    assert not bench.loop.ready
    assert [status.ready for status in bench.statuses()] == [False]
    bench.iterate(MISSING_LIMIT / 2)
    bench.executor = FakeExecutor(bench.steps)
    bench.ready(blocks=32)
    assert bench.loop.ready
    assert bench.steps.epoch == 101
    for plan in lost:  # a late word of the first life
        result = StepResult(step=plan.step, epoch=plan.epoch, token_ids=b"")
        bench.steps.arrives(bench.executor.peer, result)
    bench.iterate()
    transcript = bench.run()
    assert {number: len(tokens) for number, tokens in transcript.tokens.items()} == {1: 40, 2: 40}
    assert transcript.ends == {1: [Finish.LENGTH], 2: [Finish.LENGTH]}
    assert {plan.epoch for plan in bench.executor.plans} == {101}
    assert bench.loop.status(0.0, 0.0).blocks == 32


@pytest.mark.parametrize("lost", [False, True])
def test_an_executor_that_ends_is_no_warning_and_one_that_is_lost_is(lost, caplog):
    bench = Bench()
    bench.ready()
    peer = bench.executor.peer
    with caplog.at_level("INFO", "penstock.services.scheduler.server_loop"):
        bench.steps.give_up(peer, UNREACHABLE if lost else end_of(peer.pid))
        bench.iterate()
    said = [record.levelname for record in caplog.records if "executor_left" in record.getMessage()]
    assert said == ["WARNING" if lost else "INFO"]


def test_an_executor_that_does_not_come_back_ends_its_requests_with_an_error():
    bench = Bench()
    bench.ready()
    bench.submit(1, max_tokens=40)
    bench.iterate()
    bench.step()
    bench.steps.leave(bench.executor.peer)
    bench.iterate()
    assert bench.loop.unfinished == 1
    bench.iterate(MISSING_LIMIT)
    transcript = bench.read()
    assert transcript.ends == {1: [Finish.UNAVAILABLE]}
    assert len(transcript.errors) == 1
    bench.submit(2)
    bench.iterate()
    assert [one.status for one in bench.tokens.take(Rejected)] == [503]


def test_an_executor_that_is_beyond_hope_is_not_waited_for(tmp_path):
    bench = Bench(run_dir=str(tmp_path))
    bench.ready()
    bench.submit(1, max_tokens=40)
    bench.iterate()
    bench.step()
    restarts = RestartPolicy(tmp_path)
    for _ in range(LIMIT):
        restarts.died(Role.TOKENIZER, 0, "exit code 1", 100.0)
    bench.steps.leave(bench.executor.peer)
    bench.iterate(1.0)
    assert bench.loop.unfinished == 1  # that a tokenizer fails is not its business
    for _ in range(LIMIT):
        restarts.died(Role.EXECUTOR, 0, "exit code 6", 100.0)
    bench.iterate(1.0)
    transcript = bench.read()
    assert transcript.ends == {1: [Finish.UNAVAILABLE]}
    assert "executor-0 failed 5 times within 60 seconds" in transcript.errors[0]
    bench.submit(2)
    bench.iterate()
    assert [one.status for one in bench.tokens.take(Rejected)] == [503]
    restarts.recovered(Role.EXECUTOR, 0)
    restarts.close()
    bench.executor = FakeExecutor(bench.steps)
    bench.ready()
    bench.submit(3)
    bench.iterate()
    assert bench.run().ends[3] == [Finish.LENGTH]


def test_an_executor_that_says_ready_again_starts_an_epoch():
    bench = Bench()
    bench.ready()
    bench.submit(1, max_tokens=20)
    bench.iterate()
    bench.executor.collect()
    bench.ready()
    assert bench.steps.epoch == 101
    assert bench.run().ends == {1: [Finish.LENGTH]}


def test_a_heartbeat_follows_soon_when_what_runs_or_waits_changes():
    bench = Bench()
    bench.ready()
    bench.iterate(0.1)
    bench.statuses()
    bench.submit(1, max_tokens=40)
    bench.iterate(STATUS_DELAY)
    assert [(one.running, one.waiting) for one in bench.statuses()] == [(1, 0)]
    bench.step()
    assert bench.statuses() == []  # nothing has changed
    bench.run()
    last = bench.now
    while not (found := bench.statuses()):
        bench.step()
        assert bench.now <= last + 2 * STATUS_DELAY
    assert [(one.running, one.waiting) for one in found] == [(0, 0)]


def test_the_heartbeat_comes_at_its_interval_and_tells_the_totals():
    bench = Bench()
    bench.ready()
    bench.statuses()
    for _ in range(30):
        bench.iterate(0.1)
    assert 5 <= len(bench.statuses()) <= 7
    bench.submit(1)
    bench.iterate()
    bench.run()
    bench.iterate(1.0)
    status = bench.statuses()[-1]
    assert status.ready
    assert (status.prompt_tokens, status.output_tokens, status.finished) == (20, 5, 1)
    assert status.blocks == 64
    assert status.blocks_free + status.blocks_idle == 64
    assert status.step_age == 0.0
    assert status.time > 5000.0


def test_the_age_of_a_step_is_told_while_it_hangs():
    bench = Bench()
    bench.ready()
    bench.iterate(100.0)
    bench.submit(1)
    bench.iterate()
    bench.iterate(3.0)
    assert bench.statuses()[-1].step_age == pytest.approx(3.0)


@pytest.mark.parametrize("later", [0.25, -9.0])
def test_what_arrives_in_a_long_turn_did_not_arrive_at_its_beginning(later: float):
    """A request would seem to begin before it was sent."""
    bench = Bench()
    bench.ready()
    bench.loop._clock = lambda: bench.now + later
    bench.submit(1)
    began: list[float] = []
    plain = bench.loop._scheduler.submit
    bench.loop._scheduler.submit = lambda request, source, now: (began.append(now), plain(request, source, now))
    bench.iterate()
    assert began == [bench.now + max(later, 0.0)]


def test_a_turn_says_when_the_next_is_due():
    bench = Bench()
    bench.ready()
    due = bench.iterate()
    assert bench.now < due <= bench.now + 0.2
    ticks = bench.steps.ticks
    assert bench.iterate(0.01) == due
    assert bench.steps.ticks == ticks


def test_draining_refuses_newcomers_and_finishes_the_others():
    bench = Bench()
    bench.ready()
    bench.submit(1)
    bench.iterate()
    bench.loop.draining = True
    bench.submit(2)
    bench.iterate()
    assert not bench.loop.drained
    assert bench.statuses()[-1].draining
    assert [one.id for one in bench.tokens.take(Rejected)] == [2]
    assert bench.run().ends == {1: [Finish.LENGTH]}
    assert bench.loop.drained


def test_without_executors_there_is_nothing_to_wait_for():
    bench = Bench()
    assert bench.loop.drained
    bench.ready()
    bench.submit(1)
    bench.iterate()
    assert not bench.loop.drained
    bench.steps.leave(bench.executor.peer)
    bench.iterate()
    assert bench.loop.drained


def test_a_result_for_an_earlier_scheduler_is_ignored():
    bench = Bench()
    bench.steps.arrives(bench.executor.peer, StepResult(step=7, epoch=3, token_ids=b""))
    bench.iterate()
    assert bench.loop.statistics().results == 0


def test_wrong_accounts_are_told_and_serving_goes_on(caplog):
    bench = Bench()
    bench.ready()
    assert bench.loop._scheduler is not None
    real = bench.loop._scheduler.check()
    wrong = msgspec.structs.replace(real, faults=("one lost",))
    bench.loop._scheduler.check = lambda thorough=False: wrong  # type: ignore[method-assign, misc]
    bench.submit(1)
    bench.iterate()
    assert bench.run().ends == {1: [Finish.LENGTH]}
    bench.iterate(IDLE_SECONDS)
    assert bench.loop.statistics().faults == 1
    assert any(getattr(record, "fields", {}).get("faults") == "one lost" for record in caplog.records)


def test_every_block_is_looked_at_once_it_rests_and_not_before():
    bench = Bench()
    bench.ready()
    assert bench.loop._scheduler is not None
    real, looks = bench.loop._scheduler.check(), []
    bench.loop._scheduler.check = lambda thorough=False: looks.append(thorough) or real  # type: ignore[method-assign, misc]
    bench.submit(1)
    bench.iterate()
    bench.run()
    bench.iterate()
    bench.submit(2)
    bench.iterate(0.5 * IDLE_SECONDS)
    bench.run()
    bench.iterate(0.5 * IDLE_SECONDS)
    assert looks == []
    bench.iterate(IDLE_SECONDS)
    bench.iterate(IDLE_SECONDS)
    assert looks == [True]


def test_the_speculative_config_reaches_the_brain_and_drafts_the_heartbeat():
    bench = Bench(speculative='{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}')
    bench.ready()
    options = bench.loop._scheduler._state.options.speculation
    assert (options.method, options.num_speculative_tokens) == ("ngram", 3)
    assert (options.prompt_lookup_max, options.prompt_lookup_min) == (5, 2)
    totals = bench.loop._scheduler._state.stats.totals
    totals.count_drafts(40, 36)
    totals.count_drafts(2, 0)
    status = bench.loop.status(0.0, 0.0)
    assert (status.drafts, status.draft_tokens, status.accepted_tokens) == (2, 42, 36)
    assert status.accepted_at == (1,) * PLACES


def test_without_a_method_predictions_alone_are_drafts():
    bench = Bench()
    bench.ready()
    assert bench.loop._scheduler._state.options.speculation.method == "none"
    assert bench.loop.status(0.0, 0.0).accepted_at == ()
