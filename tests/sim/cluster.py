"""Replicas with roles behind one tokenizer: schedulers, fake executors that read one another's memory, the frontend
that has the requests, and a virtual clock. Executors, schedulers and mappings of memory come and go at any moment."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from dataclasses import replace as replace_fields

import msgspec

from penstock.engine_core.placement.placement import Placement
from penstock.engine_core.scheduling.lifecycle import KILLER
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.text.frontend import Frontend
from penstock.engine_core.text.prompts import Prepared, Prompter, PromptLimits
from penstock.engine_core.text.template import ChatTemplate
from penstock.protocol.groups import ReplicaRole
from penstock.protocol.message import Message
from penstock.protocol.messages import (
    Abort,
    Finish,
    Prefilled,
    Rejected,
    ReleaseTransfer,
    StopHit,
    SubmitText,
    SubmitTokens,
)
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import choice_seed
from tests.engine_core.text.streams import API, STATUS, Client
from tests.engine_core.tokenizer.vocabularies import CHAT_TEMPLATE, vocabulary
from tests.sim.executor import FakeExecutor
from tests.sim.grammar import FakeGuide
from tests.sim.idle import is_idle
from tests.sim.lives import Life, World, scheduling_options
from tests.sim.model import rollout
from tests.sim.simulation import Simulation

SOURCE = 1


@dataclass(frozen=True, slots=True)
class Chances:
    """Of what happens in one turn."""

    executor_dies: float = 0.0
    scheduler_dies: float = 0.0
    mapping: float = 0.5  # an executor looks for the memory of others
    report: float = 0.3
    deliver: float = 0.5  # a message goes from the tokenizer to a scheduler


class Replica(Simulation):
    """One of them. Its lives are the cluster's to begin and to end."""

    def __init__(self, world: World, number: int, prefill: int, rng: random.Random, lives: list[Life]) -> None:
        super().__init__(world, [], rng)
        self.number, self.epoch = number, 1
        self.role = ReplicaRole.PREFILL if number < prefill else ReplicaRole.DECODE
        self.natures = {life.message.sampling.seed: life.nature for life in lives}
        self.up = True  # its executors are there
        self.executor = FakeExecutor(world, 1, self.natures)
        self.scheduler = self.new_scheduler()

    def new_scheduler(self) -> Scheduler:
        options = msgspec.structs.replace(
            scheduling_options(self.world), epoch=self.epoch, role=self.role, replica=self.number
        )
        return Scheduler(options)

    def _interfere(self) -> None:
        pass

    def work(self) -> bool:
        return self.up and self._step()

    def lose_executors(self) -> None:
        """They are gone, and with them what only they map."""
        self.up = False
        self.stale += self.results
        self.results.clear()
        self.desk.clear()

    def find_executors(self) -> None:
        self.up, self.epoch = True, self.epoch + 1
        self.executor = FakeExecutor(self.world, self.epoch, self.natures)
        self.scheduler.restart(self.epoch, self.clock.now)

    def lose_scheduler(self) -> None:
        """Another one takes its place. Executors go on, and so does their memory, with what stands there."""
        self.results.clear()
        self.stale.clear()
        self.desk.clear()
        self.epoch += 10
        before, self.executor = self.executor, FakeExecutor(self.world, self.epoch, self.natures)
        self.executor.host.blocks, self.executor.host.stamps = before.host.blocks, before.host.stamps
        self.up = True
        self.scheduler = self.new_scheduler()


class Cluster:
    """One run."""

    def __init__(
        self, world: World, lives: list[Life], rng: random.Random, *, replicas: int, prefill: int, most_local: int = 0,
        chances: Chances | None = None,
    ) -> None:  # fmt: skip
        self.world, self.lives, self.rng, self.chances = world, lives, rng, chances or Chances()
        self.replicas = [Replica(world, number, prefill, rng, lives) for number in range(replicas)]
        found = vocabulary("byte_level")
        template = ChatTemplate({"default": CHAT_TEMPLATE}, found.names)
        placement = Placement("prefix", replicas, world.block_size, prefill, most_local)
        limits = PromptLimits(found.size, world.max_model_len, ())
        self.frontend = Frontend(found, Prompter(found, template, limits), placement)
        self.frontend.join_api(API)
        self.client = Client(self.frontend)
        self.by_id = {life.message.id: life for life in lives}
        self.aborted: set[int] = set()
        self.deaths = 0
        self.stale = self.fetched = 0  # of schedulers that are gone
        for replica in self.replicas:
            self.report(replica)

    def run(self) -> None:
        """Until every life is over; then nothing may be left anywhere."""
        coming, turns = deque(self.lives), 0
        while coming or not self.frontend.idle() or any(replica.scheduler.unfinished for replica in self.replicas):
            turns += 1
            assert turns < 100_000, "it does not end"
            if coming and self.rng.random() < 0.3:
                self.begin(coming.popleft())
            quiet = not coming and self.rng.random() < 0.9  # who dies all the time gets nowhere
            self.turn(self.rng.choice(self.replicas), quiet=quiet)
        for replica in self.replicas:
            if not replica.up:
                replica.find_executors()
            while not replica.scheduler.settled:
                replica.work()
        self.close()

    def begin(self, life: Life) -> None:
        message = life.message
        text = SubmitText(
            id=message.id, prompt_ids=message.token_ids, sampling=message.sampling, n=message.n, detokenize=False,
            stream=self.rng.random() < 0.5, speculate=message.speculate, priority=message.priority,
            cache_salt=message.cache_salt, client=message.client,
        )  # fmt: skip
        self.frontend.open(API, text)
        made = self.frontend.make(text, 0.0)
        assert isinstance(made, Prepared), made
        request = msgspec.structs.replace(
            made.request, sampling=message.sampling, automaton=message.automaton, prediction=message.prediction,
            images=message.images, stop_strings=False,
        )  # fmt: skip
        self.frontend.close(message.id, msgspec.structs.replace(made, request=request))

    def turn(self, replica: Replica, *, quiet: bool) -> None:
        rng, chances = self.rng, self.chances
        seconds = rng.random() * 0.01
        for each in self.replicas:
            each.clock.advance(seconds)
        if rng.random() < chances.deliver:
            self.deliver(replica)
        replica.work()
        self.outputs(replica)
        replica.scheduler.expire(replica.clock.now)
        if rng.random() < chances.mapping:
            self.map(replica)
        if not replica.up and rng.random() < 0.1:
            replica.find_executors()
            self.report(replica)
        if rng.random() < chances.report:
            self.report(replica)
        if not quiet and replica.up and rng.random() < chances.executor_dies:
            self.deaths += 1
            replica.lose_executors()
        if not quiet and rng.random() < chances.scheduler_dies:
            self.count(replica)
            replica.lose_scheduler()
            self.frontend.leave_scheduler(replica.number)
            self.report(replica)
        if rng.random() < 0.02:
            self.abort()
        self.client.take(rng.choice((1, 100)))

    def count(self, replica: Replica) -> None:
        found = replica.scheduler.statistics().transfers
        self.stale, self.fetched = self.stale + found.stale, self.fetched + found.fetches

    def abort(self) -> None:
        open_ = [life for life in self.lives if life.abort_after is not None and life.message.id not in self.aborted]
        if open_ and self.frontend.wants(number := self.rng.choice(open_).message.id):
            self.aborted.add(number)
            self.frontend.abort(number)

    def deliver(self, replica: Replica) -> None:
        """Some of what the tokenizer has for its scheduler, in order."""
        upward = self.frontend.upward[replica.number]
        for _ in range(min(len(upward), self.rng.choice((1, 5)))):
            self.take(replica, upward.popleft())

    def take(self, replica: Replica, message: Message) -> None:
        scheduler, now = replica.scheduler, replica.clock.now
        match message:
            case SubmitTokens():
                guide = None if message.automaton is None else FakeGuide(message.automaton)
                scheduler.submit(message, SOURCE, now, guide)
            case Abort(id=number):
                scheduler.abort(number)
            case StopHit():
                scheduler.stop_hit(message)
            case ReleaseTransfer(id=number):
                scheduler.release_transfer(number)
            case _:
                raise AssertionError(message)

    def outputs(self, replica: Replica) -> None:
        for source in replica.scheduler.undelivered():
            assert source == SOURCE
            for message in replica.scheduler.outputs(source, self.rng.choice((1, 2, 100))):
                match message:
                    case TokenBatch():
                        self.frontend.batch(message, replica.number)
                    case Prefilled():
                        self.frontend.prefilled(message, replica.number)
                    case Rejected():
                        self.frontend.reject(message, replica.number)

    def map(self, replica: Replica) -> None:
        """Its executors see what memory prefill replicas have now."""
        others = replica.executor.host.others
        others.clear()
        if replica.role is ReplicaRole.DECODE:
            found = [other for other in self.replicas if other.role is ReplicaRole.PREFILL and other.up]
            others.update({other.number: other.executor.host for other in found})

    def report(self, replica: Replica) -> None:
        running, waiting = replica.scheduler.counts
        self.frontend.report(
            msgspec.structs.replace(
                STATUS, replica=replica.number, epoch=replica.epoch, ready=replica.up, running=running,
                waiting=waiting, blocks=self.world.blocks, block_size=self.world.block_size,
            )
        )  # fmt: skip

    def close(self) -> None:
        for replica in self.replicas:
            while self.frontend.upward[replica.number]:
                self.deliver(replica)
            self.outputs(replica)
            self.count(replica)
            replica._check()
            assert is_idle(replica.scheduler), replica.number
            assert replica.scheduler.statistics().pool.held == 0
        self.client.take()
        for life in self.lives:
            self.verify(life)

    def verify(self, life: Life) -> None:
        message = life.message
        assert message.id not in self.client.rejected, self.client.rejected[message.id]
        for index in range(message.n):
            answer = self.client.answer(message.id, index)
            guide = None if message.automaton is None else FakeGuide(message.automaton)
            seed = choice_seed(message.sampling.seed, index)
            tokens, finish = rollout(life.prompt, message.sampling, seed, life.nature, self.world.max_model_len, guide)
            error = next((extra.error for extra in answer.extras if extra.error), None)
            if answer.finish == finish:
                assert answer.token_ids == tokens
            elif error == KILLER:
                assert self.deaths > 2, "it killed nobody"
            else:
                assert answer.finish == Finish.ABORT, (answer.finish, finish)
                assert message.id in self.aborted
                assert answer.token_ids == tokens[: len(answer.token_ids)]
            cached = [extra.cached_tokens for extra in answer.extras if extra.cached_tokens is not None]
            assert len(cached) == bool(answer.token_ids or (answer.finish == Finish.ERROR and cached)), "told once"


def fitting(world: World, lives: list[Life]) -> list[Life]:
    """Those that a tokenizer hands on: of valid requests for text, which fit the model."""
    found = []
    for life in lives:
        most = life.message.sampling.max_tokens or 1
        if life.invalid or life.message.pooling is not None or life.message.written:
            continue
        sampling = msgspec.structs.replace(
            life.message.sampling, max_tokens=min(most, world.max_model_len - len(life.prompt))
        )
        found.append(replace_fields(life, message=msgspec.structs.replace(life.message, sampling=sampling)))
    return found
