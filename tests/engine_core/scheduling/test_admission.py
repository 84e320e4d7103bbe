"""Who enters when: order, the prefix cache, shared prompts, and the forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine_core.scheduling.admission import common_blocks
from tests.sim.server import ROOMY, Server, chunks

STEM = [7, 3, 9, 4, 8, 5, 6, 2, 7, 7, 3, 1]  # three blocks


def test_first_come_first_served_whatever_the_priority() -> None:
    server = Server(replace(ROOMY, slots=1))
    numbers = [server.submit([3], priority=priority, max_tokens=1) for priority in (0, 5, 1)]
    order = [server.step().starts[0].sampling.seed for _ in numbers]  # type: ignore[union-attr]
    assert order == numbers


def test_larger_priority_first_then_arrival() -> None:
    server = Server(replace(ROOMY, slots=1, policy="priority"))
    numbers = [server.submit([3], priority=priority, max_tokens=1) for priority in (0, 5, 1, 5)]
    order = [server.step().starts[0].sampling.seed for _ in numbers]  # type: ignore[union-attr]
    assert order == [numbers[1], numbers[3], numbers[2], numbers[0]]


def test_a_finished_prompt_is_found_again_but_for_its_last_position() -> None:
    server = Server()
    first = server.submit(STEM, max_tokens=1)
    server.run()
    again = server.submit(STEM, max_tokens=1)
    assert chunks(server.plan()) == [(0, 8, 4, 1)]  # the last block is computed, so that there are logits
    server.apply()
    longer = server.submit([*STEM, 5], max_tokens=1)
    assert [(start, count) for _, start, count, _ in chunks(server.plan())] == [(12, 1)]
    server.apply()
    assert [server.seen(number).cached for number in (first, again, longer)] == [0, 8, 12]
    stand = server.scheduler.statistics()
    assert (stand.cached_tokens, stand.prompt_tokens) == (20, 37)


def test_output_of_one_turn_is_the_prefix_of_the_next() -> None:
    server = Server()
    number = server.submit(STEM, max_tokens=6)
    server.run(depth=2)
    spoken = server.seen(number).tokens
    follow = server.submit(STEM + spoken + [4], max_tokens=1)
    server.run()
    assert server.seen(follow).cached == 16


def test_salts_do_not_share() -> None:
    server = Server()
    for salt in ("", "a", "b"):
        number = server.submit(STEM, salt=salt)
        server.run()
        assert server.seen(number).cached == 0
    number = server.submit(STEM, salt="a")
    server.run()
    assert server.seen(number).cached == 8


def test_caching_off_finds_nothing() -> None:
    server = Server(replace(ROOMY, prefix_caching=False))
    for _ in range(2):
        number = server.submit(STEM)
        server.run()
        assert server.seen(number).cached == 0
    assert not any(server.scheduler._state.kv.prefix._blocks)


def test_twins_that_arrive_together_compute_their_prefix_once() -> None:
    server = Server()
    numbers = [server.submit([*STEM, token], max_tokens=2) for token in (3, 4, 5)]
    assert [count for _, _, count, _ in chunks(server.plan())] == [13]
    assert [(start, count) for _, start, count, _ in chunks(server.plan())] == [(12, 1), (12, 1)]  # nothing applied yet
    while server.results:
        server.apply()
    server.run()
    assert [server.seen(number).cached for number in numbers] == [0, 12, 12]


def test_one_that_waits_for_a_prefix_lets_others_pass() -> None:
    server = Server()
    server.submit([*STEM, 3], max_tokens=2)
    server.submit([*STEM, 4], max_tokens=2)
    server.submit([9, 9], max_tokens=2)
    assert [count for _, _, count, _ in chunks(server.step())] == [13, 2]


def test_a_prefix_whose_computer_is_gone_is_computed_by_the_next() -> None:
    server = Server(replace(ROOMY, budget=8))
    leader = server.submit([*STEM, 3], max_tokens=2)
    follower = server.submit([*STEM, 4], max_tokens=2)
    server.step()
    server.scheduler.abort(leader)
    assert [(start, count) for _, start, count, _ in chunks(server.step())] == [(8, 5)]
    server.run()
    assert len(server.seen(follower).tokens) == 2


@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_the_prompts_full_blocks(caching: bool) -> None:
    server = Server(replace(ROOMY, prefix_caching=caching))
    number = server.submit([*STEM, 5, 5], n=4, max_tokens=3)
    assert [(start, count) for _, start, count, _ in chunks(server.plan())] == [(0, 14)]
    assert [(start, count) for _, start, count, _ in chunks(server.plan())] == [(12, 2)] * 3
    assert server.scheduler.statistics().pool.held == 3 + 4
    while server.results:
        server.apply()
    server.run(depth=2)
    seen = [server.seen(number, choice) for choice in range(4)]
    assert len({tuple(one.tokens) for one in seen}) > 1, "each has a seed of its own"
    assert {one.cached for one in seen} == {0}
    server.record.verify(server.lives[number], server.world, aborted=False, stopped=False)


def test_prompt_logprobs_are_computed_not_found() -> None:
    server = Server()
    server.submit(STEM)
    server.run()
    number = server.submit(STEM, prompt_logprobs=0, n=2)
    server.run(depth=2)
    assert server.seen(number).cached == 0
    server.record.verify(server.lives[number], server.world, aborted=False, stopped=False)


def test_the_forecast_holds_back_who_would_not_fit_at_the_peak() -> None:
    server = Server(replace(ROOMY, blocks=8))  # 32 positions
    first = server.submit([3] * 4, max_tokens=17)  # 20 at its end
    second = server.submit([4] * 4, max_tokens=17)  # 20 at its end
    third = server.submit([5], max_tokens=1)
    server.step()
    stand = server.scheduler.statistics()
    assert (stand.running, stand.waiting) == (1, 2), "in order: the third does not overtake"
    assert stand.forecast.refused == 1
    server.run(depth=2)
    assert server.scheduler.statistics().preemptions == 0
    assert [len(server.seen(number).tokens) for number in (first, second, third)] == [17, 17, 1]


def test_ends_at_different_times_let_more_in_than_the_sum_of_their_ends() -> None:
    server = Server(replace(ROOMY, blocks=8))
    server.submit([3] * 4, max_tokens=3)  # gives its 2 blocks back when the other needs its third
    server.submit([4] * 4, max_tokens=25)  # 7 blocks at its end
    server.step()
    assert server.scheduler.statistics().running == 2
    server.run(depth=2)
    assert server.scheduler.statistics().preemptions == 0


def test_slots_are_the_other_bound() -> None:
    server = Server(replace(ROOMY, slots=2))
    for token in range(3, 7):
        server.submit([token], max_tokens=2)
    server.step()
    stand = server.scheduler.statistics()
    assert (stand.running, stand.waiting, stand.slots) == (2, 2, 2)
    server.run()


def test_shared_blocks_are_accounted_once_and_to_whoever_goes_on_longest() -> None:
    server = Server()
    state = server.scheduler._state

    def accounted() -> tuple[list[int], int]:
        rows = state.slots.occupied()
        view = state.forecast.estimate(state.slots, state.kv.pool.held, 0)
        return (state.slots.blocks.held[rows] - state.slots.blocks.borrowed[rows]).tolist(), view.base

    server.submit([*STEM, 1], max_tokens=4)
    server.step()
    assert accounted() == ([4], 0)
    server.submit([*STEM, 2], max_tokens=20)  # takes the account over
    server.step()
    assert accounted() == ([1, 4], 0)
    server.submit([*STEM, 3], max_tokens=2)
    server.step()
    assert accounted() == ([1, 4, 1], 0)
    while server.scheduler.statistics().running > 1:
        server.step()
    (held,), base = accounted()
    assert (held, base) == (state.kv.pool.held, 0)
    server.run()


def test_blocks_of_an_output_are_accounted_to_their_row_when_others_share_them() -> None:
    server = Server()
    state = server.scheduler._state
    first = server.submit([*STEM, 1], max_tokens=20)
    while len(server.seen(first).tokens) < 9:
        server.step()
    server.submit([*STEM, 1, *server.seen(first).tokens[:8]], max_tokens=2)
    server.step()
    rows = state.slots.occupied()
    assert state.slots.blocks.borrowed[rows].tolist() == [0, 5]
    assert state.forecast.estimate(state.slots, state.kv.pool.held, 0).base == 0
    server.run()


def test_shared_blocks_that_outlive_their_account_count_as_held_for_good() -> None:
    server = Server()
    state = server.scheduler._state
    long = server.submit([*STEM, 1], max_tokens=20)
    server.step()
    server.submit([*STEM, 2], max_tokens=10)
    server.step()
    server.scheduler.abort(long)
    assert state.forecast.estimate(state.slots, state.kv.pool.held, 0).base == 3
    server.submit([*STEM, 3], max_tokens=10)  # adopts them
    server.step()
    assert state.forecast.estimate(state.slots, state.kv.pool.held, 0).base == 0
    server.run()


def test_common_blocks() -> None:
    a = [b"1", b"2", b"3"]
    assert common_blocks(a, [b"1", b"2", b"x", b"y"]) == 2
    assert common_blocks(a, []) == 0
    assert common_blocks(a, a) == 3
    assert common_blocks(a, [b"x"]) == 0


def test_idle_blocks_of_a_prefix_cannot_be_its_rest_as_well() -> None:
    """The forecast counts what is behind the fence as free, and it is not free yet."""
    server = Server(replace(ROOMY, blocks=6, depth=2))
    server.submit(STEM, max_tokens=1)
    server.run()
    assert server.scheduler.statistics().pool.idle == 3
    other = server.submit([9] * 7, max_tokens=2)  # both of the blocks that are left but one
    server.plan()
    server.scheduler.abort(other)
    number = server.submit([*STEM, 5, 5, 5, 5, 5], max_tokens=1)  # 3 blocks that are there, and 2 more
    assert server.scheduler.statistics().pool.held == 2
    plan = server.plan()
    assert plan is None or not plan.starts, "one block is free, and three are to be its own"
    server.run(depth=2)
    assert len(server.seen(number).tokens) == 1
    assert server.seen(number).cached == 12


def test_what_is_behind_the_fence_counts_as_given_back() -> None:
    """The newcomer's peak fits only without the blocks of one that has left, whose step is still in flight."""
    server = Server(replace(ROOMY, blocks=12, depth=2))
    server.submit([3] * 4, max_tokens=3)  # 2 blocks, soon over
    gone = server.submit([*STEM, 1], max_tokens=20)
    server.plan()
    server.scheduler.abort(gone)
    server.submit([4] * 4, max_tokens=41)  # 11 blocks at its end
    plan = server.plan()
    assert plan is not None
    assert len(plan.starts) == 1, "4 blocks come back before it needs them"
    server.run(depth=2)
    assert server.scheduler.statistics().preemptions == 0


def test_blocks_that_a_newcomer_shares_with_one_that_has_left_do_not_come_back() -> None:
    """They are behind the fence, and it opens for nobody who holds them still."""
    server = Server(replace(ROOMY, blocks=12, depth=2))
    server.submit([3] * 4, max_tokens=18)  # 6 blocks at its end
    gone = server.submit([*STEM, 1], max_tokens=8)
    server.plan()
    server.scheduler.abort(gone)
    number = server.submit([*STEM, 2], max_tokens=20)  # 8 blocks at its end, 3 of them shared
    for _ in range(6):
        server.plan()
        assert server.scheduler.statistics().running == 1, "14 blocks would be needed at once"
        server.apply()
    server.run(depth=2)
    assert server.scheduler.statistics().preemptions == 0
    assert len(server.seen(number).tokens) == 20


def test_choices_share_their_own_prompt_alone_where_caching_is_off() -> None:
    """What one request's choices share, another request with the same prompt must not find, nor they afterwards."""
    server = Server(replace(ROOMY, prefix_caching=False))
    for _ in range(3):
        server.submit([*STEM, 5], n=2, max_tokens=6)
    first = [start for _, start, _, _ in chunks(server.plan())]
    assert first == [0, 0, 0], "each computes its prompt itself"
    assert [start for _, start, _, _ in chunks(server.plan())] == [12, 12, 12]
    assert server.scheduler.statistics().pool.held == 3 * (3 + 2)
    while server.results:
        server.apply()
    server.run(depth=2)
    server.submit([*STEM, 5], n=2, max_tokens=1)
    assert [start for _, start, _, _ in chunks(server.plan())] == [0]
    server.run()
    assert server.scheduler.statistics().cached_tokens == 0
