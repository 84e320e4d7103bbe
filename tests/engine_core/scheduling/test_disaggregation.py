"""A prefill replica and one that decodes, one rule at a time: what is handed over, when, how long it is held, what is
fetched."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec
import numpy as np
import pytest

from penstock.engine_core.scheduling.disaggregation import LEASE
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.scheduling.statistics import TransferStatistics
from penstock.protocol.groups import ReplicaRole
from penstock.protocol.messages import Automaton, BlocksAddress, Finish, Prefilled, Written
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import OWN_MEMORY, CopyBlocks
from tests.sim.lives import World, scheduling_options
from tests.sim.model import VOCAB, rollout
from tests.sim.server import Server

WORLD = World(blocks=40, block_size=4, slots=4, budget=64, max_model_len=64, depth=1, host_blocks=60)
PROMPT = [3 + number % 7 for number in range(21)]  # five blocks and a token
FULL = 5


class Replica(Server):
    """A server with a role, whose messages about prompts are kept."""

    def __init__(self, role: ReplicaRole, world: World = WORLD) -> None:
        super().__init__(world)
        options = msgspec.structs.replace(scheduling_options(world), vocab_size=VOCAB, role=role, replica=3)
        self.scheduler = Scheduler(options)
        self.told: list[Prefilled] = []

    def deliver(self) -> None:
        for source in self.scheduler.undelivered():
            for message in self.scheduler.outputs(source):
                if isinstance(message, Prefilled):
                    self.told.append(message)
                else:
                    self.record.take(message)

    def begin(self, prompt: list[int] = PROMPT, **fields: object) -> int:
        """Submit a request of which only the prompt is wanted here."""
        fields.setdefault("prefill", True)
        message = {name: fields.pop(name) for name in ("prefill", "transfer") if name in fields}
        submit, self.scheduler.submit = (
            self.scheduler.submit,
            lambda request, *rest: submit(  # type: ignore[method-assign]
                msgspec.structs.replace(request, **message), *rest
            ),
        )
        try:
            return self.submit(prompt, **fields)  # type: ignore[arg-type]
        finally:
            self.scheduler.submit = submit  # type: ignore[method-assign]

    def settle(self) -> None:
        while self.step() is not None or self.scheduler.copy_messages() or self.executor.host.copies:
            self.copy()
        self.deliver()

    def stand(self) -> TransferStatistics:
        return self.scheduler.statistics().transfers

    def holds(self) -> int:
        return self.scheduler.statistics().host_tier.held


@pytest.fixture
def prefill() -> Replica:
    return Replica(ReplicaRole.PREFILL)


@pytest.fixture
def decode(prefill: Replica) -> Replica:
    made = Replica(ReplicaRole.DECODE)
    made.executor.host.others[3] = prefill.executor.host
    return made


def handed(prefill: Replica, **fields: object) -> tuple[int, Prefilled]:
    number = prefill.begin(**fields)  # type: ignore[arg-type]
    prefill.settle()
    (message,) = [one for one in prefill.told if one.id == number]
    return number, message


def go_on(decode: Replica, prefill: Replica, number: int, message: Prefilled, **fields: object) -> int:
    written = (Written(np.array(prefill.seen(number).tokens, np.int32).tobytes()),)
    return decode.begin(prefill=False, transfer=message.transfer, written=written, seed=number, **fields)


def outputs(server: Server, number: int, count: int = 4) -> list[int]:
    life = server.lives[number]
    sampling = msgspec.structs.replace(life.message.sampling, max_tokens=count)
    return rollout(life.prompt, sampling, sampling.seed, life.nature, WORLD.max_model_len)[0]


def test_a_request_ends_with_its_first_token_and_its_blocks_are_told(prefill: Replica) -> None:
    number, message = handed(prefill)
    seen = prefill.seen(number)
    assert (len(seen.tokens), seen.finish) == (1, Finish.NONE)
    transfer = message.transfer
    assert transfer is not None
    assert (transfer.replica, transfer.weights) == (3, "0")
    places = np.frombuffer(transfer.places, np.int32).tolist()
    assert len(places) == len(set(places)) == FULL
    host = prefill.executor.host
    assert [host.stamps[place] for place in places] == np.frombuffer(transfer.stamps, np.int64).tolist()
    assert prefill.stand().held == prefill.holds() == FULL
    stand = prefill.scheduler.statistics()
    assert (stand.finished, stand.failed, stand.aborted, stand.requests) == (0, 0, 0, 0)


def test_the_other_replica_fetches_them_and_says_the_rest(prefill: Replica, decode: Replica) -> None:
    number, message = handed(prefill)
    other = go_on(decode, prefill, number, message)
    assert decode.plan() is None, "it waits for its blocks"
    (copies,) = decode.scheduler.copy_messages()
    assert (copies.replica, copies.to_host) == (3, False)
    decode.settle()
    assert prefill.seen(number).tokens + decode.seen(other).tokens == outputs(prefill, number)
    assert decode.seen(other).finish == Finish.LENGTH
    assert decode.scheduler.statistics().scheduled_tokens == len(PROMPT) - 4 * FULL + 3
    stand = decode.stand()
    assert (stand.fetches, stand.fetched, stand.stale) == (1, FULL, 0)
    assert decode.scheduler.statistics().prompt_tokens == 0, "they are counted where they are computed"
    assert sum(decode.scheduler.statistics().sequences.decode.counts) == 1


def test_blocks_are_held_until_they_are_released(prefill: Replica) -> None:
    number, _ = handed(prefill)
    prefill.scheduler.release_transfer(number + 1)
    assert prefill.holds() == FULL
    prefill.scheduler.release_transfer(number)
    prefill.scheduler.release_transfer(number)
    assert (prefill.holds(), prefill.stand().held) == (0, 0)
    assert prefill.scheduler.check(thorough=True).ok


def test_nobody_is_heard_of_for_ever(prefill: Replica) -> None:
    handed(prefill)
    prefill.scheduler.expire(prefill.now + LEASE - 0.1)
    assert prefill.holds() == FULL
    prefill.scheduler.expire(prefill.now + LEASE)
    assert prefill.holds() == 0


def test_held_blocks_do_not_go_for_others(prefill: Replica) -> None:
    made = Replica(ReplicaRole.PREFILL, replace(WORLD, host_blocks=FULL))
    first, _ = handed(made)
    number = made.begin(PROMPT[::-1])
    made.settle()
    (message,) = [one for one in made.told if one.id == number]
    assert message.transfer is None, "there is no room, so all is computed again"
    made.scheduler.release_transfer(first)
    _, message = handed(made, prompt=[9, *PROMPT])
    assert message.transfer is not None


def test_a_prompt_whose_own_blocks_go_for_its_rest_is_told_of_what_is_left(decode: Replica) -> None:
    """The beginning has been there for longest, and there is no other room."""
    made = Replica(ReplicaRole.PREFILL, replace(WORLD, host_blocks=FULL))
    decode.executor.host.others[3] = made.executor.host
    for prompt in (PROMPT[:13], [9] * 9):
        first, _ = handed(made, prompt=prompt)
        made.scheduler.release_transfer(first)
    number, message = handed(made, prompt=[*PROMPT[:12], *[5] * 9])
    assert message.transfer is not None
    places = np.frombuffer(message.transfer.places, np.int32).tolist()
    assert len(places) == len(set(places)) == 1
    other = go_on(decode, made, number, message, prompt=[*PROMPT[:12], *[5] * 9])
    decode.settle()
    assert made.seen(number).tokens + decode.seen(other).tokens == outputs(made, number)


def test_what_was_written_again_is_computed(prefill: Replica, decode: Replica) -> None:
    number, message = handed(prefill)
    prefill.executor.host.stamps[int(np.frombuffer(message.transfer.places, np.int32)[2])] += 1  # type: ignore[union-attr]
    other = go_on(decode, prefill, number, message)
    decode.settle()
    assert prefill.seen(number).tokens + decode.seen(other).tokens == outputs(prefill, number)
    assert decode.stand().stale == 1
    assert decode.scheduler.statistics().scheduled_tokens == len(PROMPT) + 3
    assert decode.scheduler.check(thorough=True).ok


def test_blocks_of_other_weights_are_not_fetched(prefill: Replica, decode: Replica) -> None:
    number, message = handed(prefill)
    decode.scheduler.begin_with("1")
    go_on(decode, prefill, number, message)
    decode.settle()
    assert (decode.stand().fetches, decode.stand().stale) == (0, 0)


def test_blocks_that_are_cached_are_told_as_well(prefill: Replica) -> None:
    first, _ = handed(prefill)
    prefill.scheduler.release_transfer(first)
    assert prefill.scheduler.statistics().host_tier.findable == FULL
    prefill.scheduler._state.kv.host.tier.clear(60)  # type: ignore[union-attr]
    _, message = handed(prefill)
    assert message.transfer is not None, "copied again"
    assert prefill.seen(2).cached == 4 * FULL


def test_all_choices_have_a_token_and_one_message_is_for_all(prefill: Replica, decode: Replica) -> None:
    number, message = handed(prefill, n=3)
    tokens = [prefill.seen(number, choice).tokens for choice in range(3)]
    assert [len(each) for each in tokens] == [1, 1, 1]
    written = tuple(Written(np.array(each, np.int32).tobytes()) for each in tokens)
    other = decode.begin(prefill=False, transfer=message.transfer, written=written, n=3, seed=number)
    decode.settle()
    assert [decode.seen(other, choice).finish for choice in range(3)] == [Finish.LENGTH] * 3
    stand = decode.scheduler.statistics()
    assert stand.scheduled_tokens == 3 * (len(PROMPT) - 4 * FULL + 3)
    assert stand.transfers.fetches == 1, "the others wait for the same blocks"


def test_who_ends_with_the_first_token_goes_nowhere(prefill: Replica) -> None:
    first = prefill.begin(max_tokens=1)
    second = prefill.begin(PROMPT, stop_token_ids=tuple(range(VOCAB)))
    third = prefill.begin(automaton=Automaton(source="0 1 0 0"))
    prefill.settle()
    assert [prefill.seen(number).finish for number in (first, second)] == [Finish.LENGTH, Finish.STOP]
    assert prefill.seen(third).finish == Finish.STOP, "its structure is complete"
    assert not prefill.told


def test_a_choice_that_goes_on_is_told_although_others_have_ended(prefill: Replica) -> None:
    number = prefill.begin(n=2, temperature=1.0, max_tokens=4)
    prefill.step()
    first = prefill.seen(number, 0).tokens
    assert len(first) == 1
    prefill.scheduler.abort(number)
    prefill.settle()
    assert prefill.seen(number, 1).finish == Finish.ABORT
    assert [message.id for message in prefill.told] == [number]


def test_a_prompt_that_goes_on_behind_its_output_has_one_more_token(prefill: Replica) -> None:
    written = (Written(np.array([5, 6, 7], np.int32).tobytes()),)
    number, message = handed(prefill, written=written, max_tokens=8)
    assert len(prefill.seen(number).tokens) == 1
    assert message.transfer is not None
    assert len(message.transfer.places) // 4 == (len(PROMPT) + 3) // 4


def test_it_is_told_before_its_blocks_are_copied(prefill: Replica, decode: Replica) -> None:
    """The other replica's executors wait for each of them."""
    number = prefill.begin()
    prefill.step()
    prefill.deliver()
    (message,) = prefill.told
    assert message.transfer is not None
    assert prefill.stand().held == FULL
    other = go_on(decode, prefill, number, message)
    assert decode.plan() is None
    theirs, random = decode.executor.host, Random(0)
    theirs.take(decode.scheduler, random)
    for _ in range(20):
        assert theirs.say(decode.scheduler, decode.now, random)
    assert theirs.copies, "it has not answered"
    prefill.settle()
    decode.settle()
    assert prefill.seen(number).tokens + decode.seen(other).tokens == outputs(prefill, number)
    assert (decode.stand().fetches, decode.stand().stale) == (1, 0)


def test_blocks_are_given_to_nobody_before_they_are_copied(prefill: Replica) -> None:
    prefill.begin()
    prefill.step()
    pool = prefill.scheduler.statistics().pool
    assert pool.held == FULL
    assert prefill.scheduler.check(thorough=True).ok
    prefill.copy()
    assert prefill.scheduler.statistics().pool.held == 0


def test_copies_end_where_the_device_has_more_than_the_hosts_memory() -> None:
    """What has been copied is among the next to go, whoever has been told of its copy."""
    made = Replica(ReplicaRole.PREFILL, replace(WORLD, blocks=14, host_blocks=6))
    host, random = made.executor.host, Random(0)
    for token in (5, 6, 7):
        number = made.begin([token] * 15)
        made.step()
        made.deliver()
        made.scheduler.release_transfer(number)
        turns = 0
        while host.take(made.scheduler, random) or host.say(made.scheduler, made.now, random):
            turns += 1
            assert turns < 50, "it copies in circles"
    assert made.scheduler.settled


def test_a_block_that_a_step_in_flight_fills_is_told_by_nobody(prefill: Replica) -> None:
    """Another sequence may compute anew what has been evicted."""
    prefill.begin()
    assert prefill.plan() is not None
    state = prefill.scheduler._state
    host = state.kv.host
    assert host is not None
    host.written[state.slots.sequences[0].blocks[2]] += 1  # type: ignore[union-attr]
    prefill.apply()
    transfer = prefill.told[0].transfer
    assert transfer is not None
    assert len(transfer.places) // 4 == 2


def test_a_frozen_replica_copies_nothing_more(prefill: Replica) -> None:
    """Its weights are about to change: what is not there is computed by the other one."""
    number = prefill.begin()
    assert prefill.plan() is not None
    prefill.scheduler.freeze(frozen=True)
    prefill.apply()
    assert [(message.id, message.transfer) for message in prefill.told] == [(number, None)]
    assert prefill.scheduler.settled


def test_addresses_of_the_executors_go_along_to_those_that_read(prefill: Replica, decode: Replica) -> None:
    """Of the executors that are there now: others have other memory."""
    first, second = (BlocksAddress(name, "cpu", 64, 60, 1, 2) for name in (b"first", b"second"))
    prefill.scheduler.restart(8, prefill.now, addresses=(first,))
    prefill.executor = prefill.new_executor(8)
    assert handed(prefill)[1].transfer.addresses == (first,)  # type: ignore[union-attr]
    prefill.scheduler.restart(9, prefill.now, addresses=(second,))
    prefill.executor = decode.executor.host.others[3] = prefill.new_executor(9)  # type: ignore[assignment]
    number, message = handed(prefill, prompt=PROMPT[::-1])
    go_on(decode, prefill, number, message)
    decode.plan()
    (asked,) = decode.scheduler.copy_messages()
    assert isinstance(asked, CopyBlocks)
    assert (asked.replica, asked.addresses) == (3, (second,))


def test_lost_executors_take_their_blocks_along(prefill: Replica) -> None:
    handed(prefill)
    number = prefill.begin(PROMPT[::-1])
    prefill.step()
    prefill.scheduler.restart(9, prefill.now)
    prefill.executor = prefill.new_executor(9)
    prefill.deliver()
    assert [message.id for message in prefill.told[1:]] == [number]
    assert (prefill.stand().held, prefill.holds()) == (0, 0)
    assert prefill.scheduler.check(thorough=True).ok


def test_a_tokenizer_that_is_gone_leaves_nothing(prefill: Replica) -> None:
    handed(prefill)
    prefill.begin(PROMPT[::-1])
    prefill.step()
    prefill.scheduler.forget(0)
    prefill.copy()
    assert prefill.holds() == 0
    assert prefill.scheduler.undelivered() == ()


def test_rows_come_before_the_message(prefill: Replica) -> None:
    prefill.begin()
    prefill.scheduler.outputs(0)
    plan = prefill.plan()
    assert plan is not None
    prefill.scheduler.apply(prefill.results.popleft(), 0.0)
    prefill.executor.applied(plan.step)
    prefill.copy()
    kinds = [type(message) for message in prefill.scheduler.outputs(0)]
    assert kinds == [TokenBatch, Prefilled]


def test_long_prompts_are_copied_while_they_are_computed() -> None:
    made = Replica(ReplicaRole.PREFILL, replace(WORLD, budget=8, depth=1))
    made.begin()
    for blocks in (2, 4):
        made.step()
        found = made.scheduler.copy_messages()
        assert sum(len(message.blocks) // 8 for message in found) == blocks
        assert all(message.to_host and message.replica == OWN_MEMORY for message in found)
    assert made.scheduler.unfinished == 1


def test_an_idle_replica_hands_over_at_once(prefill: Replica) -> None:
    """No further step is needed to know that the last one's blocks are full."""
    prefill.begin()
    prefill.step()
    prefill.copy()
    prefill.deliver()
    assert len(prefill.told) == 1


def test_what_was_stale_is_fetched_for_no_choice_again(prefill: Replica, decode: Replica) -> None:
    number, message = handed(prefill, n=2)
    prefill.executor.host.stamps[0] += 1
    written = tuple(Written(np.array(prefill.seen(number, at).tokens, np.int32).tobytes()) for at in (0, 1))
    decode.begin(prefill=False, transfer=message.transfer, written=written, n=2, seed=number)
    decode.settle()
    assert decode.stand().stale == 1


def test_choices_have_the_prompt_in_common_and_no_more(prefill: Replica) -> None:
    written = tuple(Written(np.array([at, at, at], np.int32).tobytes()) for at in (5, 6))
    _, message = handed(prefill, written=written, n=2, max_tokens=8)
    assert message.transfer is not None
    assert len(message.transfer.places) // 4 == FULL
