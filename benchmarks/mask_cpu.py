"""Host time of the scheduler's turn with constrained rows, with an executor that answers at once.

    python -m benchmarks.mask_cpu --out result.json

Rows follow one JSON schema over the vocabulary of a shape, beside free ones (`--loads 32+32`: so many of each). They
say any allowed token; or what a model that was trained would say: the text of an array, as `json.dumps` writes it; or
what one with random weights says without sampling: of the allowed tokens always the one that its row likes best. The
scheduler's loop runs as in a server, at depth 2, with its thread of masks and without sockets. Per step, in
microseconds (median, mean, p99, least): `turn`, the CPU time of the loop's own thread, `process`, that of all threads,
and `path`, the wall time from the turn that takes the result until the masks of the next step are encoded. A second run
takes the turn apart, with the CPU time of each part in the thread that does it; its clocks are part of what it shows.
The parts of native fills are in `process` alone.

In a server the scheduler sleeps while a step runs, and what it used last has left the processor's caches when it wakes.
`--cold 64` walks that many MiB before each turn: on this repository's machines a turn then costs what it does in a
process with sockets, several times more than in a loop that does nothing else.

`--against TREE` measures another tree of this repository in turns with this one, round after round, and gives of each
figure the least of the rounds: whatever else the machine does makes it larger.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.shapes import SHAPES, make_folder
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

PROMPT, BLOCK, WINDOW = 128, 16, 1 << 30
ROW = {"id": {"type": "integer", "minimum": 0, "maximum": 99_999}, "name": {"type": "string", "maxLength": 12},
       "ok": {"type": "boolean"}}  # fmt: skip
SCHEMA = {"type": "array", "minItems": 200, "maxItems": 300, "items": {
    "type": "object", "properties": ROW, "required": list(ROW), "additionalProperties": False}}  # fmt: skip
SAYS = ("anything", "text", "greedy")
PARTS: dict[str, tuple[type[Any], str]] = {
    "apply": (Scheduler, "apply"),
    "follow": (Scheduler, "follow"),
    "work": (Scheduler, "mask_work"),
    "fill": (MaskStore, "_fill"),
    "plan": (Scheduler, "plan"),
    "outputs": (Scheduler, "outputs"),
}
WHOLE = ("turn", "process", "path")


class Load(msgspec.Struct, frozen=True):
    """What runs in each step."""

    rows: int  # constrained
    free: int
    says: str  # what constrained rows do, one of SAYS
    steps: int
    step: float  # seconds that a step is said to take
    cold: int = 0  # MiB that are walked before each turn


class Timing(msgspec.Struct, frozen=True):
    median: float
    mean: float
    p99: float
    least: float


class Measured(msgspec.Struct, frozen=True):
    load: Load
    tokens: float  # of constrained rows, mean of a step
    drafts: float
    entries: float
    fresh: float  # masks sent, mean of a step
    microseconds: dict[str, Timing]


class Stopwatch:
    """Owner of the times of one step's parts; `wrap` adds a method's own thread's CPU time to its part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.parts: list[str] = ["encode"]

    def wrap(self, kind: type[Any], name: str, part: str) -> None:
        plain: Callable[..., Any] = getattr(kind, name)
        self.parts.append(part)

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
    """Says what a load's rows say, but no end while there is another; `anything` takes one draft in two."""

    def __init__(self, tokens: GrammarTokens, load: Load, places: int) -> None:
        self._store: npt.NDArray[np.uint32] = np.zeros((places, tokens.words), np.uint32)
        self._lists: dict[int, list[int]] = {}
        self._decoding: set[int] = set()
        self._texts: dict[int, Iterator[int]] = {}  # by slot, of what the row goes on to say
        self._liked: dict[tuple[int, int], int] = {}  # by seed and place, of rows that are greedy
        self._seeds: dict[int, int] = {}  # by slot
        self._tastes: dict[int, npt.NDArray[np.float32]] = {}  # by seed
        self._random = random.Random(3)
        self._tokens = tokens
        self._load = load
        self.said = self.drafts = self.entries = self.fresh = 0

    def take(self, masks: StepMasks | None) -> dict[int, int]:
        """Store what is new; the place of each entry's mask."""
        if masks is None:
            return {}
        fresh = np.frombuffer(masks.new_slots, np.int32)
        self._store[fresh] = np.frombuffer(masks.bits, np.uint32).reshape(-1, self._store.shape[1])
        for place in fresh.tolist():
            self._lists.pop(place, None)
        if self._load.says == "greedy" and len(fresh):
            places = set(fresh.tolist())
            self._liked = {key: token for key, token in self._liked.items() if key[1] not in places}
        self.fresh += len(fresh)
        entries = np.frombuffer(masks.entries, np.int32).tolist()
        self.entries += len(entries)
        return dict(zip(entries, np.frombuffer(masks.slots, np.int32).tolist(), strict=True))

    def run(self, plan: StepPlan, places: dict[int, int]) -> StepResult:
        self._decoding |= set(integers(plan.decode_on).tolist())
        self._decoding -= set(integers(plan.decode_off).tolist())
        for start in plan.starts:
            self._seeds[start.slot] = start.seed
            if start.seed <= self._load.rows and self._load.says == "text":
                self._texts[start.slot] = iter(self._tokens.split(text(start.seed)))
        pairs = draft_table(plan.drafts)
        drafts = dict(zip(pairs[:, 0].tolist(), pairs[:, 1].tolist(), strict=True))
        ids: list[int] = integers(plan.draft_ids).tolist()
        self.drafts += len(ids)
        rows: list[tuple[int, list[int]]] = []
        for slot in sorted(self._decoding):
            rows.append((slot, ids[: drafts.get(slot, 0)]))
            del ids[: drafts.get(slot, 0)]
        rows += [(slot, []) for slot, _, _, sample in chunk_table(plan.chunks).tolist() if sample]
        out: list[int] = []
        for slot, row in rows:
            going = True
            for draft in (*row, -1):
                place = places.get(len(out))
                token = self._draw(slot, place, draft) if going else REJECTED
                self.said += going and place is not None
                going = going and token == draft
                out.append(token)
        found, busy = np.array(out, np.int32).tobytes(), self._load.step
        return StepResult(step=plan.step, epoch=plan.epoch, token_ids=found, busy=busy)

    def _draw(self, slot: int, place: int | None, draft: int) -> int:
        if place is None:
            return self._random.randrange(3, 4000)
        if slot in self._texts:
            token = next(self._texts[slot])
            assert self._store[place][token // 32] >> np.uint32(token % 32) & 1, "the text follows the schema"
            return token
        if self._load.says == "greedy":
            return self._best(self._seeds[slot], place)
        tokens = self._lists.get(place)
        if tokens is None:
            bits = np.unpackbits(self._store[place].view(np.uint8), bitorder="little")
            tokens = np.flatnonzero(bits).tolist()
            tokens = self._lists[place] = [token for token in tokens if token not in self._tokens.eos] or tokens
        if draft in tokens[:4] and (len(tokens) == 1 or self._random.random() < 0.5):
            return draft
        return self._random.choice(tokens)

    def _best(self, seed: int, place: int) -> int:
        """What a row likes best: most of it is its own taste, some of it everybody's."""
        token = self._liked.get((seed, place))
        if token is None:
            taste = self._tastes.get(seed)
            if taste is None:
                taste = np.random.default_rng(0).standard_normal(self._tokens.words * 32, np.float32)
                taste += np.random.default_rng(seed).standard_normal(self._tokens.words * 32, np.float32)
                taste[list(self._tokens.eos)] = -99.0
                self._tastes[seed] = taste
            allowed = np.unpackbits(self._store[place].view(np.uint8), bitorder="little").nonzero()[0]
            token = self._liked[seed, place] = int(allowed[taste[allowed].argmax()])
        return token


def text(seed: int) -> bytes:
    """An array that follows SCHEMA."""
    chance = random.Random(seed)
    words = ("Anna", "Tom", "Lena K.", "blue", "window", "table 12", "Zoe", "north")
    return json.dumps([
        {"id": chance.randrange(100_000), "name": chance.choice(words), "ok": chance.random() < 0.5}
        for _ in range(chance.randint(200, 300))
    ]).encode()  # fmt: skip


def measure(tokens: GrammarTokens, automaton: Automaton, load: Load, threads: int) -> Measured:
    whole = run_loop(tokens, automaton, load, threads, Stopwatch())
    watch = Stopwatch()
    plain = {part: getattr(*where) for part, where in PARTS.items()}
    for part in plain:
        watch.wrap(*PARTS[part], part)
    try:
        parts = run_loop(tokens, automaton, load, threads, watch)
    finally:
        for part, method in plain.items():
            setattr(*PARTS[part], method)
    return msgspec.structs.replace(whole, microseconds=parts.microseconds | whole.microseconds)


def run_loop(tokens: GrammarTokens, automaton: Automaton, load: Load, threads: int, watch: Stopwatch) -> Measured:
    """A load's requests from their prompts on; the first steps are not counted."""
    warm, rows = 16, load.rows + load.free
    config = Config(model=ModelConfig(max_num_seqs=rows, max_num_batched_tokens=rows * PROMPT, block_size=BLOCK))
    guides = GrammarQueue(tokens, ThreadPoolExecutor(2), threads)
    bitmasks = BitmaskFiller(tokens, ThreadPoolExecutor(1), ThreadPoolExecutor(1), threads)
    make_popular(guides, automaton, threads)
    clients, steps_port = Wire(Role.TOKENIZER, watch), Wire(Role.EXECUTOR, watch)
    loop = SchedulerLoop(config, ModelFacts(4096, tokens.width), clients, steps_port, guides, bitmasks, 0.0)
    places = 4 * rows + 1024
    sampler = Sampler(tokens, load, places)
    steps_port.arrivals.append(Arrival(steps_port.peer, ExecutorReady(
        epoch=0, blocks=rows * 256, block_size=BLOCK, step_tokens=rows * PROMPT, mask_slots=places, device="none",
        dtype="none", weight_bytes=1, cache_bytes=1, load_seconds=1.0)))  # fmt: skip
    loop.iterate(0.0, 0.0)
    generator = np.random.default_rng(1)
    for number in range(1, rows + 1):
        prompt = generator.integers(3, 4000, PROMPT, np.int32).tobytes()
        sampling = Sampling(seed=number, max_tokens=None, ignore_eos=True, eos_token_ids=tuple(tokens.eos))
        follows = automaton if number <= load.rows else None
        request = SubmitTokens(id=number, token_ids=prompt, sampling=sampling, automaton=follows)
        clients.arrivals.append(Arrival(clients.peer, request))
    columns: dict[str, list[float]] = {name: [] for name in (*WHOLE, *watch.parts)}
    poller = select.poll()
    poller.register(bitmasks.jobs.fileno(), select.POLLIN)
    poller.register(guides.jobs.fileno(), select.POLLIN)
    swept = np.ones(load.cold << 17)
    now, done = 0.0, 0
    turn, process, began = 0.0, 0.0, 0.0
    while done < warm + load.steps:
        now += load.step
        began_sweep = time.process_time()
        swept.sum()
        process += time.process_time() - began_sweep
        at = time.thread_time()
        loop.iterate(now, now)
        turn += time.thread_time() - at
        if not steps_port.plans or (steps_port.plans[0].masked and not steps_port.masks):
            poller.poll(100)
            continue
        poller.poll(0)
        plan = steps_port.plans.pop(0)
        masks = steps_port.masks.pop(0) if plan.masked else None
        if done >= warm:
            found = {**watch.seconds, "turn": turn, "process": time.process_time() - process,
                     "path": max(0.0, steps_port.masked_at - began)}  # fmt: skip
            for name, column in columns.items():
                column.append(found.get(name, 0.0))
        done += 1
        result = sampler.run(plan, sampler.take(masks))
        if done == warm:
            sampler.said = sampler.drafts = sampler.entries = sampler.fresh = 0
            gc.collect()
            gc.disable()
        steps_port.arrivals.append(Arrival(steps_port.peer, result))
        watch.seconds.clear()
        turn, process, began = 0.0, time.process_time(), time.perf_counter()
    gc.enable()
    guides.jobs.close()
    bitmasks.jobs.close()
    return Measured(
        load,
        round(sampler.said / load.steps, 1),
        round(sampler.drafts / load.steps, 1),
        round(sampler.entries / load.steps, 1),
        round(sampler.fresh / load.steps, 1),
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
    found = (np.median(values), values.mean(), np.percentile(values, 99), values.min())
    return Timing(*[round(float(value), 1) for value in found])


def in_turns(against: Path, rounds: int, words: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What the command says in another tree and in this one, each figure the least of the rounds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for tree in (against.resolve(), report.ROOT) * rounds:
        with tempfile.TemporaryDirectory() as place:
            out, environment = Path(place) / "out.json", {**os.environ, "PYTHONPATH": str(tree)}
            command = [sys.executable, "-m", "benchmarks.mask_cpu", *words, "--out", str(out)]
            subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
            measured = json.loads(out.read_bytes())
        name = measured["commit"]
        for known, new in zip(found.setdefault(name, measured["measured"]), measured["measured"], strict=True):
            for part, times in new["microseconds"].items():
                least = known["microseconds"][part]
                least |= {each: min(least[each], value) for each, value in times.items()}
    return found


def compare(trees: dict[str, list[dict[str, Any]]]) -> None:
    before, after = trees.values()
    for one, other in zip(before, after, strict=True):
        load = one["load"]
        print(f"{load['rows']} rows that say {load['says']}, {load['free']} free")
        for name in (*WHOLE[:2], "follow", "apply", "plan"):
            first, second = one["microseconds"][name], other["microseconds"][name]
            print(f"  {name:<8} median {first['median']:9.1f} {second['median']:9.1f}"
                  f"  mean {first['mean']:9.1f} {second['mean']:9.1f} µs")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loads", nargs="+", default=["64+0", "32+32", "256+0"], metavar="ROWS+FREE", help="of a step")
    parser.add_argument("--says", choices=SAYS, nargs="+", default=list(SAYS), help="what constrained rows say")
    parser.add_argument("--steps", type=int, default=200, help="steps measured")
    parser.add_argument("--step", type=float, default=1.6, help="milliseconds that each is said to take")
    parser.add_argument("--cold", type=int, default=0, metavar="MIB", help="walked before each turn")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="that fill")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6b", help="whose vocabulary")
    parser.add_argument("--against", type=Path, metavar="TREE", help="measure another tree as well, in turns")
    parser.add_argument("--rounds", type=int, default=5, help="of both trees")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    if arguments.against is not None:
        words = ["--loads", *arguments.loads, "--says", *arguments.says, "--steps", str(arguments.steps),
                 "--step", str(arguments.step), "--cold", str(arguments.cold), "--threads", str(arguments.threads),
                 "--shape", arguments.shape]  # fmt: skip
        trees = in_turns(arguments.against, arguments.rounds, words)
        compare(trees)
        if arguments.out is not None:
            rounds = ["--against", "TREE", "--rounds", str(arguments.rounds)]
            report.write(arguments.out, "mask_cpu", {"trees": trees}, words + rounds)
        return
    sys.setswitchinterval(SWITCH)
    with tempfile.TemporaryDirectory() as place:
        folder = make_folder(SHAPES[arguments.shape], Path(place))
        tokens = read_tokens(folder, read_vocabulary(folder))
    assert tokens is not None
    automaton = Automaton(source=source_of(Grammar(kind="json_schema", source=json.dumps(SCHEMA)), tokens).text)
    found = []
    for counts in arguments.loads:
        rows, free = map(int, counts.split("+"))
        for says in arguments.says:
            load = Load(rows, free, says, arguments.steps, arguments.step / 1000, arguments.cold)
            measured = measure(tokens, automaton, load, arguments.threads)
            found.append(measured)
            print(f"{rows} rows that say {says}, {free} free: {measured.tokens} tokens of constrained rows a step,"
                  f" {measured.drafts} drafts, {measured.entries} masks, {measured.fresh} of them new")  # fmt: skip
            for name, value in measured.microseconds.items():
                print(f"  {name:<8} median {value.median:9.1f}  mean {value.mean:9.1f}  p99 {value.p99:9.1f}"
                      f"  least {value.least:9.1f} µs")  # fmt: skip
    if arguments.out is not None:
        report.write(arguments.out, "mask_cpu", {"threads": arguments.threads, "measured": found})


if __name__ == "__main__":
    main()
