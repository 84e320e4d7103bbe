"""Tokens a second with constrained rows on a modelled device, by the scheduler's true host code.

    python -m benchmarks.mask_pace --out result.json
    python -m benchmarks.mask_pace --against TREE --rounds 4

Time is virtual. The scheduler's loop runs as in a server, at depth 2; an iteration takes its thread's CPU time times
`--scale` (an H200's host needs two to three times as long as the CPU that this was written on). Masks that it hands to
a thread are there after that thread's CPU time and a handover. A step takes as long as 0.6B's does on an H200: 0.9 ms,
9.6 us a row and 1.5 us a position of a prompt. The executor's host is modelled too: it launches a plan and its masks
one after the other. So a step is late where its plan or its masks are.

Two bursts come, of all requests at once, with a second's rest between them: the first on a fresh server, with 64 tokens
each, the second with 256. They follow the schema of `mask_cpu` and say what its loads do. `host` is the CPU time of
the scheduler for each token, masks included and not scaled; `first` the milliseconds to the first tokens; `step` those
from one token of a request to its next; `waits` what the device waited for plans and for masks.

`--against TREE` runs another tree's engine and services in turns with this one's, and gives the medians of the rounds,
or the least of `host`.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks import report
from benchmarks.mask_cpu import BLOCK, PROMPT, SAYS, SCHEMA, Load, Sampler, Stopwatch, Wire, make_popular
from benchmarks.shapes import SHAPES, make_folder
from penstock.engine_core.grammar.sources import source_of
from penstock.engine_core.grammar.tokens import GrammarTokens, read_tokens
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import Role
from penstock.protocol.message import Message
from penstock.protocol.messages import Automaton, Grammar, Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.step_columns import chunk_table
from penstock.protocol.steps import ExecutorReady, StepMasks, StepPlan
from penstock.services.links.link import Arrival, Peer
from penstock.services.scheduler.bitmask_filler import BitmaskFiller
from penstock.services.scheduler.grammar_queue import GrammarQueue
from penstock.services.scheduler.main import SWITCH
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop

STEP, ROW, POSITION = 0.9e-3, 9.6e-6, 1.5e-6  # seconds of the device
PLAN, MASKS, RESULT = 250e-6, 120e-6, 60e-6  # seconds of the executor's host for each of these messages
HOP, HANDOVER, WAKING = 100e-6, 100e-6, 50e-6  # of a message; of a job to a thread; of the loop to give it away
BUDGET, PLACES, ARRIVALS, REST = 8192, 4096, 100e-6, 2.0
BURSTS = (64, 256)  # tokens of each request


class Burst(msgspec.Struct, frozen=True):
    load: str
    says: str
    number: int
    tokens_per_second: float
    host_us: float  # of a token
    first_ms: float
    step_ms: dict[str, float]  # of constrained rows and of free ones
    plan_waits_ms: float
    mask_waits_ms: float


class Clock:
    """Virtual seconds within an iteration."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.waited = 0.0  # virtual seconds that are no CPU's
        self.hidden = 0.0  # CPU seconds that other threads would take
        self._base = self._began = 0.0

    def begin(self, now: float) -> None:
        self.waited = self.hidden = 0.0
        self._base, self._began = now, time.thread_time()

    @property
    def cpu(self) -> float:
        return time.thread_time() - self._began - self.hidden

    def __call__(self) -> float:
        return self._base + self.cpu * self.scale + self.waited


class Threads(Executor):
    """One thread: jobs run when they are given to it, and are done when it would have done them."""

    def __init__(self, clock: Clock, before: Threads | None = None) -> None:
        self._clock = clock
        self._before = before  # whose jobs these wait for
        self._free = 0.0
        self._jobs: deque[tuple[float, Future[Any], Any]] = deque()
        self.seconds = 0.0  # CPU

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        began = self._clock() + HANDOVER
        if self._before is not None and self._before._jobs:
            began = max(began, self._before._jobs[-1][0])
            self._before.release(float("inf"))
        own, all_threads = time.thread_time(), time.process_time()
        result = work(*arguments, **named)
        own, all_threads = time.thread_time() - own, time.process_time() - all_threads
        self._clock.hidden += own
        self._clock.waited += WAKING
        self.seconds += max(own, all_threads)
        self._free = max(self._free, began) + max(own, all_threads) * self._clock.scale
        future: Future[Any] = Future()
        self._jobs.append((self._free, future, result))
        return future

    @property
    def due(self) -> float:
        return self._jobs[0][0] if self._jobs else float("inf")

    def release(self, now: float) -> None:
        """Jobs that are done by now."""
        while self._jobs and self._jobs[0][0] <= now:
            _, future, result = self._jobs.popleft()
            future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        return


class TimedWire(Wire):
    """Knows when each message left."""

    def __init__(self, role: Role, clock: Clock) -> None:
        super().__init__(role, Stopwatch())
        self.sent: list[tuple[float, Message]] = []
        self._clock = clock

    def send_each(self, peers: Iterable[Peer], message: Message) -> bool:
        super().send_each(peers, message)
        self.sent.append((self._clock(), message))
        return True


class Server:
    """A scheduler, its links and a device."""

    def __init__(self, tokens: GrammarTokens, automaton: Automaton, load: Load, scale: float) -> None:
        self.clock = Clock(scale)
        self.load, self._tokens, self._automaton = load, tokens, automaton
        self._late = Threads(self.clock)
        self._threads = Threads(self.clock, self._late)
        config = Config(model=ModelConfig(max_num_seqs=256, max_num_batched_tokens=BUDGET, block_size=BLOCK))
        guides = GrammarQueue(tokens, ThreadPoolExecutor(2), 1)
        self._bitmasks = BitmaskFiller(tokens, self._threads, self._late, 1)
        self._bitmasks.jobs.wait = self._wait  # type: ignore[method-assign]  # in virtual time
        make_popular(guides, automaton, 1)
        self.clients, self.steps = TimedWire(Role.TOKENIZER, self.clock), TimedWire(Role.EXECUTOR, self.clock)
        self.loop = SchedulerLoop(
            config, ModelFacts(4096, tokens.width), self.clients, self.steps, guides, self._bitmasks, 0.0,
            clock=self.clock,
        )  # fmt: skip
        self._sampler = Sampler(tokens, load, PLACES)
        ready = ExecutorReady(epoch=0, blocks=256 * 64, block_size=BLOCK, step_tokens=BUDGET, mask_slots=PLACES,
                              device="none", dtype="none", weight_bytes=1, cache_bytes=1, load_seconds=1.0)  # fmt: skip
        self.steps.arrivals.append(Arrival(self.steps.peer, ready))
        self.clock.begin(0.0)
        self.loop.iterate(0.0, 0.0)
        self._pending: list[tuple[float, int, TimedWire, Arrival]] = []
        self._arrivals = 0
        self._plans: deque[tuple[float, StepPlan]] = deque()
        self._masks: dict[int, tuple[float, StepMasks]] = {}
        self._device = self._launcher = self._host = 1.0  # when each is free
        self._cpu = self.plan_waits = self.mask_waits = 0.0
        self.came: dict[int, list[float]] = {}  # when a request's tokens did

    def _wait(self, seconds: float) -> bool:
        """As `BackgroundJobs.wait` does."""
        if not self._bitmasks.jobs.running:
            return False
        now = self.clock()
        self.clock.waited += max(0.0, min(self._threads.due - now, seconds))
        due = self._threads.due <= now + seconds
        self._threads.release(now + seconds)
        return due

    def arrive(self, at: float, wire: TimedWire, message: Message) -> None:
        self._arrivals += 1
        heapq.heappush(self._pending, (at, self._arrivals, wire, Arrival(wire.peer, message)))

    def ask(self, number: int, output: int, *, constrained: bool, at: float) -> None:
        prompt = np.random.default_rng(number).integers(3, 4000, PROMPT, np.int32).tobytes()
        sampling = Sampling(seed=number if constrained else 1 << 20, max_tokens=output, ignore_eos=True,
                            eos_token_ids=tuple(self._tokens.eos))  # fmt: skip
        follows = self._automaton if constrained else None
        asked = SubmitTokens(id=number, token_ids=prompt, sampling=sampling, automaton=follows)
        self.arrive(at, self.clients, asked)

    def _run_device(self) -> None:
        while self._plans and (not self._plans[0][1].masked or self._plans[0][1].step in self._masks):
            arrived, plan = self._plans.popleft()
            masked_at, masks = self._masks.pop(plan.step) if plan.masked else (0.0, None)
            result = self._sampler.run(plan, self._sampler.take(masks))
            positions = int(chunk_table(plan.chunks)[:, 2].sum())
            seconds = STEP + ROW * (len(result.token_ids) // 4) + POSITION * positions
            self._launcher = max(self._launcher, arrived) + PLAN
            began = max(self._device, self._launcher)
            if masks is not None:
                self._launcher = masked_at = max(self._launcher, masked_at) + MASKS
            ended = max(began + seconds, masked_at)
            plan_wait, mask_wait = began - self._device, ended - began - seconds
            self.plan_waits += plan_wait
            self.mask_waits += mask_wait
            self._device = ended
            result = msgspec.structs.replace(result, busy=seconds, waited=plan_wait + mask_wait)
            self.arrive(ended + RESULT + HOP, self.steps, result)

    def _iterate(self) -> bool:
        """One iteration of the loop as soon as there is something for it; False where there is not."""
        due = min(self._pending[0][0] if self._pending else float("inf"), self._threads.due, self._late.due)
        if due == float("inf"):
            return False
        now = max(self._host, due)
        while self._pending and self._pending[0][0] <= now:
            _, _, wire, arrival = heapq.heappop(self._pending)
            wire.arrivals.append(arrival)
        self._threads.release(now)
        self._late.release(now)
        self.clock.begin(now)
        self.loop.iterate(now, now)
        self._cpu += self.clock.cpu
        self._host = self.clock()
        for at, message in self.steps.sent:
            if isinstance(message, StepPlan):
                self._plans.append((at + HOP, message))
            elif isinstance(message, StepMasks):
                self._masks[message.step] = at + HOP, message
        for at, message in self.clients.sent:
            if isinstance(message, TokenBatch):
                numbers = np.frombuffer(message.ids, np.int64).tolist()
                counts = np.frombuffer(message.counts, np.int32).tolist() or [1] * len(numbers)
                for number, count in zip(numbers, counts, strict=True):
                    self.came.setdefault(number, []).extend([at] * count)
        for wire in (self.steps, self.clients):
            wire.sent.clear()
            wire.plans.clear()
            wire.masks.clear()
        return True

    def burst(self, number: int, output: int) -> Burst:
        """All requests at once, until the last one has ended."""
        self._host = self._device = self._launcher = began = max(self._host, self._device) + REST
        self._cpu = self.plan_waits = self.mask_waits = 0.0
        self.came.clear()
        rows, free, threads = self.load.rows, self.load.free, self._threads.seconds + self._late.seconds
        first = number * (rows + free) + 1
        kinds = [place * rows // (rows + free) != (place + 1) * rows // (rows + free) for place in range(rows + free)]
        for place, constrained in enumerate(kinds):
            self.ask(first + place, output, constrained=constrained, at=began + place * ARRIVALS)
        while self._iterate():
            self._run_device()
        assert not self.loop.unfinished
        cpu = self._cpu + self._threads.seconds + self._late.seconds - threads
        stamps = [self.came[first + place] for place in range(rows + free)]
        count = sum(map(len, stamps))
        paces: dict[str, list[float]] = {"free": [], "constrained": []}
        for each, constrained in zip(stamps, kinds, strict=True):
            paces["constrained" if constrained else "free"].append((each[-1] - each[0]) / max(1, len(each) - 1))
        firsts = [each[0] - began - place * ARRIVALS for place, each in enumerate(stamps)]
        return Burst(
            f"{rows}+{free}", self.load.says, number,
            round(count / (max(each[-1] for each in stamps) - began), 1), round(cpu / count * 1e6, 2),
            round(float(np.mean(firsts)) * 1e3, 2),
            {kind: round(float(np.mean(found)) * 1e3, 3) for kind, found in paces.items() if found},
            round(self.plan_waits * 1e3, 2), round(self.mask_waits * 1e3, 2),
        )  # fmt: skip


def measure(loads: Iterable[str], says: Iterable[str], shape: str, scale: float) -> list[Burst]:
    with tempfile.TemporaryDirectory() as place:
        folder = make_folder(SHAPES[shape], Path(place))
        tokens = read_tokens(folder, read_vocabulary(folder))
    assert tokens is not None
    automaton = Automaton(source=source_of(Grammar(kind="json_schema", source=json.dumps(SCHEMA)), tokens).text)
    found: list[Burst] = []
    for counts in loads:
        rows, free = map(int, counts.split("+"))
        for said in says if rows else SAYS[:1]:
            server = Server(tokens, automaton, Load(rows, free, said, 0, 0.0), scale)
            gc.collect()
            gc.disable()
            found += [server.burst(number, output) for number, output in enumerate(BURSTS)]
            gc.enable()
    return found


def in_turns(against: Path, rounds: int, words: list[str]) -> dict[str, list[Burst]]:
    """The medians of both trees' rounds, and the least of the host's times. This tree's benchmarks run in both."""
    found: dict[str, list[list[Burst]]] = {}
    for tree in (against.resolve(), report.ROOT) * rounds:
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "benchmarks").symlink_to(report.ROOT / "benchmarks")
            (Path(place) / "penstock").symlink_to(tree / "penstock")
            out, environment = Path(place) / "out.json", {**os.environ, "PYTHONPATH": place}
            command = [sys.executable, "-m", "benchmarks.mask_pace", *words, "--out", str(out)]
            subprocess.run(command, cwd=place, env=environment, check=True, stdout=subprocess.DEVNULL)
            measured = msgspec.json.decode(
                msgspec.json.encode(json.loads(out.read_bytes())["bursts"]), type=list[Burst]
            )
        found.setdefault(tree.name if tree != report.ROOT else "this tree", []).append(measured)
    return {tree: [middle(bursts) for bursts in zip(*several, strict=True)] for tree, several in found.items()}


def middle(bursts: tuple[Burst, ...]) -> Burst:
    one = bursts[0]
    numbers = {name: round(median([getattr(each, name) for each in bursts]), 2)
               for name in ("tokens_per_second", "first_ms", "plan_waits_ms", "mask_waits_ms")}  # fmt: skip
    steps = {kind: round(median([each.step_ms[kind] for each in bursts]), 3) for kind in one.step_ms}
    return msgspec.structs.replace(one, host_us=min(each.host_us for each in bursts), step_ms=steps, **numbers)


def show(tree: str, bursts: Iterable[Burst]) -> None:
    for each in bursts:
        steps = ", ".join(f"{kind} {value:.3f}" for kind, value in each.step_ms.items())
        print(f"{tree:<14}{each.load:>7} {each.says:<9} burst {each.number}: {each.tokens_per_second:9,.0f} tok/s,"
              f" host {each.host_us:5.2f} µs, first {each.first_ms:5.1f} ms, step {steps} ms,"
              f" waits {each.plan_waits_ms:.0f} + {each.mask_waits_ms:.0f} ms")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loads", nargs="+", default=["0+64", "64+0", "32+32", "0+256", "256+0"],
                        metavar="ROWS+FREE", help="constrained requests of a burst, and free ones")  # fmt: skip
    parser.add_argument("--says", choices=SAYS, nargs="+", default=["greedy"], help="what constrained rows say")
    parser.add_argument("--scale", type=float, default=2.5, help="times the CPU time here")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6b", help="whose vocabulary")
    parser.add_argument("--against", type=Path, metavar="TREE", help="measure another tree as well, in turns")
    parser.add_argument("--rounds", type=int, default=4, help="of both trees")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    if arguments.against is None:
        sys.setswitchinterval(SWITCH)
        bursts = measure(arguments.loads, arguments.says, arguments.shape, arguments.scale)
        show("", bursts)
        if arguments.out is not None:
            report.write(arguments.out, "mask_pace", {"bursts": msgspec.to_builtins(bursts)})
        return
    words = ["--loads", *arguments.loads, "--says", *arguments.says, "--scale", str(arguments.scale),
             "--shape", arguments.shape]  # fmt: skip
    trees = in_turns(arguments.against, arguments.rounds, words)
    for tree, bursts in trees.items():
        show(tree, bursts)
    if arguments.out is not None:
        rounds = ["--against", "TREE", "--rounds", str(arguments.rounds)]
        report.write(arguments.out, "mask_pace", {"trees": msgspec.to_builtins(trees)}, words + rounds)


if __name__ == "__main__":
    main()
