"""A scheduler and its fake executor, driven by hand: what the unit tests of single rules need."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace as replace_fields

import numpy as np
from msgspec.structs import replace

from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.images import Image
from penstock.protocol.messages import Automaton, Client, Pooling, Sampling, SubmitTokens, TraceContext, Written
from penstock.protocol.steps import StepPlan, StepResult
from tests.sim.adapters import adapter as named
from tests.sim.executor import FakeExecutor, ints
from tests.sim.grammar import FakeGuide
from tests.sim.idle import is_idle
from tests.sim.lives import Life, World, scheduling_options
from tests.sim.masks import MaskDesk
from tests.sim.model import EOS, VOCAB, Nature, root_of
from tests.sim.record import Record, Seen
from tests.sim.storage import Storage

ROOMY = World(blocks=256, block_size=4, slots=8, budget=64, max_model_len=64, depth=1)
NO_TRACE = TraceContext()


class Server:
    """Plans go to the executor at once; their results wait until `apply`."""

    def __init__(self, world: World = ROOMY, *, vocab_size: int = VOCAB, traced: bool = False) -> None:
        self.world = world
        self.now = 0.0  # the tests' to change
        self.scheduler = Scheduler(
            replace(scheduling_options(world), vocab_size=vocab_size, traced=traced, trace_tokens=4)
        )
        self.natures: dict[int, Nature] = {}
        self.storage = Storage(world.storage_trouble, world.kv_store)
        self.executor = self.new_executor(0)
        self.results: deque[StepResult] = deque()
        self.record = Record()
        self.desk = MaskDesk()
        self.lives: dict[int, Life] = {}

    def new_executor(self, epoch: int, blocks: int | None = None) -> FakeExecutor:
        world = self.world if blocks is None else replace_fields(self.world, blocks=blocks)
        return FakeExecutor(world, epoch, self.natures, self.storage)

    def submit(
        self,
        prompt: list[int],
        *,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        source: int = 0,
        fails_at: int = -1,
        period: int = 0,
        automaton: Automaton | None = None,
        pooling: Pooling | None = None,
        prediction: Sequence[int] = (),
        speculate: bool = True,
        stop_strings: bool = False,
        written: tuple[Written, ...] = (),
        max_tokens: int | None = 4,
        trace: TraceContext = NO_TRACE,
        adapter: str = "",
        images: tuple[Image, ...] = (),
        client: str = "",
        tenant: str = "",
        rid: str = "",
        **sampling: object,
    ) -> int:
        """Returns the request's id. By default four tokens whatever they are."""
        number = len(self.lives) + 1
        options = {"ignore_eos": True, "eos_token_ids": (EOS,), "seed": number, **sampling}
        message = SubmitTokens(
            id=number,
            token_ids=np.array(prompt, np.int32).tobytes(),
            sampling=Sampling(max_tokens=max_tokens, **options),  # type: ignore[arg-type]
            n=n,
            priority=priority,
            cache_salt=salt,
            automaton=automaton,
            pooling=pooling,
            prediction=np.array(prediction, np.int32).tobytes(),
            speculate=speculate,
            stop_strings=stop_strings,
            written=written,
            trace=trace,
            client=Client(tenant, client),
            adapter=named(adapter) if adapter else None,
            images=images,
            rid=rid,
        )
        self.natures[message.sampling.seed] = Nature(root_of(salt, adapter), fails_at, period, adapter, images)
        self.lives[number] = Life(message, source, self.natures[message.sampling.seed])
        self.scheduler.submit(message, source, self.now, None if automaton is None else FakeGuide(automaton))
        return number

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.results += self.executor.run(plan)
            self.mask()
        self.executor.hosts.take(self.scheduler)
        self.executor.encoders.take(self.scheduler)
        return plan

    def load(self) -> None:
        """Executors read all that they are asked for."""
        while self.executor.hosts.take(self.scheduler) or self.executor.hosts.say(self.scheduler, self.now):
            pass

    def encode(self) -> None:
        """Executors encode all that they are asked for."""
        encoders = self.executor.encoders
        while encoders.take(self.scheduler) or encoders.say(self.scheduler, self.now):
            pass

    def copy(self) -> None:
        """Executors copy all blocks that they are asked for."""
        host, rng = self.executor.host, random.Random(0)
        while host.take(self.scheduler, rng) or host.say(self.scheduler, self.now, rng):
            pass

    def mask(self) -> None:
        """Make the masks that can be made."""
        self.desk.collect(self.scheduler)
        self.desk.make_beside()
        while self.desk:
            masks = self.desk.make()
            self.results += self.executor.mask(masks)

    def apply(self) -> None:
        """Apply the oldest result and take what it gives to every source."""
        result = self.results.popleft()
        self.scheduler.apply(result, self.now)
        self.executor.applied(result.step)
        self.mask()
        self.deliver()

    def deliver(self) -> None:
        for source in self.scheduler.undelivered():
            for message in self.scheduler.outputs(source):
                self.record.take(message)

    def step(self) -> StepPlan | None:
        """One plan and its result, nothing else in flight."""
        plan = self.plan()
        if plan is not None:
            self.apply()
        return plan

    def run(self, depth: int = 1) -> None:
        """To the end of every life, and then nothing may be left."""
        while self.scheduler.unfinished or self.scheduler.in_flight:
            while self.scheduler.in_flight < depth and self.plan() is not None:
                pass
            self.apply()
        self.deliver()
        assert is_idle(self.scheduler)
        assert self.scheduler.check(thorough=True).ok
        assert self.scheduler.statistics().pool.held == 0

    def seen(self, number: int, choice: int = 0) -> Seen:
        self.deliver()
        return self.record.seen.get((number, choice), Seen())


def chunks(plan: StepPlan | None) -> list[tuple[int, int, int, int]]:
    """(slot, start, count, sample) of each chunk."""
    assert plan is not None
    return [(row[0], row[1], row[2], row[3]) for row in ints(plan.chunks, 4)]
