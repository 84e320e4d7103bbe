"""Host time between a step's result and the masks of the next one, with an executor that answers at once.

    python -m benchmarks.mask_cpu --out result.json

All rows follow one JSON schema over a vocabulary of 128,256 tokens and say any allowed token. The scheduler's loop runs
as in a server, at depth 2, with its thread of masks and without sockets. Per step, in microseconds (median, p99,
least): the CPU time of each part in the thread that does it, and the wall time of the whole path, from the turn that
takes the result until the masks of the next step are encoded. `turn` is the CPU time of the loop's own thread for the
step, `process` that of all threads. The parts of native fills are in `process` alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.shapes import SHAPES, make_folder
from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.masks import MaskStore
from penstock.engine_core.grammar.sources import source_of
from penstock.engine_core.grammar.tokens import GrammarTokens, read_tokens
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import PROTOCOL_VERSION, Hello, Role
from penstock.protocol.message import Message
from penstock.protocol.messages import Automaton, Grammar, Sampling, SubmitTokens
from penstock.protocol.step_columns import chunk_table, draft_table, integers
from penstock.protocol.steps import REJECTED, ExecutorReady, StepMasks, StepPlan, StepResult
from penstock.services.links.link import Arrival, Joined, Peer
from penstock.services.scheduler.bitmask_filler import BitmaskFiller
from penstock.services.scheduler.grammar_queue import GrammarQueue
from penstock.services.scheduler.main import SWITCH
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop

PROMPT, BLOCK, WINDOW, STEP = 128, 16, 1 << 30, 0.005
ROW = {"id": {"type": "integer", "minimum": 0, "maximum": 99_999}, "name": {"type": "string", "maxLength": 12},
       "ok": {"type": "boolean"}}  # fmt: skip
SCHEMA = {"type": "array", "minItems": 200, "maxItems": 300, "items": {
    "type": "object", "properties": ROW, "required": list(ROW), "additionalProperties": False}}  # fmt: skip
PARTS: dict[str, tuple[type[Any], str]] = {
    "apply": (Scheduler, "apply"),
    "follow": (Scheduler, "follow"),
    "advance": (Guide, "advance"),
    "forced": (Guide, "forced"),
    "work": (Scheduler, "mask_work"),
    "fill": (MaskStore, "_fill"),
    "place": (MaskStore, "_place"),
    "plan": (Scheduler, "plan"),
    "outputs": (Scheduler, "outputs"),
}
COLUMNS = (*PARTS, "encode", "turn", "process", "path")


class Timing(msgspec.Struct, frozen=True):
    median: float
    p99: float
    least: float


class Measured(msgspec.Struct, frozen=True):
    rows: int
    steps: int
    drafts: float  # mean of a step
    entries: float
    fresh: float  # masks sent, mean of a step
    microseconds: dict[str, Timing]


class Stopwatch:
    """Owner of the times of one step's parts; `wrap` adds a method's own thread's CPU time to its part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, kind: type[Any], name: str, part: str) -> None:
        plain: Callable[..., Any] = getattr(kind, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return plain(*arguments, **named)
            finally:
                self.seconds[part] += time.thread_time() - began

        setattr(kind, name, timed)


class Wire:
    """A port without a socket: what is sent is encoded and kept."""

    def __init__(self, role: Role, watch: Stopwatch) -> None:
        self.epoch = 1
        hello = Hello(version=PROTOCOL_VERSION, role=role, index=0, incarnation=1, pid=0, config=0)
        self.peer = Peer(role.encode(), hello, WINDOW, 0.0)
        self.peers: tuple[Peer, ...] = (self.peer,)
        self.arrivals: list[Arrival] = [Arrival(self.peer, Joined())]
        self.plans: list[StepPlan] = []
        self.masks: list[StepMasks] = []
        self.masked_at = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._watch = watch

    def send(self, peer: Peer, message: Message) -> bool:
        return self.send_each((peer,), message)

    def send_each(self, peers: Iterable[Peer], message: Message) -> bool:
        began = time.thread_time()
        self._encoder.encode(message)
        self._watch.seconds["encode"] += time.thread_time() - began
        if isinstance(message, StepPlan):
            self.plans.append(message)
        elif isinstance(message, StepMasks):
            self.masked_at = time.perf_counter()
            self.masks.append(message)
        return True

    def receive(self) -> list[Arrival]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def tick(self, now: float) -> None:
        return


class Sampler:
    """Says any token that an entry's mask allows, but no end while there is another; one draft in two is taken."""

    def __init__(self, words: int, places: int, ends: frozenset[int]) -> None:
        self._store: npt.NDArray[np.uint32] = np.zeros((places, words), np.uint32)
        self._lists: dict[int, list[int]] = {}
        self._decoding: set[int] = set()
        self._random = random.Random(3)
        self._ends = ends
        self.drafts = self.entries = self.fresh = 0

    def take(self, masks: StepMasks) -> dict[int, int]:
        """Store what is new; the place of each entry's mask."""
        fresh = np.frombuffer(masks.new_slots, np.int32)
        self._store[fresh] = np.frombuffer(masks.bits, np.uint32).reshape(-1, self._store.shape[1])
        for place in fresh.tolist():
            self._lists.pop(place, None)
        self.fresh += len(fresh)
        entries = np.frombuffer(masks.entries, np.int32).tolist()
        self.entries += len(entries)
        return dict(zip(entries, np.frombuffer(masks.slots, np.int32).tolist(), strict=True))

    def run(self, plan: StepPlan, places: dict[int, int]) -> StepResult:
        self._decoding |= set(integers(plan.decode_on).tolist())
        self._decoding -= set(integers(plan.decode_off).tolist())
        pairs = draft_table(plan.drafts)
        drafts = dict(zip(pairs[:, 0].tolist(), pairs[:, 1].tolist(), strict=True))
        ids: list[int] = integers(plan.draft_ids).tolist()
        self.drafts += len(ids)
        rows: list[list[int]] = []
        for slot in sorted(self._decoding):
            rows.append(ids[: drafts.get(slot, 0)])
            del ids[: drafts.get(slot, 0)]
        rows += [[] for _ in range(int(chunk_table(plan.chunks)[:, 3].sum()))]
        out: list[int] = []
        for row in rows:
            going = True
            for draft in (*row, -1):
                token = self._draw(places[len(out)], draft) if going else REJECTED
                going = going and token == draft
                out.append(token)
        return StepResult(step=plan.step, epoch=plan.epoch, token_ids=np.array(out, np.int32).tobytes(), busy=STEP)

    def _draw(self, place: int, draft: int) -> int:
        tokens = self._lists.get(place)
        if tokens is None:
            bits = np.unpackbits(self._store[place].view(np.uint8), bitorder="little")
            tokens = np.flatnonzero(bits).tolist()
            tokens = self._lists[place] = [token for token in tokens if token not in self._ends] or tokens
        if draft in tokens[:4] and (len(tokens) == 1 or self._random.random() < 0.5):
            return draft
        return self._random.choice(tokens)


def measure(tokens: GrammarTokens, automaton: Automaton, rows: int, steps: int, threads: int) -> Measured:
    watch = Stopwatch()
    plain = {part: getattr(kind, name) for part, (kind, name) in PARTS.items() if hasattr(kind, name)}
    for part in plain:
        watch.wrap(*PARTS[part], part)
    try:
        return run_loop(tokens, automaton, rows, steps, threads, watch)
    finally:
        for part, method in plain.items():
            setattr(*PARTS[part], method)


def run_loop(
    tokens: GrammarTokens, automaton: Automaton, rows: int, steps: int, threads: int, watch: Stopwatch
) -> Measured:
    """`rows` requests from their prompts on; the first steps are not counted."""
    warm = 16
    config = Config(model=ModelConfig(max_num_seqs=rows, max_num_batched_tokens=rows * PROMPT, block_size=BLOCK))
    guides = GrammarQueue(tokens, ThreadPoolExecutor(2), threads)
    bitmasks = BitmaskFiller(tokens, ThreadPoolExecutor(1), ThreadPoolExecutor(1), threads)
    make_popular(guides, automaton, threads)
    clients, steps_port = Wire(Role.TOKENIZER, watch), Wire(Role.EXECUTOR, watch)
    loop = SchedulerLoop(config, ModelFacts(4096, tokens.width), clients, steps_port, guides, bitmasks, 0.0)
    places = 4 * rows + 1024
    sampler = Sampler(tokens.words, places, tokens.eos)
    steps_port.arrivals.append(Arrival(steps_port.peer, ExecutorReady(
        epoch=0, blocks=rows * 64, block_size=BLOCK, step_tokens=rows * PROMPT, mask_slots=places, device="none",
        dtype="none", weight_bytes=1, cache_bytes=1, load_seconds=1.0)))  # fmt: skip
    loop.iterate(0.0, 0.0)
    generator = np.random.default_rng(1)
    for number in range(1, rows + 1):
        prompt = generator.integers(3, 4000, PROMPT, np.int32).tobytes()
        sampling = Sampling(seed=number, max_tokens=4 * (steps + warm), eos_token_ids=tuple(tokens.eos))
        request = SubmitTokens(id=number, token_ids=prompt, sampling=sampling, automaton=automaton)
        clients.arrivals.append(Arrival(clients.peer, request))
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    poller = select.poll()
    poller.register(bitmasks.jobs.fileno(), select.POLLIN)
    poller.register(guides.jobs.fileno(), select.POLLIN)
    now, done = 0.0, 0
    turn, process, began = 0.0, 0.0, 0.0
    while done < warm + steps:
        now += STEP
        at = time.thread_time()
        loop.iterate(now, now)
        turn += time.thread_time() - at
        if not steps_port.plans or (steps_port.plans[0].masked and not steps_port.masks):
            poller.poll(100)
            continue
        poller.poll(0)
        plan = steps_port.plans.pop(0)
        masks = steps_port.masks.pop(0)
        if done >= warm:
            found = {**watch.seconds, "turn": turn, "process": time.process_time() - process,
                     "path": steps_port.masked_at - began}  # fmt: skip
            for name in COLUMNS:
                columns[name].append(found.get(name, 0.0))
        done += 1
        result = sampler.run(plan, sampler.take(masks))
        if done == warm:
            sampler.drafts = sampler.entries = sampler.fresh = 0
            gc.collect()
            gc.disable()
        steps_port.arrivals.append(Arrival(steps_port.peer, result))
        watch.seconds.clear()
        turn, process, began = 0.0, time.process_time(), time.perf_counter()
    gc.enable()
    guides.jobs.close()
    bitmasks.jobs.close()
    return Measured(
        rows,
        steps,
        round(sampler.drafts / steps, 1),
        round(sampler.entries / steps, 1),
        round(sampler.fresh / steps, 1),
        {name: timing(values) for name, values in columns.items()},
    )


def make_popular(guides: GrammarQueue, automaton: Automaton, families: int) -> None:
    """Have the automaton made as often as it is in a server where many requests name it."""
    peer = Wire(Role.TOKENIZER, Stopwatch()).peer
    while guides.statistics().cache.built < families:
        guides.take(peer, SubmitTokens(id=0, token_ids=b"", sampling=Sampling(), automaton=automaton))
        select.select([guides.jobs.fileno()], [], [], 0.01)
        guides.admit()


def timing(seconds: list[float]) -> Timing:
    values = np.array(seconds) * 1e6
    return Timing(*[round(float(value), 1) for value in (*np.percentile(values, (50, 99)), values.min())])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="constrained rows of a step")
    parser.add_argument("--steps", type=int, default=200, help="steps measured")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="that fill")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b", help="whose vocabulary")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH)
    with tempfile.TemporaryDirectory() as place:
        folder = make_folder(SHAPES[arguments.shape], Path(place))
        tokens = read_tokens(folder, read_vocabulary(folder))
    assert tokens is not None
    automaton = Automaton(source=source_of(Grammar(kind="json_schema", source=json.dumps(SCHEMA)), tokens).text)
    found = []
    for rows in arguments.rows:
        measured = measure(tokens, automaton, rows, arguments.steps, arguments.threads)
        found.append(measured)
        print(f"{rows} rows: {measured.entries} entries a step, {measured.drafts} drafts, {measured.fresh} masks sent")
        for name, value in measured.microseconds.items():
            print(f"  {name:<8} median {value.median:9.1f}  p99 {value.p99:9.1f}  least {value.least:9.1f} µs")
    if arguments.out is not None:
        report.write(arguments.out, "mask_cpu", {"threads": arguments.threads, "measured": found})


if __name__ == "__main__":
    main()
