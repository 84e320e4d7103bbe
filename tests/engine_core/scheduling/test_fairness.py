"""Turns in tokens: nobody waits without end, nobody gets ahead by more than a sequence and a few quanta."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.scheduling.request_queue import MOST, QUANTUM, Ring, Share

COSTS = st.lists(st.integers(1, 4 * QUANTUM), min_size=1, max_size=300)


def served(ring: Ring[Share], tokens: int) -> Share:
    """Whose turn it is, served."""
    share = ring.next((0, 0))
    assert share is not None
    ring.serve(share, tokens)
    return share


@given(st.integers(2, 8), COSTS)
def test_those_who_wait_get_the_same_but_for_one_sequence_and_three_quanta(count: int, costs: list[int]) -> None:
    ring: Ring[Share] = Ring()
    shares = [Share() for _ in range(count)]
    got = dict.fromkeys(shares, 0)
    for share in shares:
        ring.join(share)
    for cost in costs:
        got[served(ring, cost)] += cost
        assert all(0 < share.balance <= QUANTUM for share in shares)
        assert max(got.values()) - min(got.values()) <= max(costs) + 3 * QUANTUM


@given(st.integers(1, 10 * QUANTUM), st.integers(1, 20))
def test_endless_newcomers_starve_no_client(debt: int, crowd: int) -> None:
    """For each that is served another one comes. A round has those that came in the one before it, so one in debt is
    served again after as many rounds as pay for it."""
    ring: Ring[Share] = Ring()
    old = Share()
    ring.join(old)
    served(ring, debt)
    for _ in range(crowd):
        ring.join(Share())
    services = 0
    while (share := served(ring, QUANTUM)) is not old:
        ring.leave(share)
        ring.join(Share())
        services += 1
        assert services <= (debt // QUANTUM + 2) * (crowd + 1)


def test_newcomers_are_served_before_those_that_are_in_debt() -> None:
    ring: Ring[Share] = Ring()
    heavy = [Share() for _ in range(5)]
    for share in heavy:
        ring.join(share)
    for _ in heavy:
        served(ring, 100 * QUANTUM)
    probe = Share()
    ring.join(probe)
    assert ring.next((0, 0)) is probe


def test_a_turn_is_worth_many_cheap_sequences_or_one_expensive() -> None:
    ring: Ring[Share] = Ring()
    cheap, dear = Share(), Share()
    ring.join(cheap)
    ring.join(dear)
    order = []
    for _ in range(40):
        share = ring.next((0, 0))
        order.append(share is dear)
        assert share is not None
        ring.serve(share, QUANTUM if share is dear else QUANTUM // 8)
    assert order[:18] == [False] * 8 + [True] + [False] * 8 + [True]


def test_what_was_charged_too_much_comes_back_but_buys_no_place_before_those_who_wait() -> None:
    ring: Ring[Share] = Ring()
    dear, other = Share(), Share()
    ring.join(dear)
    served(ring, 10 * QUANTUM)
    ring.join(other)
    ring.charge(dear, -10 * QUANTUM)
    assert ring.next((0, 0)) is other
    assert served(ring, QUANTUM) is other
    assert ring.next((0, 0)) is dear


def test_a_refund_does_not_cost_the_turn_that_it_comes_in() -> None:
    ring: Ring[Share] = Ring()
    share, other = Share(), Share()
    ring.join(share)
    ring.join(other)
    assert served(ring, 10) is share
    ring.charge(share, -QUANTUM)
    assert ring.next((0, 0)) is share
    assert share.balance == 2 * QUANTUM - 10
    ring.charge(share, -QUANTUM)
    assert share.balance == MOST


def test_a_debt_is_kept_while_nothing_waits_and_paid_by_the_rounds_of_others() -> None:
    ring: Ring[Share] = Ring()
    dear, other = Share(), Share()
    ring.join(dear)
    ring.join(other)
    served(ring, 5 * QUANTUM)
    ring.leave(dear)
    served(ring, QUANTUM)
    ring.join(dear)
    assert served(ring, QUANTUM) is other, "the debt is kept"
    ring.leave(dear)
    for _ in range(8):
        assert served(ring, QUANTUM) is other
    ring.join(dear)
    assert [served(ring, QUANTUM) for _ in range(2)].count(dear) == 1, "it is paid"


def test_what_is_served_out_of_turn_does_not_end_the_round() -> None:
    """One deep in debt goes first for once (it was preempted, say): newcomers still come before its debt is paid."""
    ring: Ring[Share] = Ring()
    dear, other = Share(), Share()
    ring.join(dear)
    ring.join(other)
    served(ring, 100 * QUANTUM)
    ring.serve(dear, QUANTUM)
    newcomer = Share()
    ring.join(newcomer)
    assert newcomer.place[0] <= other.place[0] + 1
    assert newcomer.place < dear.place
