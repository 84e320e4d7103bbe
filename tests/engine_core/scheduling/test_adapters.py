"""Places for LoRA adapters: who waits, who goes past, what is forgotten, and how failures end."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest

from penstock.engine_core.scheduling.adapters import LOADS, PATIENCE, RETRY, AdapterPlaces
from penstock.engine_core.scheduling.admission import BLOCKED
from penstock.protocol.messages import Finish
from penstock.protocol.step_columns import adapter_table
from penstock.protocol.steps import AdapterLoaded, DropAdapter, LoadAdapter
from tests.sim.adapters import BAD, REASON
from tests.sim.adapters import adapter as named
from tests.sim.server import ROOMY, Server

WORLD = replace(ROOMY, adapter_places=2, adapter_memory=3)


def server(**world: object) -> Server:
    return Server(replace(WORLD, **world))  # type: ignore[arg-type]


def statistics(made: Server):  # type: ignore[no-untyped-def]
    return made.scheduler.statistics().adapters


def placed(made: Server) -> list[str]:
    return made.executor.hosts.places[1:]


def finish(made: Server, number: int) -> None:
    while not made.seen(number).finish:
        made.load()
        made.step()


def test_a_cold_adapter_delays_nobody() -> None:
    made = server()
    cold, base = made.submit([1, 2, 3], adapter="a"), made.submit([1, 2, 3])
    plan = made.step()
    assert plan is not None
    assert [start.adapter for start in plan.starts] == [0], "the base's request went past"
    assert made.scheduler.statistics().reasons == {"adapter": 1}
    assert made.seen(cold).tokens == []
    made.load()
    plan = made.step()
    assert plan is not None
    assert adapter_table(plan.adapters).tolist() == [[1, 1]]
    assert [start.adapter for start in plan.starts] == [1]
    made.run()
    assert made.seen(cold).finish == made.seen(base).finish == Finish.LENGTH
    assert made.seen(cold).tokens != made.seen(base).tokens, "nothing was shared with the base's prefix"


def test_hundreds_of_one_client_with_a_cold_adapter_delay_no_other_client() -> None:
    made = server()
    for _ in range(BLOCKED + 1):
        made.submit([1], adapter="a", client="cold")
    other = made.submit([1], client="other")
    made.step()
    assert made.seen(other).tokens
    made.load()
    made.run()


def arrivals(cold: int, **world: object) -> list[tuple[float, int]]:
    """When each token of the others came, in virtual seconds, beside so many requests whose adapters take longer to
    read than all of it: of the model and of an adapter that is in its place, more than there are slots."""
    made = server(slots=4, blocks=24, budget=24, max_model_len=48, **world)
    finish(made, made.submit([1], adapter="warm"))
    others, found = [], []
    for step in range(60):
        for number in range(cold if step % 10 == 0 else 0):
            made.submit([1, 2, number % 60], adapter=f"cold{number % 7}", client="cold")
        if step % 2 == 0 and step < 30:
            others.append(made.submit(list(range(5 + step)), adapter=("", "warm")[step % 4 // 2], client=f"{step % 3}"))
        before = [len(made.seen(number).tokens) for number in others]
        made.step()
        made.now += 0.1
        now = [len(made.seen(number).tokens) for number in others]
        found += [(made.now, at) for at, counts in enumerate(zip(before, now, strict=True)) if counts[0] < counts[1]]
    assert all(made.seen(number).finish == Finish.LENGTH for number in others)
    for number in made.lives:
        finish(made, number)
    made.run()
    return found


@pytest.mark.parametrize("fairness", [True, False])
def test_no_token_comes_later_for_adapters_that_are_being_read(fairness: bool) -> None:
    alone = arrivals(0, fairness=fairness)
    assert len(alone) > 40
    assert arrivals(100, fairness=fairness) == alone


def test_only_what_all_executors_have_read_is_copied() -> None:
    made = server()
    number = made.submit([1], adapter="a")
    made.executor.hosts.take(made.scheduler)
    made.executor.hosts.say(made.scheduler, 0.0)
    assert made.plan() is None, "one of two has it"
    made.executor.hosts.say(made.scheduler, 0.0)
    finish(made, number)


def test_the_place_that_was_used_longest_ago_goes() -> None:
    made = server()
    for name in ("a", "b", "a", "c"):
        finish(made, made.submit([1], adapter=name))
    assert placed(made) == ["a", "c"]
    assert statistics(made).copies == 3


def test_the_hosts_memory_is_bounded_and_the_longest_unused_goes() -> None:
    made = server()
    for name in ("a", "b", "c", "a", "d"):
        finish(made, made.submit([1], adapter=name))
    assert sorted(made.executor.hosts.read.values()) == ["a", "c", "d"]
    finish(made, made.submit([1], adapter="b"))
    assert made.executor.hosts.loads == ["a", "b", "c", "d", "b"]
    assert statistics(made).held == 3


def test_an_adapter_in_a_place_serves_on_without_the_hosts_memory() -> None:
    made = server(adapter_memory=2)
    first = made.submit([1], adapter="a", max_tokens=40)
    made.load()
    made.step()
    for name in ("b", "c"):
        finish(made, made.submit([1], adapter=name))
    assert "a" not in made.executor.hosts.read.values()
    finish(made, made.submit([1, 2], adapter="a"))
    assert made.executor.hosts.loads == ["a", "b", "c"]
    made.run()
    assert made.seen(first).finish == Finish.LENGTH


def test_few_are_read_at_once() -> None:
    made = server(adapter_memory=8)
    for name in "abcdef":
        made.submit([1], adapter=name)
    made.plan()
    assert len(made.executor.hosts.reading) == LOADS
    made.load()


def test_a_place_in_use_is_not_taken_and_one_is_emptied_for_whoever_waits() -> None:
    made = server(adapter_places=1, adapter_memory=2, slots=2, max_model_len=64)
    running = made.submit([1], adapter="a", max_tokens=8)
    made.load()
    made.step()
    waiting = made.submit([1], adapter="b")
    made.step()
    made.load()
    past = made.submit([1, 2], adapter="a", max_tokens=2)
    made.step()
    assert made.seen(past).tokens, "it goes past as long as the other one is patient"
    made.step()
    made.now += 2 * PATIENCE
    behind = made.submit([1, 3], adapter="a")
    while not made.seen(waiting).tokens:
        made.step()
        assert not made.seen(behind).tokens
    assert made.seen(running).finish == Finish.LENGTH
    made.load()
    made.run()


def cold_start(made: Server, places: int) -> float:
    """Seconds until a cold adapter's request has its first token, while every place but that of one long stream has
    outputs of 10 to 20 tokens, six at a time, each step taking 20 ms."""
    open_: dict[int, list[int]] = {place: [] for place in range(1, places)}
    lengths = itertools.cycle((17, 10, 20, 13, 15, 11, 19))

    def feed() -> None:
        for place, live in open_.items():
            live[:] = [number for number in live if not made.seen(number).finish]
            while len(live) < 6:
                live.append(made.submit([1, 2], adapter=f"busy{place}", max_tokens=next(lengths)))

    made.submit([1, 2, 3], adapter="long", max_tokens=2000)
    feed()
    for _ in range(4):
        made.load()
        made.step()
    began, cold = made.now, made.submit([1], adapter="cold", max_tokens=2)
    while not made.seen(cold).tokens:
        feed()
        made.load()
        made.step()
        made.now += 0.02
        assert made.now - began < 20
    return made.now - began


@pytest.mark.parametrize("places", [2, 8])
def test_a_long_output_keeps_no_place_from_others_while_the_rest_come_and_go(places: int) -> None:
    made = server(
        adapter_places=places, adapter_memory=2 * places, slots=64, blocks=20000, budget=256, max_model_len=2048
    )
    assert cold_start(made, places) < 4 * PATIENCE


def test_several_requests_for_an_adapter_have_one_place_emptied() -> None:
    made = AdapterPlaces(8, 16, 1)
    for name in "abcdefgh":
        take_place(made, name)
    made.ask(named("cold"), 0.0)
    made.loaded(9, 0, "")
    for _ in range(3):
        made.begin_pass()
        for _ in range(5):
            assert not made.ask(named("cold"), 0.0)
        assert sum(not made.ask(named(name), 0.0) for name in "abcdefgh") == 0
    made.begin_pass()
    for _ in range(5):
        assert not made.ask(named("cold"), 2 * PATIENCE)
    assert sum(not made.ask(named(name), 2 * PATIENCE) for name in "abcdefgh") == 1


def take_place(made: AdapterPlaces, name: str) -> None:
    made.begin_pass()
    made.ask(named(name), 0.0)
    made.loaded(made.messages[-1].number, 0, "")
    assert made.ask(named(name), 0.0)
    made.enter(named(name))


def test_a_failed_load_ends_the_requests_that_wait_and_no_others() -> None:
    made = server()
    bad, good = made.submit([1], adapter=BAD, n=2), made.submit([1], adapter="a")
    made.load()
    made.deliver()
    rejected = made.record.rejected[bad]
    assert (rejected.status, rejected.param, rejected.code) == (400, "model", "adapter_failed")
    assert rejected.message == f"the adapter '{BAD}' cannot be served: {REASON}"
    made.load()
    made.run()
    assert made.seen(good).finish == Finish.LENGTH
    assert statistics(made).failures == 1
    assert not made.executor.hosts.reading


def test_one_that_could_not_be_read_takes_nobodys_memory_for_a_while() -> None:
    made = server(adapter_places=1, adapter_memory=1)
    made.submit([1], adapter=BAD)
    made.load()
    made.deliver()
    good = made.submit([1], adapter="a")
    finish(made, good)
    again = made.submit([1], adapter=BAD)
    made.deliver()
    assert made.record.rejected[again].message == f"the adapter '{BAD}' cannot be served: {REASON}"
    assert statistics(made).held == 1
    made.now += RETRY
    later = made.submit([1], adapter=BAD)
    assert later not in made.record.rejected, "it may have been mended"
    made.plan()
    made.load()
    made.deliver()
    assert later in made.record.rejected
    made.run()


def test_a_new_group_reads_anew_and_everybody_goes_on() -> None:
    made = server()
    number = made.submit([1], adapter="a", max_tokens=6)
    made.load()
    made.step()
    before = made.seen(number).tokens[:]
    made.scheduler.restart(1, 1.0)
    made.executor, made.results = made.new_executor(1), type(made.results)()
    assert (statistics(made).placed, statistics(made).held) == (0, 0)
    finish(made, number)
    assert made.seen(number).tokens[: len(before)] == before
    assert list(made.executor.hosts.read) == [2], "numbers are not used twice"


def test_a_group_that_dies_while_it_reads_is_asked_no_more_and_the_next_one_is() -> None:
    made = server()
    cold, running = made.submit([1], adapter="a"), made.submit([1], max_tokens=6)
    made.step()
    made.executor.hosts.say(made.scheduler, 0.0)
    made.scheduler.restart(1, 1.0)
    made.executor, made.results = made.new_executor(1), type(made.results)()
    made.scheduler.adapter_loaded(AdapterLoaded(1), 1, 1.0)  # of the second one, which came late
    made.step()
    assert not made.seen(cold).tokens, "nobody of the new group has read it"
    made.load()
    made.run()
    assert made.seen(cold).finish == made.seen(running).finish == Finish.LENGTH
    assert list(made.executor.hosts.read.values()) == ["a"]
    assert statistics(made).loads == 1


def test_a_folder_that_changed_is_another_adapter() -> None:
    made = server()
    finish(made, made.submit([1, 2, 3, 4, 5, 6, 7, 8], adapter="a"))
    assert made.scheduler._state.adapters.lacks(msgspec.structs.replace(named("a"), version="1"))
    assert not made.scheduler._state.adapters.lacks(named("a"))


def test_running_and_waiting_requests_are_told_by_adapter() -> None:
    made = server(adapter_places=1)
    running = [made.submit([1], adapter="a", max_tokens=8) for _ in range(2)]
    made.load()
    made.step()
    made.submit([1], adapter="b")
    made.submit([1])
    made.deliver()
    found = statistics(made)
    assert (found.running, found.waiting) == ({"a": 2}, {"b": 1})
    for number in running:
        finish(made, number)
    made.load()
    made.run()
    found = statistics(made)
    assert (found.running, found.waiting, found.placed) == ({}, {}, 1)


def test_two_versions_of_a_name_are_one_adapter_in_the_counts() -> None:
    places = AdapterPlaces(2, 2, 1)
    for number, version in enumerate(("0", "1"), 1):
        one = msgspec.structs.replace(named("a"), version=version)
        places.prefetch(one)
        places.loaded(number, 0, "")
        places.enter(one)
    assert places.statistics({}).running == {"a": 2}


def test_a_server_without_places_refuses() -> None:
    made = Server()
    number = made.submit([1], adapter="a")
    made.deliver()
    assert made.record.rejected[number].message == "this server serves no adapters (--enable-lora)"


@pytest.mark.parametrize("name", ["a", ""])
def test_a_prefix_is_found_by_the_same_adapter_alone(name: str) -> None:
    made, prompt = server(), list(range(2, 18))
    finish(made, made.submit(prompt, adapter="a"))
    finish(made, made.submit(prompt, adapter=name))
    assert made.scheduler.statistics().reused_tokens == (12 if name else 0)


def test_messages_name_what_is_read_and_forgotten() -> None:
    made = server(adapter_places=1, adapter_memory=1)
    finish(made, made.submit([1], adapter="a"))
    made.submit([1], adapter="b")
    assert made.scheduler.adapter_messages() == []
    made.scheduler.plan(made.now)
    assert made.scheduler.adapter_messages() == [DropAdapter(1), LoadAdapter(2, "/adapters/b", "0")]
    made.load()
    made.run()
