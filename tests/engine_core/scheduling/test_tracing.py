"""What traced requests go through is noted (tracing.py) and told, stay by stay; of others nothing is."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.engine_core.scheduling.tracing import MOST_SEQUENCES, Stay
from penstock.protocol.messages import Pooling, TraceContext
from tests.sim.lives import World
from tests.sim.server import ROOMY, Server

TRACE = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
OTHER = TraceContext("00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203331-00")


class Clocked:
    """A server whose clock goes on by a second with every plan and every result."""

    def __init__(self, world: World = ROOMY) -> None:
        self.server = Server(world, traced=True)
        self.stays: list[Stay] = []

    def step(self) -> None:
        self.server.now += 1.0
        plan = self.server.plan()
        self.server.now += 1.0
        if plan is not None:
            self.server.apply()
        self.stays += self.server.scheduler.stays()

    def run(self) -> list[Stay]:
        while self.server.scheduler.unfinished or self.server.scheduler.in_flight:
            self.step()
        self.server.run()
        self.stays += self.server.scheduler.stays()
        assert not self.server.scheduler.traced
        return self.stays


def test_a_request_alone() -> None:
    clocked = Clocked()
    number = clocked.server.submit(list(range(3, 13)), max_tokens=12, trace=TRACE)
    (stay,) = clocked.run()
    assert (stay.trace, stay.request, stay.sequence, stay.end) == (TRACE, number, 0, "length")
    assert (stay.queued, stay.entered, stay.decoding, stay.first) == (0.0, 1.0, 2.0, True)
    assert (stay.prompt_tokens, stay.tokens, stay.reused) == (10, 12, 0)
    (chunk,) = stay.chunks
    assert (chunk.step, chunk.start, chunk.count, chunk.planned, chunk.applied) == (1, 0, 10, 1.0, 2.0)
    assert stay.left == 2.0 * 12
    assert stay.marks == [(10.0, 5), (18.0, 9)]


def test_an_abort_is_told_as_of_when_it_came() -> None:
    """Not as of the last step before it, which may be long ago."""
    clocked = Clocked()
    number = clocked.server.submit([3, 4], max_tokens=12, trace=TRACE)
    clocked.step()
    clocked.server.now += 7.0
    clocked.server.scheduler.tick(clocked.server.now)
    clocked.server.scheduler.abort(number)
    (stay,) = clocked.run()
    assert (stay.end, stay.decoding, stay.left) == ("abort", 2.0, 9.0)


def test_a_long_prompt_is_told_chunk_by_chunk() -> None:
    clocked = Clocked(replace(ROOMY, budget=8))
    clocked.server.submit(list(range(3, 23)), trace=TRACE)
    (stay,) = clocked.run()
    assert [(chunk.start, chunk.count) for chunk in stay.chunks] == [(0, 8), (8, 8), (16, 4)]
    assert stay.decoding == stay.chunks[-1].applied == 6.0


def test_nothing_is_noted_of_others() -> None:
    clocked = Clocked()
    clocked.server.submit([3, 4, 5], trace=OTHER)
    clocked.server.submit([3, 4, 5])
    clocked.step()
    assert not clocked.server.scheduler.traced
    assert clocked.run() == []
    untraced = Server()
    untraced.submit([3, 4, 5], trace=TRACE)
    untraced.run()
    assert untraced.scheduler.stays() == []


def test_the_plan_tells_the_executors_whose_slot_is_traced() -> None:
    clocked = Clocked()
    clocked.server.submit([3, 4, 5], trace=TRACE, n=2)
    clocked.server.submit([6, 7, 8], trace=OTHER)
    starts = [start for _ in range(3) if (plan := clocked.server.step()) is not None for start in plan.starts]
    assert sorted((start.trace.traceparent, start.choice) for start in starts) == [
        ("", 0), (TRACE.traceparent, 0), (TRACE.traceparent, 1),
    ]  # fmt: skip
    clocked.run()


def test_a_choice_that_waits_for_anothers_prompt_reuses_it() -> None:
    clocked = Clocked()
    clocked.server.submit(list(range(3, 12)), trace=TRACE, n=2)
    first, second = sorted(clocked.run(), key=lambda stay: stay.sequence)
    assert (first.reused, second.reused) == (0, 8)
    assert second.queued > 0.0


def test_choices_are_bounded() -> None:
    clocked = Clocked()
    clocked.server.submit([3, 4, 5], trace=TRACE, n=MOST_SEQUENCES + 5)
    assert len(clocked.run()) == MOST_SEQUENCES


def test_an_abort_in_the_queue_and_in_a_slot() -> None:
    clocked = Clocked(replace(ROOMY, slots=1))
    running = clocked.server.submit([3, 4, 5], max_tokens=30, trace=TRACE)
    waiting = clocked.server.submit([6, 7, 8], trace=TRACE)
    clocked.step()
    clocked.server.scheduler.abort(waiting)
    clocked.server.scheduler.abort(running)
    queued, ran = clocked.run()
    assert (queued.request, queued.end, queued.entered, queued.left) == (waiting, "abort", None, 2.0)
    assert (ran.request, ran.end, ran.entered, ran.tokens) == (running, "abort", 1.0, 1)


def test_a_preempted_request_has_two_stays() -> None:
    world = World(blocks=9, block_size=4, slots=4, budget=64, max_model_len=64, depth=1, expected_share=0.0)
    clocked = Clocked(world)
    numbers = [clocked.server.submit([3 + number, 4, 5], max_tokens=20, trace=TRACE) for number in range(2)]
    stays = clocked.run()
    ends = [stay.end for stay in stays if stay.request == numbers[1]]
    assert ends == ["preempted", "length"]
    before, after = [stay for stay in stays if stay.request == numbers[1]]
    assert after.queued == before.left
    assert before.tokens + after.tokens == 20
    assert (before.first, after.first) == (True, False)
    assert clocked.server.scheduler.statistics().preemptions == 1


def test_a_restart_is_told_with_the_time_it_came() -> None:
    clocked = Clocked()
    clocked.server.submit([3, 4, 5], max_tokens=6, trace=TRACE)
    clocked.step()
    clocked.server.plan()  # is lost
    clocked.server.results.clear()
    clocked.server.executor = clocked.server.new_executor(1)
    clocked.server.now = 7.5
    clocked.server.scheduler.restart(1, 7.5)
    lost, again = clocked.run()
    assert (lost.end, lost.left, lost.tokens) == ("restarted", 7.5, 1)
    assert (again.end, again.queued, again.tokens, again.first) == ("length", 7.5, 5, False)
    assert again.chunks[0].count == 4, "prompt and output are computed again"


def test_a_request_that_cannot_be_served_any_more() -> None:
    clocked = Clocked()
    clocked.server.submit([3, 4, 5], max_tokens=40, trace=TRACE)
    clocked.step()
    clocked.server.scheduler.fail("gone")
    (stay,) = clocked.run()
    assert stay.end == "unavailable"


def test_a_vector_has_no_decoding() -> None:
    clocked = Clocked()
    clocked.server.submit([3, 4, 5], pooling=Pooling(kind="last"), trace=TRACE)
    (stay,) = clocked.run()
    assert (stay.end, stay.decoding, stay.tokens, len(stay.chunks)) == ("stop", None, 0, 1)


def test_drafts_are_counted_by_stay() -> None:
    world = replace(
        ROOMY, speculation=SpeculationOptions(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    )
    clocked = Clocked(world)
    clocked.server.submit([3, 4, 5, 6] * 4, max_tokens=24, period=4, trace=TRACE)
    (stay,) = clocked.run()
    found = clocked.server.scheduler.statistics()
    assert (stay.accepted, stay.accepted + stay.rejected) == (found.accepted_tokens, found.draft_tokens)
    assert stay.tokens == 24


def test_a_step_says_who_is_in_it() -> None:
    clocked = Clocked()
    clocked.server.submit([3, 4, 5], trace=TRACE, n=2, max_tokens=9)
    clocked.server.submit([6, 7, 8, 9], max_tokens=9)
    clocked.server.plan()
    facts = clocked.server.scheduler.last_step()
    assert (facts.step, facts.epoch, facts.rows, facts.chunks, facts.tokens) == (1, 0, 2, 2, 7)
    assert facts.traced == (TRACE,)
    assert (facts.running, facts.waiting, facts.blocks) == (2, 1, 256)
    assert facts.blocks_used >= 2
    clocked.server.apply()
    clocked.step()
    clocked.server.plan()
    assert clocked.server.scheduler.last_step().traced == (TRACE,), "one request, however many choices"
    assert clocked.server.scheduler.last_step().tokens == 3
    clocked.server.apply()
    clocked.run()
