"""Where requests go: by prefix, by load, by session; and 64 conversations over four replicas, simulated."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.kv.prefix_index import root
from penstock.engine_core.placement.placement import RATIO, SLACK, Asked, Placement
from tests.engine_core.placement.reports import BLOCK, chain, report

HISTORY = list(range(1024))


def placement(replicas: int = 2, policy: str = "prefix", blocks: int = 256) -> Placement:
    made = Placement(policy, replicas, BLOCK)
    for replica in range(replicas):
        made.report(replica, report(replica, blocks=blocks))
    return made


def asked(tokens: list[int], session: str = "", choices: int = 1) -> Asked:
    return Asked(len(tokens), chain(tokens), session, choices)


def ended(made: Placement, replica: int | None, choices: int = 1) -> None:
    assert replica is not None
    made.replicas[replica].give(choices)


def test_a_prompt_goes_where_its_beginning_is() -> None:
    made = placement(4)
    first = made.place(asked(HISTORY))
    ended(made, first)
    made.place(asked([-1] * 64))  # takes the turn
    assert made.place(asked([*HISTORY, *range(40)])) == first
    statistics = made.statistics()
    assert (statistics.expected, statistics.prefixes) == (len(HISTORY), 1)


def test_what_a_request_wrote_is_known_too() -> None:
    made = placement(4)
    first = made.place(asked(HISTORY[:128]))
    assert first is not None
    made.learn(first, chain(HISTORY[:512]))
    ended(made, first)
    assert made.place(asked(HISTORY[:600])) == first
    assert made.statistics().expected == 512


def test_another_salt_is_another_prompt() -> None:
    made = placement(2)
    first = made.place(Asked(1024, chain(HISTORY, "a")))
    assert made.place(Asked(1024, chain(HISTORY, "b"))) != first
    assert root("a") != root("b")


def test_equal_costs_go_round() -> None:
    made = placement(3)
    assert [made.place(asked([number] * 64)) for number in range(6)] == [0, 1, 2, 0, 1, 2]


def test_short_prompts_go_by_load() -> None:
    made = placement(3)
    made.report(0, report(0, running=5))
    made.report(1, report(1, running=1, waiting=2))
    made.report(2, report(2, running=4))
    assert [made.place(asked([number])) for number in range(2)] == [1, 2], "equal by then, so the next in turn"


def test_a_prefix_is_worth_as_much_as_it_saves() -> None:
    """Four requests of 500 missing tokens are a longer wait than computing 1,024 tokens anew; one is not."""
    for waiting, stays in ((1, True), (4, False)):
        made = placement(2, blocks=1 << 14)
        first = made.place(asked(HISTORY))
        assert first is not None
        ended(made, first)
        for number in range(64):  # what is typical
            ended(made, made.place(asked([-2 - number] * 500)))
        made.learn(first, chain(HISTORY))
        made.report(first, report(first, waiting=waiting, blocks=1 << 14))
        assert (made.place(asked(HISTORY)) == first) is stays


def test_above_the_watermark_a_prefix_is_worth_nothing() -> None:
    made = placement(2)
    first = made.place(asked(HISTORY))
    assert first is not None
    ended(made, first)
    for least in (0, 3):
        most = RATIO * least + SLACK
        made.report(1 - first, report(1 - first, running=least, blocks=256))
        made.report(first, report(first, running=most, blocks=256))
        made._typical = 0.0
        assert made.place(asked(HISTORY)) == first
        ended(made, first)
        made.report(first, report(first, running=most + 1, blocks=256))
        spills = made.statistics().spills
        assert made.place(asked(HISTORY)) == 1 - first
        assert made.statistics().spills == spills + 1
        ended(made, 1 - first)
        made.replicas[1 - first].shadow.clear()


def test_a_session_stays_where_no_prefix_decides() -> None:
    made = placement(4)
    first = made.place(asked([1] * 8, "s"))
    made.place(asked([2] * 8))
    assert [made.place(asked([number] * 8, "s")) for number in range(3)] == [first] * 3
    assert made.statistics().sessions == 3
    other = made.place(asked([7] * 8, "t"))
    assert other != first


def test_a_prefix_comes_before_the_session() -> None:
    made = placement(4)
    first = made.place(asked(HISTORY))
    other = made.place(asked([3] * 8, "s"))
    assert first != other
    ended(made, first)
    assert made.place(asked(HISTORY, "s")) == first


def test_a_session_spills_as_well() -> None:
    made = placement(2)
    first = made.place(asked([1] * 8, "s"))
    assert first is not None
    made.report(first, report(first, running=SLACK + 1))
    assert made.place(asked([2] * 8, "s")) == 1 - first
    assert made.place(asked([3] * 8, "s")) == 1 - first, "and stays there"


def test_choices_are_load() -> None:
    made = placement(2)
    first = made.place(asked([1] * 8, choices=4))
    assert first is not None
    assert [made.place(asked([number] * 8)) for number in range(3)] == [1 - first] * 3


@pytest.mark.parametrize("policy", ["prefix", "round_robin", "least_loaded"])
def test_who_drains_or_is_gone_gets_nothing(policy: str) -> None:
    made = placement(3, policy)
    made.place(asked(HISTORY, "s"))
    made.replicas[1].leave()
    made.report(2, report(2, ready=False, draining=True))
    assert {made.place(asked(HISTORY, "s")) for _ in range(4)} == {0}
    made.replicas[0].leave()
    assert made.place(asked(HISTORY, "s")) is None


def test_who_is_ready_comes_before_who_waits_for_executors() -> None:
    made = placement(2)
    made.report(0, report(0, ready=False))
    assert {made.place(asked([number])) for number in range(3)} == {1}
    made.report(1, report(1, ready=False))
    assert made.place(asked([1]), without={1}) == 0, "who took requests once will again"
    assert made.place(asked([1]), without={0, 1}) is None


def test_round_robin_minds_nothing_else() -> None:
    made = placement(3, "round_robin")
    made.report(0, report(0, running=9))
    assert [made.place(asked(HISTORY, "s")) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert not made.chains


def test_the_least_loaded_minds_load_alone() -> None:
    made = placement(2, "least_loaded")
    made.report(0, report(0, running=2))
    assert [made.place(asked(HISTORY, "s")) for _ in range(4)] == [1, 1, 0, 1]


@settings(max_examples=60)
@given(st.data())
def test_any_history_places_every_request_and_books_its_end(data: st.DataObject) -> None:
    """Whatever replicas report and whenever they leave: a place is one that takes, and load never falls below ours."""
    replicas = data.draw(st.integers(1, 4))
    made = placement(replicas, data.draw(st.sampled_from(["prefix", "round_robin", "least_loaded"])), blocks=8)
    running: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        number = data.draw(st.integers(0, replicas - 1))
        match data.draw(st.sampled_from(["place", "place", "end", "report", "leave"])):
            case "place":
                tokens = [data.draw(st.integers(0, 2))] * data.draw(st.integers(1, 64))
                found = made.place(asked(tokens, data.draw(st.sampled_from(["", "s"])), 2))
                if found is None:
                    assert not any(replica.taking for replica in made.replicas)
                else:
                    assert made.replicas[found].taking
                    running.append((found, 2))
            case "end" if running:
                where, choices = running.pop(data.draw(st.integers(0, len(running) - 1)))
                made.replicas[where].give(choices)
            case "leave":
                made.replicas[number].leave()
                running = [one for one in running if one[0] != number]
            case _:
                ready = data.draw(st.booleans())
                made.report(number, report(number, ready=ready, running=data.draw(st.integers(0, 9)), blocks=8))
        for index, replica in enumerate(made.replicas):
            assert replica.load >= sum(choices for where, choices in running if where == index)
            assert len(replica.shadow) <= 8


class Cache:
    """A replica's real cache, as far as it matters: blocks by use."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.held: dict[bytes, None] = {}

    def run(self, names: list[bytes]) -> int:
        hits = 0
        while hits < len(names) and names[hits] in self.held:
            hits += 1
        for name in reversed(names):
            self.held.pop(name, None)
            self.held[name] = None
        while len(self.held) > self.blocks:
            del self.held[next(iter(self.held))]
        return hits


def simulate(
    policy: str, *, conversations: int = 64, replicas: int = 4, turns: int = 6, atonce: int = 8
) -> tuple[float, Counter[int]]:
    """Share of prompt tokens found, and requests by replica. A turn of each conversation at a time, in any order;
    eight at a time; all share a beginning; one replica's cache holds a third of them, all four hold all."""
    chance = random.Random(7)
    system = [chance.randrange(4096) for _ in range(256)]
    histories = [[*system, *(chance.randrange(4096) for _ in range(512))] for _ in range(conversations)]
    blocks = (256 + conversations * (512 + turns * 96) // 3) // BLOCK
    made = placement(replicas, policy, blocks)
    caches = [Cache(blocks) for _ in range(replicas)]
    found = total = 0
    load: Counter[int] = Counter()
    running: deque[int] = deque()
    for _ in range(turns):
        for number in chance.sample(range(conversations), conversations):
            history = histories[number]
            history += [chance.randrange(4096) for _ in range(64)]
            names = chain(history)
            where = made.place(Asked(len(history), names))
            assert where is not None
            load[where] += 1
            found += caches[where].run(names) * BLOCK
            total += len(history)
            history += [chance.randrange(4096) for _ in range(32)]
            made.learn(where, chain(history[:-1]))
            caches[where].run(chain(history[:-1]))
            running.append(where)
            if len(running) > atonce:
                made.replicas[running.popleft()].give(1)
    assert made.statistics().placed == conversations * turns
    return found / total, load


def test_a_full_cache_is_left_to_its_prompts() -> None:
    """Nothing else runs, and yet who comes new does not push out what another replica has room for."""
    made = placement(2, blocks=68)
    shared = list(range(256))
    places = []
    for number in range(4):
        places.append(made.place(asked([*shared, *[number + 1000] * 400])))
        ended(made, places[-1])
    assert places == [0, 0, 1, 1]


@pytest.mark.parametrize("atonce", [0, 8, 32])
def test_conversations_find_what_they_wrote(atonce: int) -> None:
    informed, load = simulate("prefix", atonce=atonce)
    blind, _ = simulate("round_robin", atonce=atonce)
    assert informed > 0.78, "0.85 with a cache without bounds"
    assert blind < 0.45
    assert not atonce or max(load.values()) < 1.5 * min(load.values()), "they are spread"


def test_what_is_expected_is_found() -> None:
    """The guess agrees with caches that do what it thinks they do."""
    made, cache = placement(1, blocks=40), Cache(40)
    chance = random.Random(3)
    prompts = [[chance.randrange(99) for _ in range(200)] for _ in range(8)]
    for _ in range(60):
        names = chain(chance.choice(prompts))
        assert made.replicas[0].shadow.hits(names) == cache.run(names)
        made.replicas[0].shadow.use(names)


def roles(prefill: int = 1, decode: int = 1, most_local: int = 64) -> Placement:
    """The first replicas compute prompts for the others."""
    made = Placement("prefix", prefill + decode, BLOCK, prefill, most_local)
    for replica in range(prefill + decode):
        made.report(replica, report(replica, blocks=256))
    return made


def test_long_prompts_are_computed_apart_and_short_ones_are_not() -> None:
    made = roles(most_local=64)
    assert made.place(asked(HISTORY)) == 0
    assert made.hands_over(0)
    assert not made.hands_over(1)
    assert made.place(Asked(len(HISTORY), chain(HISTORY), prefilled=True)) == 1
    assert made.place(asked([5000] * 64)) == 1
    assert made.place(asked([6000] * 65)) == 0


def test_the_next_turn_goes_to_who_decoded_the_last_one() -> None:
    made = roles(prefill=1, decode=2)
    assert made.place(asked(HISTORY)) == 0
    decoded = made.place(Asked(len(HISTORY), chain(HISTORY), prefilled=True))
    assert decoded in (1, 2)
    assert made.place(asked([*HISTORY, *range(32)])) == decoded
    assert made.place(asked([*HISTORY, *range(2000, 2200)])) == 0, "too much is new"
    made.report(decoded or 0, report(decoded or 0, running=2 * SLACK))
    assert made.place(asked([*HISTORY, *range(32)])) == 0, "its replica has too much to do"


def test_prefixes_decide_among_prefill_replicas() -> None:
    made = roles(prefill=2, decode=1)
    first = made.place(asked(HISTORY))
    ended(made, first)
    assert made.place(asked([-1] * 512)) == 1 - (first or 0)
    assert made.place(asked([*HISTORY, *range(500)])) == first


def test_vectors_are_made_where_prompts_are_computed() -> None:
    assert roles().place(Asked(8, pooled=True)) == 0


def test_without_one_of_its_kind_a_request_goes_to_any() -> None:
    made = roles()
    made.report(0, report(0, ready=False))
    assert made.place(asked(HISTORY)) == 1
    made = roles()
    made.report(1, report(1, ready=False))
    assert made.place(asked([1] * 8)) == 0
    assert not made.hands_over(0), "nobody would take it"
    assert made.place(Asked(8, prefilled=True), frozenset((0,))) == 1, "it waits there for its executors"


def test_without_roles_there_are_none() -> None:
    made = placement(2)
    assert not made.apart
    assert not made.hands_over(0)
