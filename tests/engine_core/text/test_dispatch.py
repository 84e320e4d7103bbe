"""Requests and schedulers: each request is with one of them; it moves with all that was written, and nothing twice."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.engine_core.placement.placement import Placement
from penstock.engine_core.text.dispatch import Dispatch, DispatchStatistics
from penstock.engine_core.text.frontend import Frontend
from penstock.protocol import messages
from penstock.protocol.columns import pack, unpack
from penstock.protocol.control import EngineStatus
from penstock.protocol.messages import (
    Abort,
    Finish,
    KVTransfer,
    Pooling,
    Prefilled,
    Rejected,
    ReleaseTransfer,
    Sampling,
    StopHit,
    SubmitTokens,
    Written,
)
from penstock.protocol.outputs import TokenExtra
from tests.engine_core.text.streams import STATUS, Client, batch, make_frontend, submit
from tests.engine_core.tokenizer.vocabularies import tokenizer
from tests.sim.images import Illustrated
from tests.sim.server import ROOMY, Server

TEXT = "one two three, größe 你好 😀 four"
IDS = tokenizer("byte_level").encode(TEXT).ids


def status(replica: int, **fields: Any) -> EngineStatus:
    return msgspec.structs.replace(STATUS, replica=replica, **fields)


def statistics(frontend: Frontend) -> DispatchStatistics:
    return frontend.statistics().dispatch


def where(frontend: Frontend, request: int = 1) -> int:
    """The replica whose scheduler is being told of a request."""
    (found,) = [
        replica
        for replica, upward in enumerate(frontend.upward)
        if any(isinstance(message, SubmitTokens) and message.id == request for message in upward)
    ]
    return found


def begun(frontend: Frontend, request: int = 1, **fields: Any) -> int:
    """Submit a request and have its message taken; the replica that has it."""
    submit(frontend, request, **fields)
    found = where(frontend, request)
    frontend.upward[found].clear()
    return found


@pytest.fixture
def frontend() -> Frontend:
    return make_frontend(replicas=2)


@pytest.fixture
def client(frontend: Frontend) -> Client:
    return Client(frontend)


def test_the_ids_decide(frontend: Frontend) -> None:
    prompt = pack("i", IDS * 8)
    first = begun(frontend, 1, prompt_ids=prompt)
    frontend.batch(batch((1, 0, IDS, Finish.LENGTH)), first)
    second = begun(frontend, 2)
    assert second != first
    assert begun(frontend, 3, prompt_ids=prompt + pack("i", IDS)) == first
    assert statistics(frontend).placement.expected > 0


def test_a_cache_salt_keeps_prompts_apart_and_vectors_of_whole_prompts_share_nothing(frontend: Frontend) -> None:
    prompt = pack("i", IDS * 8)
    begun(frontend, 1, prompt_ids=prompt, cache_salt="a")
    begun(frontend, 2, prompt_ids=prompt, cache_salt="b")
    begun(frontend, 3, prompt_ids=prompt, pooling=Pooling(kind="mean"))
    assert statistics(frontend).placement.expected == 0


def test_prompts_with_images_have_the_identities_that_schedulers_give_them() -> None:
    made = Server(replace(ROOMY, encoder_rows=32))
    found = Illustrated([3, 4, 5], ()).with_picture(1, 6, lines=True).with_picture(2, 3, lines=True)
    number = made.submit(found.tokens, images=found.images)
    made.step()
    request = made.scheduler._state.requests[number]
    dispatch = Dispatch(Placement("prefix", 2, ROOMY.block_size))
    chain = dispatch.chain(request.message)
    assert chain == request.sequences[0].block_hashes
    assert dispatch.chain(msgspec.structs.replace(request.message, images=()))[0] != chain[0]


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_blocks_are_named_where_they_matter_alone(policy: str) -> None:
    for frontend in (make_frontend(replicas=2, policy=policy), make_frontend(replicas=1)):
        begun(frontend, 1, prompt_ids=pack("i", IDS * 8))
        frontend.batch(batch((1, 0, IDS, Finish.LENGTH)))
        assert [len(replica.shadow) for replica in frontend._dispatch._placement.replicas] == [0] * len(frontend.upward)


def test_rows_of_a_replica_are_its_requests_alone(frontend: Frontend, client: Client) -> None:
    first = begun(frontend)
    frontend.batch(batch((1, 0, IDS[:2], Finish.NONE)), 1 - first)
    frontend.batch(batch((1, 0, IDS, Finish.LENGTH)), first)
    client.take()
    assert client.answer().token_ids == IDS


def test_a_lost_schedulers_requests_go_on_elsewhere_at_once(frontend: Frontend, client: Client) -> None:
    owner = messages.Client("tenant", "name")
    first = begun(frontend, n=2, stop=("three",), client=owner)
    frontend.batch(batch((1, 0, IDS[:3], Finish.NONE), (1, 1, IDS, Finish.NONE)), first)
    client.take()
    frontend.leave_scheduler(first)
    (message,) = frontend.upward[1 - first]
    ended = client.answer(1, 1)
    assert isinstance(message, SubmitTokens)
    assert message.client == owner
    assert message.written == (Written(pack("i", IDS[:3])), Written(pack("i", ended.token_ids), ended=True))
    assert not frontend.upward[first]
    frontend.batch(batch((1, 0, IDS[3:], Finish.LENGTH)), 1 - first)
    client.take()
    assert client.answer(1, 0).text == ended.text == TEXT[: TEXT.index("three")]
    found = statistics(frontend)
    assert (found.moved, found.held) == (1, 0)


def test_an_abort_and_a_stop_go_to_who_has_the_request(frontend: Frontend) -> None:
    places = [begun(frontend, number, stop=("three",)) for number in (1, 2)]
    assert sorted(places) == [0, 1]
    frontend.abort(1)
    frontend.batch(batch((2, 0, IDS, Finish.NONE)), places[1])
    assert list(frontend.upward[places[0]]) == [Abort(1)]
    assert [type(message) for message in frontend.upward[places[1]]] == [StopHit]


def test_requests_leave_a_group_that_starts_again(frontend: Frontend, client: Client) -> None:
    first = begun(frontend, sampling=Sampling(seed=7))
    other = 1 - first
    frontend.batch(batch((1, 0, IDS[:3], Finish.NONE)), first)
    frontend.report(status(first, ready=False))
    assert list(frontend.upward[first]) == [Abort(1)]
    (message,) = frontend.upward[other]
    assert isinstance(message, SubmitTokens)
    assert (message.written, message.sampling.seed) == ((Written(pack("i", IDS[:3])),), 7)
    frontend.batch(batch((1, 0, IDS[3:5], Finish.NONE)), first)  # was on its way
    frontend.batch(batch((1, 0, IDS[3:], Finish.LENGTH)), other)
    frontend.batch(batch((1, 0, [], Finish.ABORT)), first)
    client.take()
    assert (client.answer().token_ids, client.answer().finish) == (IDS, Finish.LENGTH)
    assert frontend.statistics().requests == 0


def test_without_another_replica_they_stay() -> None:
    frontend = make_frontend()
    begun(frontend)
    frontend.report(status(0, ready=False))
    assert not frontend.upward[0]
    submit(frontend, 2)
    assert where(frontend, 2) == 0
    both = make_frontend(replicas=2)
    first = begun(both)
    for replica in (1 - first, first):
        both.report(status(replica, ready=False))
    assert not any(both.upward)
    both.report(status(1 - first))
    assert where(both) == 1 - first, "who is ready first has them"


def test_who_drains_keeps_what_it_runs(frontend: Frontend) -> None:
    first = begun(frontend)
    frontend.report(status(first, ready=False, draining=True))
    assert not any(frontend.upward)
    assert begun(frontend, 2) == begun(frontend, 3) == 1 - first


def test_what_executors_may_die_of_is_not_handed_round(frontend: Frontend) -> None:
    first = begun(frontend)
    frontend.report(status(first, ready=False))
    frontend.report(status(first, epoch=2))
    frontend.batch(batch((1, 0, IDS[:2], Finish.ABORT)), first)
    for upward in frontend.upward:
        upward.clear()
    frontend.batch(batch((1, 0, IDS[:2], Finish.NONE)), 1 - first)
    frontend.report(status(1 - first, ready=False))
    assert not any(frontend.upward), "it is tried where it is"
    frontend.report(status(1 - first, ready=False))
    assert statistics(frontend).moved == 1


def test_who_got_further_moves_again_once_its_former_life_is_over(frontend: Frontend) -> None:
    first = begun(frontend)
    frontend.report(status(first, ready=False))
    frontend.report(status(first, epoch=2))
    for upward in frontend.upward:
        upward.clear()
    frontend.batch(batch((1, 0, IDS[:4], Finish.NONE)), 1 - first)
    frontend.report(status(1 - first, ready=False))
    assert not any(frontend.upward), "the first has not said that it is over there"
    frontend.batch(batch((1, 0, IDS[:2], Finish.ABORT)), first)
    frontend.report(status(1 - first, ready=False))
    assert where(frontend) == first
    (message,) = frontend.upward[first]
    assert isinstance(message, SubmitTokens)
    assert message.written == (Written(pack("i", IDS[:4])),)


def test_a_full_queue_is_another_ones_chance(frontend: Frontend, client: Client) -> None:
    first = begun(frontend)
    full = Rejected(id=1, status=429, message="full", retry_after=2.0)
    frontend.reject(full, first)
    assert where(frontend) == 1 - first
    client.take()
    assert not client.rejected
    frontend.reject(full, 1 - first)
    client.take()
    assert list(client.rejected) == [1]
    assert frontend.statistics().requests == 0


def test_a_wrong_request_is_wrong_everywhere(frontend: Frontend, client: Client) -> None:
    first = begun(frontend)
    frontend.reject(Rejected(id=1, status=400, message="no"), first)
    client.take()
    assert client.rejected
    assert not any(frontend.upward)


def test_who_refuses_whatever_comes_is_left_alone_until_it_is_ready(frontend: Frontend) -> None:
    first = begun(frontend)
    frontend.reject(Rejected(id=1, status=503, message="the server is shutting down"), first)
    assert where(frontend) == 1 - first
    assert [begun(frontend, number) for number in (2, 3)] == [1 - first] * 2
    frontend.leave_scheduler(1 - first)
    assert statistics(frontend).held == 3
    frontend.report(status(first))
    assert statistics(frontend).held == 0


def test_an_abort_ends_what_a_lost_scheduler_had(frontend: Frontend, client: Client) -> None:
    first = begun(frontend)
    frontend.abort(1)
    frontend.report(status(first, ready=False))
    client.take()
    assert client.answer().finish == Finish.ABORT
    assert not frontend.upward[1 - first]


def test_apis_hear_of_every_replica(frontend: Frontend, client: Client) -> None:
    frontend.report(status(0, running=3))
    frontend.report(status(1, running=4))
    frontend.report(status(0, running=5))
    client.take()
    assert client.others == [status(0, running=5), status(1, running=4)]
    frontend.join_api(2)
    assert frontend.outbox(2).next() == status(0, running=5)


def test_what_comes_with_a_first_token_is_told_once(frontend: Frontend, client: Client) -> None:
    first = begun(frontend)
    frontend.batch(batch((1, 0, IDS[:1], Finish.NONE), extras=[TokenExtra(row=0, cached_tokens=16)]), first)
    frontend.leave_scheduler(first)
    frontend.batch(batch((1, 0, IDS[1:], Finish.LENGTH)), 1 - first)
    client.take()
    extras = client.answer().extras
    assert [extra.cached_tokens for extra in extras if extra.cached_tokens is not None] == [16]
    assert [extra.prompt_tokens for extra in extras if extra.prompt_tokens is not None] != []


class Life:
    """Replicas that run, lose executors and die at random; each writes the tokens that come next, whoever runs it."""

    def __init__(self, seed: int, replicas: int) -> None:
        self.chance = random.Random(seed)
        self.frontend = make_frontend(replicas=replicas)
        self.client = Client(self.frontend)
        self.running: list[dict[int, list[list[int] | None]]] = [{} for _ in range(replicas)]  # by request: of choices
        self.ready = [True] * replicas
        self.epochs = [1] * replicas
        self.asked: dict[int, int] = {}  # choices by request

    def deliver(self, replica: int) -> None:
        for message in self.frontend.upward[replica]:
            match message:
                case SubmitTokens(id=request):
                    assert request not in self.running[replica], "one life at a time"
                    written = message.written or (Written(),) * message.n
                    self.running[replica][request] = [
                        None if each.ended else unpack("i", each.token_ids) for each in written
                    ]
                case Abort(id=request):
                    choices = self.running[replica].pop(request, [])
                    running = [index for index, tokens in enumerate(choices) if tokens is not None]
                    if rows := [(request, index, IDS[:0], Finish.ABORT) for index in running]:
                        self.frontend.batch(batch(*rows), replica)
        self.frontend.upward[replica].clear()

    def step(self, replica: int) -> None:
        rows = []
        for request, choices in list(self.running[replica].items()):
            for index, tokens in enumerate(choices):
                if tokens is None or self.chance.random() < 0.3:
                    continue
                more = IDS[len(tokens) : len(tokens) + self.chance.randint(1, 2)]
                tokens += more
                done = len(tokens) == len(IDS)
                rows.append((request, index, more, Finish.LENGTH if done else Finish.NONE))
                if done:
                    choices[index] = None
            if not any(tokens is not None for tokens in choices):
                del self.running[replica][request]
        if rows:
            self.frontend.batch(batch(*rows), replica)

    def status(self, replica: int) -> None:
        self.frontend.report(status(replica, ready=self.ready[replica], epoch=self.epochs[replica]))

    def die(self, replica: int) -> None:
        """The scheduler ends, and with it what stands on its links."""
        self.running[replica] = {}
        self.ready[replica] = False
        self.frontend.leave_scheduler(replica)

    def turn(self) -> None:
        replica = self.chance.randrange(len(self.ready))
        match self.chance.choice(["submit", "deliver", "deliver", "step", "step", "status", "lose", "back", "die"]):
            case "submit" if len(self.asked) < 30:
                number = len(self.asked) + 1
                self.asked[number] = self.chance.choice((1, 1, 3))
                submit(self.frontend, number, n=self.asked[number], stream=self.chance.random() < 0.5)
            case "deliver":
                self.deliver(replica)
            case "step" if self.ready[replica]:
                self.step(replica)
            case "status":
                self.status(replica)
            case "lose":
                self.ready[replica] = False
                self.status(replica)
            case "back":
                self.ready[replica], self.epochs[replica] = True, self.epochs[replica] + 1
                self.status(replica)
            case "die" if self.chance.random() < 0.3:
                self.die(replica)
        if self.chance.random() < 0.5:
            self.client.take()


@pytest.mark.sweep
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("seed", range(15))
def test_every_choice_has_every_token_once_whatever_dies(seed: int, replicas: int) -> None:
    life = Life(seed, replicas)
    for _ in range(400):
        life.turn()
    for replica in range(replicas):
        life.ready[replica] = True
        life.status(replica)
    for _ in range(200):
        for replica in range(replicas):
            life.deliver(replica)
            life.step(replica)
            life.status(replica)
        life.client.take()
        if life.frontend.idle():
            break
    assert life.asked
    for request, choices in life.asked.items():
        for index in range(choices):
            answer = life.client.answer(request, index)
            assert (answer.token_ids, answer.finish) == (IDS, Finish.LENGTH), (request, index)
    found = statistics(life.frontend)
    assert life.frontend.idle()
    assert [replica.load for replica in life.frontend._dispatch._placement.replicas] == [0] * replicas
    assert (found.held, found.upward) == (0, 0)


TRANSFER = KVTransfer(0, "0", pack("i", [3]), pack("q", [9]))


@pytest.fixture
def apart() -> Frontend:
    """Replica 0 computes prompts, 1 and 2 decode."""
    return make_frontend(replicas=3, prefill=1)


def handed(frontend: Frontend, request: int = 1, **fields: Any) -> int:
    """A request whose prompt has been computed; which replica decodes it."""
    assert begun(frontend, request, **fields) == 0
    frontend.batch(batch((request, 0, IDS[:1], Finish.NONE)), 0)
    frontend.prefilled(Prefilled(request, TRANSFER), 0)
    return where(frontend, request)


def test_a_request_goes_on_elsewhere_behind_its_prompt(apart: Frontend) -> None:
    submit(apart)
    (message,) = apart.upward[0]
    assert isinstance(message, SubmitTokens)
    assert (message.prefill, message.transfer) == (True, None)
    apart.upward[0].clear()
    apart.batch(batch((1, 0, IDS[:1], Finish.NONE)), 0)
    client = Client(apart)
    client.take()
    assert client.answer().token_ids == IDS[:1], "the client has it at once"
    apart.prefilled(Prefilled(1, TRANSFER), 0)
    number = where(apart)
    (message,) = apart.upward[number]
    assert isinstance(message, SubmitTokens)
    assert (message.prefill, message.transfer) == (False, TRANSFER)
    assert message.written == (Written(pack("i", IDS[:1])),)
    assert not apart.upward[0], "the blocks are held until they have been read"
    apart.batch(batch((1, 0, IDS[1:], Finish.LENGTH)), number)
    assert list(apart.upward[0]) == [ReleaseTransfer(1)]
    client.take()
    assert (client.answer().token_ids, client.answer().finish) == (IDS, Finish.LENGTH)
    assert statistics(apart).handed_over == 1
    assert [replica.load for replica in apart._dispatch._placement.replicas] == [0, 0, 0]


def test_blocks_are_released_by_the_first_row_and_once(apart: Frontend) -> None:
    number = handed(apart)
    apart.batch(batch((1, 0, IDS[1:2], Finish.NONE)), number)
    apart.batch(batch((1, 0, IDS[2:3], Finish.NONE)), number)
    assert list(apart.upward[0]) == [ReleaseTransfer(1)]


def test_a_stop_string_or_an_abort_ends_it_before_it_goes_on(apart: Frontend) -> None:
    client = Client(apart)
    begun(apart, stop=("one",))
    apart.batch(batch((1, 0, IDS[:2], Finish.NONE)), 0)
    begun(apart, 2)
    apart.batch(batch((2, 0, IDS[:1], Finish.NONE)), 0)
    apart.abort(2)
    apart.upward[0].clear()
    for request in (1, 2):
        apart.prefilled(Prefilled(request, TRANSFER), 0)
    assert list(apart.upward[0]) == [ReleaseTransfer(1), ReleaseTransfer(2)]
    assert not any(apart.upward[1:])
    client.take()
    assert [client.answer(request).finish for request in (1, 2)] == [Finish.STOP, Finish.ABORT]
    assert apart.statistics().requests == 0


def test_who_decodes_dies_and_the_blocks_are_there_for_the_next_one(apart: Frontend) -> None:
    number = handed(apart)
    apart.leave_scheduler(number)
    (message,) = apart.upward[3 - number]
    assert isinstance(message, SubmitTokens)
    assert message.transfer == TRANSFER
    apart.batch(batch((1, 0, IDS[1:3], Finish.NONE)), 3 - number)
    apart.upward[0].clear()
    apart.leave_scheduler(3 - number)
    (message,) = apart.upward[0]
    assert isinstance(message, SubmitTokens)
    assert (message.prefill, message.transfer) == (False, None), "nobody decodes: it is computed to its end"


def test_what_it_has_written_is_computed_apart_as_well(apart: Frontend) -> None:
    number = handed(apart)
    apart.batch(batch((1, 0, IDS[1:3], Finish.NONE)), number)
    apart.upward[0].clear()
    apart.leave_scheduler(number)
    (message,) = apart.upward[0]
    assert isinstance(message, SubmitTokens)
    assert (message.prefill, message.written) == (True, (Written(pack("i", IDS[:3])),))


def test_blocks_of_a_request_that_is_elsewhere_are_not_wanted(apart: Frontend) -> None:
    begun(apart)
    apart.report(status(0, ready=False))
    apart.upward[0].clear()
    apart.prefilled(Prefilled(1, TRANSFER), 0)
    apart.prefilled(Prefilled(99, TRANSFER), 0)
    apart.prefilled(Prefilled(98), 0)
    assert list(apart.upward[0]) == [ReleaseTransfer(1), ReleaseTransfer(99)]
    assert statistics(apart).handed_over == 0


def test_nothing_waits_for_a_scheduler_that_is_gone(apart: Frontend) -> None:
    number = handed(apart)
    apart.leave_scheduler(0)
    apart.batch(batch((1, 0, IDS[1:], Finish.LENGTH)), number)
    assert not apart.upward[0]


def test_vectors_are_not_handed_on(apart: Frontend) -> None:
    submit(apart, pooling=Pooling(kind="last"), sampling=Sampling(max_tokens=1))
    (message,) = apart.upward[0]
    assert isinstance(message, SubmitTokens)
    assert not message.prefill
