"""Replicas behind one tokenizer on a virtual clock. Schedulers, the frontend and the executors' loops are the
product's; steps, copies and messages take the time that they are said to take, and nothing is computed.

An executor is one thread: where it waits for a step, it does nothing else meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.engine_core.execution.block_copies import CopyStatistics
from penstock.engine_core.placement.placement import Placement
from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.text.frontend import Frontend
from penstock.engine_core.text.prompts import Prompter, PromptLimits
from penstock.engine_core.text.template import ChatTemplate
from penstock.protocol.groups import ReplicaRole
from penstock.protocol.links import STEPS, Welcome
from penstock.protocol.message import Message
from penstock.protocol.messages import Prefilled, ReleaseTransfer, Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.step_columns import chunk_positions, chunk_table, copy_table
from penstock.protocol.steps import BlocksCopied, CopyBlocks, ExecutorReady, StepPlan, StepResult, copy_stamp
from penstock.services.executor.crash_report import Reports
from penstock.services.executor.steps import Steps
from penstock.services.executor.watchdog import Watchdog
from penstock.services.links.link import Arrival, Joined, Peer
from tests.engine_core.text.streams import API, STATUS, Client, submit
from tests.engine_core.tokenizer.vocabularies import CHAT_TEMPLATE, vocabulary

SOURCE, EPOCH, DEPTH = 1, 1, 2
BLOCK = 64  # tokens
PART = 8  # blocks that are copied together
LOOK = 0.0001  # seconds between looks of an executor at another one's memory
ROOM = 100  # prompts on a device
HOST_ROOM = 24  # prompts in an executor's host memory
READY = ExecutorReady(
    epoch=EPOCH, blocks=1, block_size=BLOCK, step_tokens=1 << 20, device="cpu", dtype="float32", weight_bytes=1,
    cache_bytes=1, load_seconds=0.1,
)  # fmt: skip
WELCOME = Welcome(version=1, role="scheduler", index=0, incarnation=1, pid=2**22 + 1, epoch=EPOCH)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds. As they are: an 8B model in bf16 on an H200, at contexts of 8,192 tokens."""

    position: float = 0.206 / 8192  # of a prompt
    step: float = 0.0045  # of any step, beside its prompts
    row: float = 0.00017
    token_copy: float = 0.025 / 8192  # of its keys and values, to the host's memory or back
    hop: float = 0.0003  # of a message from process to process


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


@dataclass(slots=True)
class Work:
    """A step, or copies, on an executor's device: what `Steps` reads of `Launched`."""

    executor: Executor
    began: float
    end: float
    answer: StepResult | BlocksCopied

    @property
    def done(self) -> Work:
        return self

    @property
    def finished(self) -> bool:
        return self.executor.now >= self.end

    def synchronize(self) -> None:
        self.executor.now = max(self.executor.now, self.end)


@dataclass(slots=True)
class Job:
    """Copies of one message."""

    message: CopyBlocks
    left: list[tuple[int, int]]  # stamp and place of those that are not enqueued, in the order in which they are
    parts: deque[tuple[Work, list[int]]] = field(default_factory=deque)  # on their way, with their places


class Copier:
    """What `Steps` asks of a `BlockCopier`. memory: the stamps of all executors' blocks, by replica and place."""

    storage = None

    def __init__(self, executor: Executor, replica: int, memory: dict[tuple[int, int], int]) -> None:
        self._executor, self._replica, self._memory = executor, replica, memory
        self._free = {True: 0.0, False: 0.0}  # when the lane to the host, and that from it, has nothing to do
        self._jobs: list[Job] = []
        self.answers: deque[Message] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self.answers)

    @property
    def ends(self) -> list[float]:
        """Of parts that are on their way; soon, where others have to come first."""
        found = [work.end for job in self._jobs for work, _ in job.parts]
        return found + [self._executor.now + LOOK for job in self._jobs if job.left]

    def ask(self, message: CopyBlocks) -> None:
        places = copy_table(message.blocks)[:, 1].tolist()
        stamps = np.frombuffer(message.stamps, np.int64).tolist()
        stamps = stamps or [copy_stamp(message.epoch, message.number)] * len(places)
        self._jobs.append(Job(message, sorted(zip(stamps, places, strict=True))))

    def iterate(self, _: object) -> None:
        for job in self._jobs:
            self._enqueue(job)
            while job.parts and job.parts[0][0].finished:
                work, places = job.parts.popleft()
                if job.message.to_host:
                    stamp = copy_stamp(job.message.epoch, job.message.number)
                    self._memory.update([((self._replica, place), stamp) for place in places])
                if not job.parts and not job.left:
                    self.answers.append(work.answer)
        self._jobs = [job for job in self._jobs if job.parts or job.left]

    def _enqueue(self, job: Job) -> None:
        to_host, replica = job.message.to_host, job.message.replica
        while job.left and (to_host or self._memory.get((replica, job.left[0][1])) == job.left[0][0]):
            count = next(
                (
                    at for at, (stamp, place) in enumerate(job.left[:PART])
                    if not to_host and self._memory.get((replica, place)) != stamp
                ),
                len(job.left[:PART]),
            )  # fmt: skip
            places, job.left = [place for _, place in job.left[:count]], job.left[count:]
            seconds = count * BLOCK * self._executor.speed.token_copy
            began = max(self._executor.now, self._free[to_host])
            self._free[to_host] = began + seconds
            answer = BlocksCopied(job.message.number, seconds)
            job.parts.append((Work(self._executor, began, began + seconds, answer), places))

    def forget(self) -> None:
        pass

    def statistics(self) -> CopyStatistics:
        return CopyStatistics(0, 0, 0.0, 0.0)


class Runner:
    """What `Steps` asks of a `Runner`."""

    adapters = None
    drafting_ended = None

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.free = 0.0  # when the device has nothing to do
        self.running: list[Work] = []

    def begin(self, plan: StepPlan) -> StepPlan:
        return plan

    def finish(self, plan: StepPlan, _: object) -> Work:
        executor, speed = self._executor, self._executor.speed
        chunks = chunk_table(plan.chunks)
        rows = len(executor.steps.decoding) + int(chunks[:, 3].sum())
        seconds = speed.step + speed.row * rows + speed.position * chunk_positions(plan.chunks)
        began = max(executor.now, self.free)
        self.free = began + seconds
        tokens = np.full(rows, 5, np.int32).tobytes()
        result = StepResult(step=plan.step, epoch=plan.epoch, token_ids=tokens, busy=seconds)
        work = Work(executor, began, self.free, result)
        self.running.append(work)
        return work

    def draft(self, work: Work) -> Work:
        return work

    def collect(self, work: Work) -> StepResult:
        work.synchronize()
        self.running.remove(work)
        assert isinstance(work.answer, StepResult)
        return work.answer

    def reset(self) -> None:
        pass


class Executor:
    """One thread, whose own time is `now`: ahead of the clock while it waits for a step."""

    def __init__(self, cluster: TimedCluster, replica: int, folder: Path, heard: Callable[[Message], None]) -> None:
        self.clock, self.speed, self._heard = cluster.clock, cluster.speed, heard
        self.now = 0.0
        self.runner, self.copier = Runner(self), Copier(self, replica, cluster.memory)
        self._scheduler = Peer(b"", WELCOME, STEPS.window, 0.0)
        self._inbox: list[Message | Joined] = [Joined()]
        self._due = float("inf")  # when it looks next
        link: Any = self
        runner: Any = self.runner
        copies: Any = self.copier
        reports = Reports(folder, "executor-0", READY, prompts=False)
        self.steps = Steps(link, runner, READY, Watchdog(), reports, copies=copies)

    def send(self, _: Peer, message: Message) -> bool:
        if not isinstance(message, ExecutorReady):
            self.clock.at(self.now + self.speed.hop, lambda: self._heard(message))
        return True

    def hear(self, message: Message) -> None:
        self._inbox.append(message)
        self.look()

    def look(self) -> None:
        """One turn of the loop, if the thread does not wait for something."""
        if self.now > self.clock.now:
            self._look_at(self.now)
            return
        self.now, self._due = self.clock.now, float("inf")
        self.steps.take([Arrival(self._scheduler, message) for message in self._inbox])
        self._inbox.clear()
        self.steps.iterate()
        if self.steps.has_work:
            self._look_at(self.now)
        elif ends := [work.end for work in self.runner.running] + self.copier.ends:
            self._look_at(max(self.now, min(ends)))

    def _look_at(self, when: float) -> None:
        if when < self._due:
            self._due = when
            self.clock.at(when, lambda: self.look() if self._due == when else None)


class Replica:
    """A scheduler and its executor."""

    def __init__(self, cluster: TimedCluster, number: int, role: ReplicaRole, budget: int, folder: Path) -> None:
        self._cluster, self._clock = cluster, cluster.clock
        per_prompt = cluster.prompt // BLOCK
        self.scheduler = Scheduler(
            SchedulingOptions(
                blocks=ROOM * per_prompt,
                block_size=BLOCK,
                max_model_len=2 * cluster.prompt,
                max_num_seqs=256,
                max_num_batched_tokens=budget,
                vocab_size=1 << 16,
                host_blocks=HOST_ROOM * per_prompt,
                role=role,
                replica=number,
                epoch=EPOCH,
            )
        )
        self.executor = Executor(cluster, number, folder, self._answered)

    def take(self, message: Message) -> None:
        match message:
            case SubmitTokens():
                self.scheduler.submit(message, SOURCE, self._clock.now)
            case ReleaseTransfer(id=number):
                self.scheduler.release_transfer(number)
            case _:
                raise AssertionError(message)
        self._turn()

    def _answered(self, message: Message) -> None:
        if isinstance(message, StepResult):
            self.scheduler.apply(message, self._clock.now)
        else:
            assert isinstance(message, BlocksCopied)
            self.scheduler.blocks_copied(message, 0, self._clock.now)
        self._turn()

    def _turn(self) -> None:
        """The end of an iteration of the scheduler's loop: plans, what goes beside them, outputs."""
        now = self._clock.now
        while self.scheduler.in_flight < DEPTH and (plan := self.scheduler.plan(now)) is not None:
            self._tell(plan)
        messages = self.scheduler.copy_messages()
        for message in messages:
            self._tell(message)
        messages.clear()
        for source in self.scheduler.undelivered():
            for told in self.scheduler.outputs(source):
                self._cluster.hear(self, told)

    def _tell(self, message: Message) -> None:
        self._clock.at(self._clock.now + self._cluster.speed.hop, lambda: self.executor.hear(message))


class TimedCluster:
    """`prefill` of `replicas` compute prompts for the others. Requests of `prompt` tokens in and `output` out."""

    def __init__(
        self, folder: Path, *, replicas: int = 2, prefill: int = 1, prompt: int = 8192, output: int = 256,
        budget: int = 8192, speed: Speed | None = None,
    ) -> None:  # fmt: skip
        self.clock, self.speed = Clock(), speed or Speed()
        self.memory: dict[tuple[int, int], int] = {}
        self.prompt, self.output = prompt, output
        roles = [ReplicaRole.PREFILL if number < prefill else ReplicaRole.DECODE for number in range(replicas)]
        if not prefill:
            roles = [ReplicaRole.MIXED] * replicas
        self.replicas = [Replica(self, number, role, budget, folder) for number, role in enumerate(roles)]
        found = vocabulary("byte_level")
        template = ChatTemplate({"default": CHAT_TEMPLATE}, found.names)
        placement = Placement("prefix", replicas, BLOCK, prefill, prompt // 16)
        self.frontend = Frontend(found, Prompter(found, template, PromptLimits(found.size, 2 * prompt, ())), placement)
        self.frontend.join_api(API)
        self.client = Client(self.frontend)
        self.vocabulary = found.size
        self.asked: dict[int, float] = {}
        self.stamps: dict[int, list[float]] = {}  # by request, of each token
        for number in range(replicas):
            self.frontend.report(msgspec.structs.replace(STATUS, replica=number, blocks=1 << 16, block_size=BLOCK))

    def run(self, arrivals: list[float]) -> None:
        """Requests at these times, until all have ended."""
        chance = random.Random(0)
        for number, when in enumerate(arrivals, 1):
            ids = np.array(chance.choices(range(self.vocabulary), k=self.prompt), np.int32).tobytes()
            self.clock.at(when, lambda number=number, ids=ids: self._ask(number, ids))  # type: ignore[misc]
        self.clock.run()
        assert all(len(stamps) == self.output for stamps in self.stamps.values())
        assert self.frontend.idle()

    def _ask(self, number: int, ids: bytes) -> None:
        self.asked[number], self.stamps[number] = self.clock.now, []
        sampling = Sampling(max_tokens=self.output, ignore_eos=True)
        submit(self.frontend, number, prompt_ids=ids, sampling=sampling, detokenize=False)
        self._send()

    def hear(self, replica: Replica, message: Message) -> None:
        """A scheduler tells its tokenizer something, a hop from now."""
        number = self.replicas.index(replica)

        def heard() -> None:
            match message:
                case TokenBatch():
                    for request, _, tokens, _ in message.rows():
                        self.stamps[request] += [self.clock.now] * len(tokens)
                    self.frontend.batch(message, number)
                case Prefilled():
                    self.frontend.prefilled(message, number)
                case _:
                    raise AssertionError(message)
            self.client.take()
            self._send()

        self.clock.at(self.clock.now + self.speed.hop, heard)

    def _send(self) -> None:
        for replica, upward in zip(self.replicas, self.frontend.upward, strict=True):
            while upward:
                message = upward.popleft()
                self.clock.at(
                    self.clock.now + self.speed.hop,
                    lambda replica=replica, message=message: replica.take(message),  # type: ignore[misc]
                )
