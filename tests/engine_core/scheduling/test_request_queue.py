"""The order of admission: priorities, fair shares, arrival; and who gives a slot up to whom."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.scheduling.request import Rank, Request, Sequence
from penstock.engine_core.scheduling.request_queue import LOOK, PATIENCE, QUANTUM, TYPICAL, RequestQueue
from penstock.protocol.messages import Client, Sampling, SubmitTokens
from tests.sim.idle import is_empty

RANKS = st.tuples(st.integers(-2, 2), st.integers(1, 30), st.integers(0, 3))
PROMPT = 10


def waiting(rank: Rank, client: str = "", tenant: str = "", limit: int = PROMPT + 500) -> Sequence:
    message = SubmitTokens(id=rank[1], token_ids=b"", sampling=Sampling(), client=Client(tenant, client))
    request = Request(message, 0, rank[1], PROMPT, limit, None, frozenset())
    return Sequence(request, rank[2], rank, array("i", [0] * PROMPT), [])


def enter(queue: RequestQueue, choice: Sequence, slot: int = 0) -> None:
    queue.enter(choice, PROMPT)
    choice.slot = slot


def give_up(queue: RequestQueue, choice: Sequence, now: float = 0.0, *, preempted: bool = False) -> None:
    choice.slot = -1
    queue.leave(choice, now)
    queue.put(choice, now, preempted=preempted)


def end(queue: RequestQueue, choice: Sequence) -> None:
    queue.settle(choice)
    choice.slot = -1
    queue.leave(choice, 0.0)


def admitted(queue: RequestQueue, count: int) -> list[Sequence]:
    """The next so many that enter."""
    found = []
    for _ in range(count):
        choice = queue.walk().next()
        assert choice is not None
        enter(queue, choice)
        found.append(choice)
    return found


def walked(queue: RequestQueue) -> list[Sequence]:
    """All in order, as long as none enters."""
    walk, found = queue.walk(), []
    while (choice := walk.next()) is not None:
        found.append(choice)
        walk.skip(choice)
    assert walk.passed == len(found) == len(queue)
    return found


@given(st.lists(RANKS, unique=True, max_size=30), st.booleans(), st.data())
def test_with_one_client_the_order_is_that_of_ranks_whatever_came_and_went(
    ranks: list[Rank], fair: bool, data: st.DataObject
) -> None:
    """As without fairness, where clients make no difference. Some are passed over, some enter and are preempted."""
    queue = RequestQueue(fair=fair)
    names = st.just("") if fair else st.sampled_from("abc")
    choices = [waiting(rank, data.draw(names), data.draw(names)) for rank in ranks]
    for choice in choices:
        queue.put(choice, 0.0)
    left = sorted(choices, key=lambda choice: choice.rank)
    running: list[Sequence] = []
    for _ in range(data.draw(st.integers(0, 30))):
        assert walked(queue) == left
        assert queue.tokens == PROMPT * len(left)
        event = data.draw(st.sampled_from(["enter", "remove", "preempt", "end"]))
        if event == "enter" and left:
            walk, index = queue.walk(), data.draw(st.integers(0, len(left) - 1))
            for passed in left[:index]:
                assert walk.next() is passed
                walk.skip(passed)
            enter(queue, left[index])
            assert walk.next() is (left[index + 1] if index + 1 < len(left) else None)
            running.append(left.pop(index))
        elif event == "remove" and left:
            queue.remove(left.pop(data.draw(st.integers(0, len(left) - 1))))
        elif running:
            choice = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if event == "end":
                end(queue, choice)
                continue
            give_up(queue, choice, preempted=True)
            left = sorted([*left, choice], key=lambda choice: choice.rank)
    for choice in running:
        end(queue, choice)
    for choice in left:
        queue.remove(choice)
    assert is_empty(queue)
    assert (len(queue), queue.tokens, queue.clients) == (0, 0, 0)


CHOICE = st.tuples(RANKS, st.sampled_from("abc"), st.sampled_from("xy"))
CHOICES = st.lists(CHOICE, unique_by=lambda drawn: drawn[0], max_size=40)


@given(CHOICES, st.lists(st.booleans(), min_size=80, max_size=80))
def test_priorities_go_strictly_first_and_each_client_in_order(
    drawn: list[tuple[Rank, str, str]], passes: list[bool]
) -> None:
    queue = RequestQueue()
    for rank, client, tenant in drawn:
        queue.put(waiting(rank, client, tenant), 0.0)
    walk, seen = queue.walk(), []
    while (choice := walk.next()) is not None:
        seen.append(choice)
        if passes[len(seen)]:
            walk.skip(choice)
        else:
            enter(queue, choice)
    assert sorted(choice.rank for choice in seen) == sorted(rank for rank, _, _ in drawn), "each once"
    assert [choice.rank[0] for choice in seen] == sorted(choice.rank[0] for choice in seen)
    for name in {(client, tenant) for _, client, tenant in drawn}:
        own = [choice.rank for choice in seen if choice.request.message.client == Client(name[1], name[0])]
        assert own == sorted(own)


def test_choices_of_one_request_are_admitted_as_others_allow() -> None:
    queue = RequestQueue()
    for index in range(128):
        queue.put(waiting((0, 1, index), "flood"), 0.0)
    admitted(queue, 20)
    for order in range(2, 6):
        queue.put(waiting((0, order, 0), f"probe-{order}", limit=PROMPT + 8), 0.0)
    names = [choice.request.message.client.name for choice in admitted(queue, 8)]
    assert names.index("probe-5") <= 5
    assert names.count("flood") == 4


@given(st.lists(st.integers(1, 2000), min_size=3, max_size=3))
def test_clients_get_the_same_tokens_whatever_their_requests_cost(limits: list[int]) -> None:
    queue, got = RequestQueue(), Counter[str]()
    for client, limit in enumerate(limits):
        for order in range(200):
            queue.put(waiting((0, 1000 * client + order, 0), str(client), limit=PROMPT + limit), 0.0)
    while len({choice.request.message.client.name for choice in queue}) == 3:
        (choice,) = admitted(queue, 1)
        got[choice.request.message.client.name] += PROMPT + min(TYPICAL, choice.request.limit - PROMPT)
    assert max(got.values()) - min(got.values()) <= PROMPT + TYPICAL + 3 * QUANTUM


def test_what_an_output_was_expected_to_cost_is_made_what_it_cost() -> None:
    """Both are expected to write as much. One writes twice that, the other little, so it gets more turns."""
    queue, got = RequestQueue(), Counter[str]()
    for order in range(2000):
        for client in ("long", "short"):
            queue.put(waiting((0, order, client == "short"), client, limit=5000), 0.0)
    for _ in range(600):
        (choice,) = admitted(queue, 1)
        client = choice.request.message.client.name
        choice.tokens.extend([0] * (500 if client == "long" else 50))
        got[client] += len(choice.tokens)
        end(queue, choice)
    assert abs(got["long"] - got["short"]) <= 1000 + 3 * QUANTUM


def test_inventing_clients_gains_a_tenant_nothing() -> None:
    queue = RequestQueue()
    for order in range(300):
        queue.put(waiting((0, order, 0), f"invented-{order}", "flood"), 0.0)
        queue.put(waiting((0, order, 1), "me", "other"), 0.0)
    tenants = Counter(choice.request.message.client.tenant for choice in admitted(queue, 200))
    assert abs(tenants["flood"] - tenants["other"]) <= 4


def test_invented_clients_leave_nothing_behind() -> None:
    """Accounts are opened for names that clients choose, and closed with the last request of each."""
    queue = RequestQueue()
    queue.put(waiting((0, 0, 0), "stays"), 0.0)
    for order in range(1, 2000):
        choice = waiting((order % 3, order, 0), f"invented-{order}", f"key-{order}")
        queue.put(choice, 0.0)
        if order % 2:
            enter(queue, choice)
            end(queue, choice)
        else:
            queue.remove(choice)
    assert {number: list(level.tenants) for number, level in queue._levels.items()} == {0: [""]}
    assert list(queue._levels[0].tenants[""].clients) == ["stays"]
    assert queue.clients == len(queue._levels[0].ring) == 1


def test_preempted_ones_go_before_all_turns_and_pay_once() -> None:
    queue = RequestQueue()
    for order in range(10):
        queue.put(waiting((0, order, 0), "abc"[order % 3]), 0.0)
    running = admitted(queue, 6)
    paid = [queue._paid[choice] for choice in running]
    for choice in (running[4], running[1]):
        give_up(queue, choice, preempted=True)
    first = sorted((running[1], running[4]), key=lambda choice: choice.rank)
    balances = [(share.balance, share.place[0]) for share in (queue._clients[choice] for choice in first)]
    assert walked(queue)[:2] == first
    assert admitted(queue, 2) == first
    assert balances == [(share.balance, share.place[0]) for share in (queue._clients[choice] for choice in first)]
    assert [queue._paid[choice] for choice in running] == paid


def full(queue: RequestQueue, held: dict[tuple[str, str], int], level: int = 0) -> list[Sequence]:
    """So many run of each (tenant, client)."""
    found = []
    for number, ((tenant, client), count) in enumerate(held.items()):
        for order in range(count):
            choice = waiting((level, 100 * number + order, 0), client, tenant)
            queue.put(choice, 0.0)
            enter(queue, choice, len(found))
            found.append(choice)
    return found


@pytest.mark.parametrize(
    ("held", "newcomer", "from_"),
    [
        ({("", "a"): 4}, ("", "b"), ("", "a")),
        ({("", "a"): 2, ("", "b"): 3}, ("", "c"), ("", "b")),
        ({("", "a"): 1, ("", "b"): 1}, ("", "c"), None),  # nobody has two
        ({("x", "a"): 2, ("y", "b"): 1, ("y", "c"): 2}, ("z", "d"), ("y", "c")),  # the tenant with most
        ({("x", "a"): 1, ("x", "b"): 1, ("y", "c"): 1}, ("y", "d"), None),  # one apart is even enough
        ({("x", "a"): 1, ("x", "b"): 1, ("x", "e"): 1, ("y", "c"): 1}, ("y", "d"), ("x", "a")),
        ({("x", "a"): 9, ("y", "b"): 1}, ("x", "new"), ("x", "a")),
        ({("x", "a"): 1, ("x", "b"): 1, ("y", "c"): 2}, ("x", "new"), None),  # an invented client takes from nobody
    ],
)
def test_who_gives_a_slot_up(
    held: dict[tuple[str, str], int], newcomer: tuple[str, str], from_: tuple[str, str] | None
) -> None:
    queue = RequestQueue()
    running = full(queue, held)
    probe = waiting((0, 999, 0), newcomer[1], newcomer[0])
    queue.put(probe, 1.0)
    assert queue.starved(1.0 + PATIENCE / 2) is None, "mostly a slot is free before"
    found = queue.starved(1.0 + PATIENCE + LOOK)
    if from_ is None:
        assert found is None
        return
    assert found is probe
    queue.promise(probe)
    assert queue.starved(9.0) is None, "it counts as running"
    victim = queue.victim(probe)
    own = [choice for choice in running if choice.request.message.client == Client(*from_)]
    if max(held.values()) > 1:
        assert victim is max(own, key=lambda choice: choice.rank), "the most junior"
    assert victim in running
    give_up(queue, victim, 2.0)
    assert walked(queue)[0] is probe
    queue.remove(probe)
    assert queue.promised() == []


def test_nobody_gives_up_the_only_slot_it_has() -> None:
    """What was to give one up has ended meanwhile, so a slot is free, and the rest is shared evenly."""
    queue = RequestQueue()
    running = full(queue, {("", "a"): 2, ("", "c"): 1})
    probe = waiting((0, 999, 0), "b")
    queue.put(probe, 0.0)
    assert queue.starved(9.0) is probe
    queue.promise(probe)
    assert queue.victim(probe) is running[1]
    end(queue, running[1])
    assert queue.victim(probe) is None


def test_a_higher_priority_takes_from_a_lower_one_and_never_the_other_way() -> None:
    queue = RequestQueue()
    low, high = full(queue, {("", "a"): 1}, 5), full(queue, {("", "b"): 9}, 0)
    probe = waiting((5, 999, 0), "c")
    queue.put(probe, 0.0)
    assert queue.starved(9.0) is None
    urgent = waiting((0, 999, 0), "d")
    queue.put(urgent, 0.0)
    assert queue.starved(20.0) is urgent
    queue.promise(urgent)
    assert queue.victim(urgent) is low[0]
    give_up(queue, low[0])
    assert queue.victim(urgent) is high[-1], "nothing runs below any more"


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("abcd"), st.integers(0, 1)), min_size=1, max_size=60),
    st.integers(1, 12),
)
def test_giving_up_has_an_end_and_leaves_nobody_starved(who: list[tuple[str, str, int]], slots: int) -> None:
    """Nothing ever ends by itself, and nothing else comes: slots move until nobody is owed one."""
    queue, free, moves, now = RequestQueue(), slots, 0, 0.0
    running: list[Sequence] = []
    for order, (tenant, client, level) in enumerate(who):
        queue.put(waiting((level, order, 0), client, tenant), now)
        while free and (choice := queue.walk().next()) is not None:
            enter(queue, choice)
            running.append(choice)
            free -= 1
    for _ in range(4 * slots + 8):
        now += PATIENCE + LOOK
        if (starved := queue.starved(now)) is None:
            break
        queue.promise(starved)
        victim = queue.victim(starved)
        assert victim is not None
        give_up(queue, victim, now)
        running.remove(victim)
        moves += 1
        head = queue.walk().next()
        assert head is starved or (head is not None and head.rank[0] < starved.rank[0])
        assert head is not None
        enter(queue, head)
        running.append(head)
    else:
        raise AssertionError("slots move for ever")
    assert moves <= 3 * slots
    assert len(running) == min(slots, len(who))
    for choice in queue:
        client = queue._clients[choice]
        assert client.running or not client.tenant.crowded
    for choice in running:
        end(queue, choice)
    for choice in list(queue):
        queue.remove(choice)
    assert is_empty(queue)


@pytest.mark.skipif(not __debug__, reason="our own mistakes are told by assertions, which are off")
def test_only_what_waits_can_be_removed() -> None:
    queue = RequestQueue()
    queue.put(waiting((0, 1, 0)), 0.0)
    stranger = waiting((0, 1, 0))
    with pytest.raises(AssertionError):
        queue.remove(stranger)
    RequestQueue().put(stranger, 0.0)
    queue._clients[stranger] = queue._clients[next(iter(queue))]
    with pytest.raises(AssertionError):
        queue.remove(stranger)
