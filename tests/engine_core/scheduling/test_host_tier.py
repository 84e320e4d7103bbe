"""Blocks in the host's memory, one rule at a time: what is copied there and when, who waits for what, what is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.engine_core.scheduling import host_tier
from penstock.engine_core.scheduling.host_tier import PATIENCE, RETRY
from penstock.protocol.messages import Finish
from penstock.protocol.steps import BlocksCopied
from tests.sim.adapters import GROUP
from tests.sim.lives import World
from tests.sim.server import Server, chunks

# Room for two prompts of 40 tokens less a little.
WORLD = World(blocks=20, block_size=4, slots=4, budget=64, max_model_len=64, depth=1, host_blocks=100)
FIRST, SECOND, THIRD = ([start + number % 7 for number in range(40)] for start in (3, 13, 23))


def server(**fields: object) -> Server:
    return Server(replace(WORLD, **fields))  # type: ignore[arg-type]


def ask(made: Server, prompt: list[int], **fields: object) -> int:
    number = made.submit(prompt, **fields)  # type: ignore[arg-type]
    finish(made)
    return number


def finish(made: Server) -> None:
    while made.scheduler.unfinished:
        made.step()
        made.copy()
    made.run()


def take(made: Server) -> None:
    """Executors have got what there is to copy."""
    made.executor.host.take(made.scheduler, random.Random(0))


def cached(made: Server, number: int) -> int:
    return made.seen(number).cached or 0


def evicted(**fields: object) -> Server:
    """A server whose device holds the second and the third prompt, and the first one's beginning is in the host's
    memory alone."""
    made = server(**fields)
    for prompt in (FIRST, SECOND, THIRD):
        ask(made, prompt)
    assert stand(made).copied > 8
    return made


def stand(made: Server):  # type: ignore[no-untyped-def]
    return made.scheduler.statistics().host_tier


def test_nothing_is_copied_while_there_is_room() -> None:
    made = server(blocks=60)
    ask(made, FIRST)
    ask(made, SECOND)
    assert stand(made).copied == 0


def test_the_oldest_blocks_are_copied_before_they_go() -> None:
    made = server()
    ask(made, FIRST)
    ask(made, SECOND)
    copied = stand(made).copied
    assert 0 < copied <= 20
    ask(made, THIRD)
    assert stand(made).lost == 0
    assert made.scheduler.statistics().evicted_blocks > 0


def test_all_idle_blocks_of_a_full_device_are_copied_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they need not be beside the next steps."""
    monkeypatch.setattr(host_tier, "FEW", 0.1)  # what sequences have filled is left for later
    made = server()
    ask(made, FIRST)
    assert stand(made).copied == 0, "there is room"
    ask(made, SECOND)
    made.copy()
    assert stand(made).copied == stand(made).findable == 20
    assert made.scheduler.statistics().pool.idle == 20 - made.scheduler.statistics().pool.free
    assert not made.scheduler.copy_messages()


def test_prompts_after_prompts_evict_no_block_before_it_is_copied() -> None:
    """Though an executor says only once a step which copies have ended."""
    made = server(blocks=60, slots=2, budget=20, host_blocks=400)
    for start in range(30):
        made.submit([start + number % 7 for number in range(40)], max_tokens=1)
    host, chance = made.executor.host, random.Random(0)
    while made.scheduler.unfinished:
        while made.plan() is not None and made.scheduler.in_flight < 2:
            pass
        made.apply()
        host.take(made.scheduler, chance)
        for _ in range(GROUP * len(host.copies)):
            host.say(made.scheduler, made.now, chance)
    assert stand(made).copied >= made.scheduler.statistics().evicted_blocks > 200
    assert stand(made).lost == 0


def test_a_prefix_comes_back_and_counts_as_cached() -> None:
    made = evicted()
    number = made.submit([*FIRST, 1, 2])
    assert made.plan() is None, "it waits for its blocks"
    assert made.scheduler.statistics().reasons == {"host": 1}
    assert made.scheduler.statistics().pool.held == 10
    made.copy()
    assert chunks(made.step()) == [(0, 40, 2, 1)]
    finish(made)
    assert cached(made, number) == 40
    assert (stand(made).fetches, stand(made).fetched) == (1, 10)
    made.record.verify(made.lives[number], made.world, False, False)


def test_others_are_planned_past_it() -> None:
    made = evicted()
    waiting = made.submit([*FIRST, 1, 2])
    other = made.submit([9, 9, 9])
    plan = made.step()
    assert [chunk[2] for chunk in chunks(plan)] == [3]
    assert made.seen(other).tokens
    made.copy()
    finish(made)
    assert made.seen(waiting).finish == Finish.LENGTH


def test_the_answer_of_every_executor_is_awaited() -> None:
    made = evicted()
    made.submit([*FIRST, 1, 2])
    assert made.plan() is None
    take(made)
    (number,) = made.executor.host.copies
    for executor in range(GROUP - 1):
        made.scheduler.blocks_copied(BlocksCopied(number), executor, 0.0)
        made.scheduler.blocks_copied(BlocksCopied(number), executor, 0.0)
        assert made.scheduler.plan(0.0) is None


def test_two_that_need_the_same_wait_for_one_fetch() -> None:
    made = evicted()
    numbers = [made.submit([*FIRST, extra]) for extra in (1, 2)]
    assert made.plan() is None
    made.copy()
    finish(made)
    assert stand(made).fetches == 1
    assert [cached(made, number) for number in numbers] == [40, 40]


def test_a_sequence_that_ends_while_it_waits_leaves_the_blocks_to_others() -> None:
    made = evicted()
    gone = made.submit([*FIRST, 1])
    assert made.plan() is None
    take(made)
    made.scheduler.abort(gone)
    made.copy()
    assert made.scheduler.statistics().pool.held == 0
    number = made.submit([*FIRST, 2])
    assert chunks(made.step()) == [(0, 40, 1, 1)]
    finish(made)
    assert cached(made, number) == 40


def test_where_no_answer_comes_it_computes() -> None:
    made = evicted(blocks=24)
    number = made.submit([*FIRST, 1])
    assert made.plan() is None
    made.now += PATIENCE
    assert chunks(made.step())[0][1] < 40
    made.copy()
    finish(made)
    assert made.seen(number).finish == Finish.LENGTH


def test_a_few_positions_are_computed_rather_than_fetched() -> None:
    made = evicted()
    host = made.scheduler._state.kv.host
    assert host is not None
    host.position_seconds, host.block_seconds = host_tier.OVERHEAD / 41, 0.0
    made.submit([*FIRST, 1])
    assert made.plan() is not None
    made.apply()
    finish(made)
    assert stand(made).fetches == 0


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_how_fast_copies_are_is_measured(seconds: float) -> None:
    made = evicted()
    host = made.scheduler._state.kv.host
    assert host is not None
    made.submit([*FIRST, 1])
    assert made.plan() is None
    (fetch,) = host.fetches.values()
    take(made)
    for executor in range(GROUP):
        made.scheduler.blocks_copied(BlocksCopied(fetch.number, seconds), executor, 0.0)
    assert host.block_seconds == seconds / 10


def test_copies_that_were_slow_once_are_tried_again() -> None:
    """One that a busy machine held up must not end fetching for good: nothing else measures it."""
    made = evicted()
    host = made.scheduler._state.kv.host
    assert host is not None
    host.position_seconds, host.block_seconds, host.measured = 1e-3, 1.0, made.now
    ask(made, [*FIRST, 1])
    assert stand(made).fetches == 0
    for prompt in (SECOND, THIRD):
        ask(made, prompt)
    made.now += RETRY + 1
    ask(made, [*FIRST, 2])
    assert stand(made).fetches > 0


def test_what_a_failed_sequence_computed_is_forgotten_here_too() -> None:
    made = evicted()
    state = made.scheduler._state
    assert state.kv.host is not None
    chain = [key for key in state.kv.host.tier._blocks if len(key) == 16]
    host_tier.distrust_copies(state, chain)
    assert stand(made).findable == 0
    number = ask(made, [*FIRST, 1])
    assert cached(made, number) == 0


def test_new_executors_have_nothing_of_it() -> None:
    made = evicted()
    number = made.submit([*FIRST, 1])
    assert made.plan() is None
    made.world = replace(made.world, host_blocks=7)
    made.scheduler.restart(1, 0.0, host_blocks=7)
    made.executor = made.new_executor(1)
    made.scheduler.blocks_copied(BlocksCopied(1), 0, 0.0)
    assert (stand(made).total, stand(made).free) == (7, 7)
    finish(made)
    assert made.seen(number).finish == Finish.LENGTH


def test_nothing_computed_is_kept_where_weights_change() -> None:
    made = evicted()
    made.submit([*FIRST, 1])
    assert made.plan() is None
    made.scheduler.freeze(frozen=True)
    assert not made.scheduler.settled, "blocks are on their way"
    made.copy()
    assert made.scheduler.settled
    made.scheduler.forget_computed(0.0)
    made.scheduler.freeze(frozen=False)
    assert stand(made).findable == 0
    assert chunks(made.step())[0][1] == 0
    finish(made)


def test_where_fetched_blocks_would_take_the_room_of_what_runs_they_stay() -> None:
    made = evicted()
    running = made.submit([1, 2, 3], max_tokens=50)
    made.step()
    fetched = stand(made).fetches
    made.submit([*FIRST, 1], max_tokens=20)
    while not made.seen(running).finish:
        made.step()
        made.copy()
    assert made.scheduler.statistics().preemptions == 0
    assert stand(made).fetches == fetched
    finish(made)
    assert stand(made).fetches == fetched + 1


def test_a_sequence_that_fails_takes_its_copies_along() -> None:
    """It has computed again what is in the host's memory, since it reports on its prompt."""
    made = evicted()
    assert stand(made).findable > 8
    number = made.submit([*FIRST, 1], prompt_logprobs=0, fails_at=0)
    finish(made)
    assert made.seen(number).finish == Finish.ERROR
    assert cached(made, ask(made, [*FIRST, 2])) == 0


def test_one_that_waited_for_anothers_blocks_has_the_rest_of_its_own_fetched() -> None:
    made = server(blocks=24)
    other = [*FIRST[:20], *THIRD[:20]]
    for prompt in (FIRST, other, SECOND, [*SECOND[:4], *THIRD[::-1]]):
        ask(made, prompt)
    numbers = [made.submit([*prompt, 1]) for prompt in (FIRST, other)]
    finish(made)
    assert stand(made).fetches == 2
    assert [cached(made, number) for number in numbers] == [40, 40]


def test_what_is_forgotten_on_its_way_is_not_found() -> None:
    made = evicted()
    host = made.scheduler._state.kv.host
    assert host is not None
    number = made.submit([*FIRST, 1])
    assert made.plan() is None
    host.tier.forget(list(host.fetching))
    made.copy()
    assert chunks(made.step())[0][1] == 0
    finish(made)
    assert cached(made, number) == 0


def test_blocks_on_their_way_leave_no_room_for_what_will_need_it() -> None:
    made = evicted(blocks=24)
    made.submit([*FIRST, 1])
    assert made.plan() is None
    long = made.submit([1, 2, 3], max_tokens=60)
    assert made.plan() is None
    finish(made)
    assert made.seen(long).finish == Finish.LENGTH
    assert made.scheduler.statistics().preemptions == 0


def test_a_block_that_is_being_filled_again_is_not_copied_before_it_is_full() -> None:
    """It was filled by a sequence that has ended, before there was room for one more message about copies."""
    made = server(depth=2)
    state = made.scheduler._state
    host = state.kv.host
    assert host is not None
    made.submit([*FIRST, *FIRST[:8]], max_tokens=12)
    made.step()
    for prompt in (SECOND[:8], THIRD[:12], SECOND[8:20]):
        made.submit(prompt, max_tokens=1)
        made.step()
    assert len(host.spills) == host_tier.MOST_SPILLS
    made.submit(THIRD[12:24], max_tokens=1)
    ((slot, *_),) = chunks(made.plan())
    sequence = state.slots.sequences[slot]
    assert sequence is not None
    again = [block for step, block in host.filled if step <= state.steps.applied and block in sequence.blocks]
    assert again, "the step that fills them is in flight"
    take(made)
    for number in list(host.spills):
        for executor in range(GROUP):
            made.scheduler.blocks_copied(BlocksCopied(number), executor, 0.0)
    assert host.spills, "others are copied"
    assert not {block for spill in host.spills.values() for block, _ in spill.blocks}.intersection(sequence.blocks)
