"""Random lives of the scheduler process: whatever joins, leaves, stalls or restarts, each request ends exactly once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.engine_core.scheduling.executor_group import MISSING_LIMIT
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.protocol.links import Role
from penstock.protocol.messages import Abort, Finish, Rejected, Sampling, StopHit, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import StepPlan
from penstock.services.links.link import Peer
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop
from tests.services.scheduler.fakes import WINDOW, FakeExecutor, FakePort, without_grammars

ROUNDS = 400


class Lives:
    """One server's worth of chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.tokens, self.steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
        config = Config(
            model=ModelConfig(max_num_seqs=4, max_num_batched_tokens=48),
            scheduler=SchedulerConfig(overlap=bool(seed % 2), enable_prefix_caching=bool(seed % 3)),
        )
        self.loop = SchedulerLoop(config, ModelFacts(256, 4096), self.tokens, self.steps, *without_grammars(), self.now)
        self.executor: FakeExecutor | None = None
        self.plans: list[StepPlan] = []
        self.owners: dict[int, Peer] = {}  # of requests whose tokenizer is still there
        self.ends: dict[int, int] = {}
        self.begun: set[tuple[int, int]] = set()  # choices of which rows have come
        self.submitted = 0

    def submit(self) -> None:
        if not self.tokens.peers:
            return
        self.submitted += 1
        peer = self.chance.choice(self.tokens.peers)
        ids = np.arange(self.chance.randint(1, 60), dtype=np.int32) % self.chance.choice((1, 50))
        sampling = Sampling(max_tokens=self.chance.randint(1, 40))
        request = SubmitTokens(
            id=self.submitted, token_ids=ids.tobytes(), sampling=sampling, n=self.chance.choice((1, 1, 3))
        )
        self.owners[self.submitted] = peer
        self.ends[self.submitted] = -request.n
        self.tokens.arrives(peer, request)

    def interfere(self) -> None:
        """A client leaves, or a stop string is found in text that has come."""
        number = self.chance.randint(1, self.submitted + 1)
        if self.chance.random() < 0.5 and number in self.owners:
            self.tokens.arrives(self.owners[number], Abort(number))
        elif self.begun:
            number, choice = self.chance.choice(sorted(self.begun))
            if number in self.owners:
                self.tokens.arrives(self.owners[number], StopHit(number, choice, 1))

    def tokenizer(self) -> None:
        if len(self.tokens.peers) < 2:
            self.tokens.join(self.chance.randint(0, 9))
        else:
            gone = self.chance.choice(self.tokens.peers)
            self.tokens.leave(gone)
            self.owners = {number: peer for number, peer in self.owners.items() if peer is not gone}

    def restart(self) -> None:
        """The executor dies, stays away for a while, comes back empty; or joins, loads, says ready once more."""
        if self.executor is None:
            self.executor = FakeExecutor(self.steps)
        elif self.chance.random() < 0.5:
            self.executor.ready(blocks=self.chance.choice((16, 24)))
        else:
            self.steps.leave(self.executor.peer)
            self.executor = None
        self.plans.clear()

    def credit(self) -> None:
        for peer in self.tokens.peers:
            peer.credit = self.chance.choice((0, 1, WINDOW))

    def step(self) -> None:
        if self.executor is not None:
            self.plans += self.executor.collect()
            if self.plans:
                self.executor.answer(self.plans.pop(0))

    def iterate(self) -> None:
        self.now += self.chance.choice((0.001, 0.001, 0.3, MISSING_LIMIT if self.chance.random() < 0.02 else 0.01))
        due = self.loop.iterate(self.now, self.now)
        assert due <= self.now + 0.5
        for peer, message in self.tokens.sent:
            if isinstance(message, Rejected):
                self.end(peer, message.id, -self.ends[message.id])
            elif isinstance(message, TokenBatch):
                ids = np.frombuffer(message.ids, np.int64).tolist()
                choices = np.frombuffer(message.choices, np.uint16).tolist()
                for number, choice, finish in zip(ids, choices, message.finish, strict=True):
                    self.begun.add((number, choice))
                    assert self.ends[number] < 0, "nothing comes after the last end"
                    if finish != Finish.NONE:
                        self.end(peer, number, 1)
        self.tokens.sent.clear()

    def end(self, peer: Peer, number: int, choices: int) -> None:
        assert self.owners[number] is peer
        self.ends[number] += choices
        assert self.ends[number] <= 0

    def live(self) -> None:
        deeds = (self.step, self.submit, self.interfere, self.tokenizer, self.restart, self.credit)
        for _ in range(ROUNDS):
            self.chance.choices(deeds, weights=(20, 6, 2, 0.5, 0.5, 1))[0]()
            self.iterate()

    def settle(self) -> None:
        """Everything is well from now on: whoever waits is served."""
        if self.executor is not None:
            self.steps.leave(self.executor.peer)
        self.executor = FakeExecutor(self.steps)
        self.executor.ready(blocks=24)
        self.plans.clear()
        for _ in range(5000):
            for peer in self.tokens.peers:
                peer.credit = WINDOW
            self.iterate()
            if self.loop.drained:
                return
            self.step()
        raise AssertionError(f"{self.loop.unfinished} requests do not end")


@pytest.mark.parametrize("seed", range(40))
def test_each_request_ends_exactly_once(seed):
    lives = Lives(seed)
    lives.live()
    lives.settle()
    assert {number: lives.ends[number] for number in lives.owners} == dict.fromkeys(lives.owners, 0)
    assert lives.loop.unfinished == 0
    assert lives.loop.statistics().faults == 0
    status = lives.loop.status(lives.now, lives.now)
    assert status.blocks_free + status.blocks_idle == status.blocks == 24
    assert (status.running, status.waiting) == (0, 0)
