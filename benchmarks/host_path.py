"""What the host does for a first token and for a step, hop by hop: `python -m benchmarks.host_path`.

Api, tokenizer, scheduler and the executor's loop on one thread of one process, with messages encoded and decoded as
their links have it, but without sockets, other threads and a device: what is left is the serial work of the host. A
hop lasts from the bytes that reach it to those that it hands on; what it does behind that does not count. First one
request after another, then steps of many streams; of each hop the least of the rounds' medians. What is counted is
processor time, so that what else the machine does weighs little.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, cast

import msgspec
import uvicorn
import uvloop
from uvicorn.server import ServerState

from benchmarks import report
from benchmarks.load.executor import BLOCKS, STEP_TOKENS, Device
from benchmarks.shapes import SHAPES, make_folder
from penstock.engine_core.histogram import Histogram
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary
from penstock.protocol.config import Config, RunConfig
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import STEPS, TEXT, TOKENS, Hello, LinkSpec, Role, decoder
from penstock.protocol.message import Message
from penstock.protocol.steps import ExecutorReady, StepMasks, StepPlan, StepResult
from penstock.services.bench.client import Target
from penstock.services.bench.workload import Workload, requests
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.model_info import read_model_info
from penstock.services.executor.crash_report import Reports
from penstock.services.executor.steps import Steps
from penstock.services.executor.watchdog import Watchdog
from penstock.services.http.connection import Connection
from penstock.services.http.security import Keys
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Arrival, Joined, Peer, SocketStatistics
from penstock.services.metrics.definitions import LAG
from penstock.services.metrics.exporter import Exporter
from penstock.services.metrics.requests import Traffic
from penstock.services.openai.app_state import AppState
from penstock.services.openai.errors import encode
from penstock.services.openai.media_fetcher import MediaFetcher
from penstock.services.openai.responses.endpoint import BackgroundWork
from penstock.services.openai.responses.store import ResponseStore
from penstock.services.openai.routes import application
from penstock.services.scheduler.bitmask_filler import BitmaskFiller
from penstock.services.scheduler.grammar_queue import GrammarQueue
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop
from penstock.services.supervisor.options import sized
from penstock.services.tokenizer.grammar_compiler import GrammarCompiler
from penstock.services.tokenizer.main import read_frontend
from penstock.services.tokenizer.server_loop import TokenizerLoop, Workers
from penstock.services.tokenizer.templates import Templates
from penstock.services.tracing.tokenizer import TokenizerTraces
from penstock.services.tracing.tracer import Tracer

CREDIT = 1 << 40
SPARE = 64  # tokens of a stream before and behind the steps that are measured
HOPS = ("api, request", "tokenizer, prompt", "scheduler, plan", "executor, step", "scheduler, tokens",
        "tokenizer, text", "api, events")  # fmt: skip
STEP_HOPS = ("executor, step", "scheduler, turn", "tokenizer, text", "api, events")


class Line:
    """One direction of a link: messages stand here encoded until the other end takes them off."""

    def __init__(self, link: LinkSpec, *, up: bool) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder(link, at_binder=up)
        self.waiting: deque[bytes] = deque()
        self.put_at: list[float] = []  # when each message was put since the list was last cleared

    def put(self, message: Message) -> None:
        self.waiting.append(self._encoder.encode(message))
        self.put_at.append(time.thread_time())

    def take(self, peer: Peer) -> list[Arrival]:
        found = [Arrival(peer, self._decoder.decode(payload)) for payload in self.waiting]
        self.waiting.clear()
        return found


class End:
    """One end of a link in memory, with one peer that always has credit."""

    def __init__(self, out: Line, back: Line, peer: Peer) -> None:
        self.out = out
        self.epoch = 1
        self._back = back
        self._peer = peer
        self._joined = False

    @property
    def peers(self) -> tuple[Peer, ...]:
        return (self._peer,)

    def send(self, peer: Peer, message: Message) -> bool:
        return self.send_each((peer,), message)

    def send_each(self, peers: Iterable[Peer], message: Message) -> bool:
        for _ in peers:
            self.out.put(message)
        return True

    def receive(self) -> list[Arrival]:
        found = self._back.take(self._peer)
        if not self._joined:
            self._joined = True
            found.insert(0, Arrival(self._peer, Joined()))
        return found

    def tick(self, now: float) -> None:
        """Nobody is lost here."""

    def give_up(self, peer: Peer, reason: str) -> None:
        """Nobody is silent."""

    def statistics(self) -> SocketStatistics:
        return SocketStatistics(1, 0, 0, 0, 0, 0, 0)


def ends(link: LinkSpec) -> tuple[End, End]:
    """The binder's and the connector's."""
    up, down = Line(link, up=True), Line(link, up=False)

    def peer(role: Role) -> Peer:
        return Peer(b"", Hello(version=1, role=role, index=0, incarnation=1, pid=0, config=0), CREDIT, 0.0)

    return End(down, up, peer(link.connector)), End(up, down, peer(link.binder))


class Transport(asyncio.Transport):
    """A client's connection that takes everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.wrote_at = 0.0

    def write(self, data: Any) -> None:
        self.written.append(data)
        self.wrote_at = time.thread_time()

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        """Nobody is told."""

    def pause_reading(self) -> None:
        """There is nothing more to read."""

    def resume_reading(self) -> None:
        """There is nothing more to read."""


class Nowhere:
    """A device that has done each step at once, as a runner."""

    adapters = None

    def __init__(self, vocab: int) -> None:
        self._device = Device(0.0, vocab)

    def begin(self, plan: StepPlan) -> StepPlan:
        self._device.launch(plan, 0.0)
        return plan

    def finish(self, begun: StepPlan, masks: StepMasks | None) -> Done:
        return Done(self._device.collect())

    def draft(self, launched: Done) -> Done:
        return launched

    def collect(self, launched: Done) -> StepResult:
        return launched.result

    def reset(self) -> None:
        self._device.reset()


class Done(msgspec.Struct, frozen=True):
    """A step of that device."""

    result: StepResult
    finished: bool = True
    done: bool = True


class Host:
    """Every process's parts, and the lines between them."""

    def __init__(self, folder: Path, run_dir: Path, threads: ThreadPoolExecutor) -> None:
        run = RunConfig(run_dir=str(run_dir), log_level="warning")
        config = sized(Config(model=ModelConfig(model=str(folder)), run=run), cores=1)
        model = read_model_info(config)
        self.text, api_text = ends(TEXT)
        self.scheduler_tokens, self.tokens = ends(TOKENS)
        self.steps, executor_steps = ends(STEPS)
        self.api_text, self.executor_steps = api_text, executor_steps
        frontend, settings = read_frontend(config, folder, read_vocabulary(folder))
        workers = Workers(GrammarCompiler(folder, config.tokenizer), Templates(settings, config.tokenizer))
        traces = TokenizerTraces(Tracer())
        self.tokenizer_loop = TokenizerLoop(frontend, self.text, [self.tokens], threads, workers, traces)
        guides, bitmasks = GrammarQueue(None, threads), BitmaskFiller(None, threads, threads, 1)
        facts = ModelFacts(model.max_model_len, model.vocab_size)
        self.loop = SchedulerLoop(config, facts, self.scheduler_tokens, self.steps, guides, bitmasks, time.monotonic())
        ready = ExecutorReady(epoch=1, blocks=BLOCKS, block_size=config.model.block_size, step_tokens=STEP_TOKENS,
                              device="none", dtype="none", weight_bytes=0, cache_bytes=0, load_seconds=0.0)  # fmt: skip
        self.executor = Steps(cast(Any, executor_steps), cast(Any, Nowhere(model.vocab_size)), ready, Watchdog(),
                              Reports(run_dir, "executor-0", ready, prompts=False))  # fmt: skip
        me = Identity(Role.API, 0, 1, 0)
        self.engine_client = EngineClient([api_text], 0, 1, 4096, 1e9, processes=1)
        exporter = Exporter(me, run_dir, Histogram(LAG), lambda into: None, Tracer())
        traffic, responses = Traffic(), ResponseStore(run_dir, 0, 1, config.api)
        app = AppState(config, 0, model, self.engine_client, traffic, exporter, Keys(config.api), responses,
                       BackgroundWork(traffic),
                       MediaFetcher(config.api, config.tokenizer.media_timeout, traffic.images))  # fmt: skip
        self._server = uvicorn.Config(application(app), ws="none", lifespan="off", log_config=None,
                                      access_log=False, server_header=False, proxy_headers=False)  # fmt: skip
        self._server.load()

    def connection(self) -> tuple[Connection, Transport]:
        """A client's."""
        found, transport = Connection(self._server, ServerState(), {}, encode_error=encode), Transport()
        found.connection_made(transport)
        return found, transport

    def api(self) -> None:
        self.engine_client.receive(self.api_text.receive(), time.monotonic())

    def tokenizer_up(self) -> None:
        self.tokenizer_loop.from_apis(self.text.receive())

    def scheduler(self) -> None:
        self.loop.iterate(time.monotonic(), time.time())

    def run_step(self) -> None:
        self.executor.take(self.executor_steps.receive())
        self.executor.iterate()

    def tokenizer_down(self) -> None:
        self.tokenizer_loop.from_scheduler(0, self.tokens.receive())

    async def settle(self) -> None:
        """Move everything until nothing moves, steps excepted."""
        for _ in range(8):
            self.tokenizer_up()
            self.scheduler()
            self.tokenizer_down()
            self.api()
            await asyncio.sleep(0)


async def first_token(host: Host, connection: Connection, transport: Transport, request: bytes) -> list[float]:
    """Seconds of each hop on the way of one request to its first token, and back."""
    found = []

    async def hop(out: Line, work: Any) -> None:
        out.put_at.clear()
        began = time.thread_time()
        work()
        await turned(lambda: bool(out.put_at))
        found.append(out.put_at[0] - began)

    await hop(host.api_text.out, lambda: connection.data_received(request))
    await asyncio.sleep(0)
    await hop(host.tokens.out, host.tokenizer_up)
    await hop(host.steps.out, host.scheduler)
    await hop(host.executor_steps.out, host.run_step)
    await hop(host.scheduler_tokens.out, host.scheduler)
    await hop(host.text.out, host.tokenizer_down)
    transport.written.clear()
    began = time.thread_time()
    host.api()
    await turned(lambda: any(b'"text"' in part or b'"content"' in part for part in transport.written))
    found.append(transport.wrote_at - began)
    return found


async def turned(done: Callable[[], bool]) -> None:
    """Turn the loop, which nothing from outside wakes, until `done`."""
    while not done():  # noqa: ASYNC110 (each turn is what is measured)
        await asyncio.sleep(0)


async def first_tokens(host: Host, workload: Workload) -> list[float]:
    """Median seconds of each hop over requests one after the other."""
    connection, transport = host.connection()
    found = []
    for request in encoded(workload):
        found.append(await first_token(host, connection, transport, request))
        while not transport.written[-1].endswith(b"0\r\n\r\n"):
            host.run_step()
            await host.settle()
    return [median(column) for column in zip(*found, strict=True)]


async def steps_of_many(host: Host, workload: Workload, steps: int) -> list[float]:
    """Median seconds of each hop of a step in which every stream says a token."""
    clients = [host.connection() for _ in range(workload.requests)]
    for (connection, _), request in zip(clients, encoded(workload), strict=True):
        connection.data_received(request)
    while not all(transport.written for _, transport in clients):
        await host.settle()
        host.run_step()
    assert all(transport.written[0].startswith(b"HTTP/1.1 200") for _, transport in clients)
    found = [await one_step(host) for _ in range(steps)]
    assert host.loop.unfinished == len(clients), "none has ended meanwhile"
    for connection, _ in clients:
        connection.connection_lost(None)
    while host.loop.unfinished or host.engine_client.statistics().unfinished:
        host.run_step()
        await host.settle()
    return [median(column) for column in zip(*found, strict=True)]


async def one_step(host: Host) -> list[float]:
    """Seconds of each hop of a step, whose result and text go the whole way before the next one's."""
    began = time.thread_time()
    host.run_step()
    stepped = time.thread_time()
    host.scheduler()
    scheduled = time.thread_time()
    host.tokenizer_down()
    told = time.thread_time()
    host.api()
    written = time.thread_time()
    await asyncio.sleep(0)
    return [stepped - began, scheduled - stepped, told - scheduled, written - told]


def encoded(workload: Workload) -> list[bytes]:
    """The bytes of each request."""
    return [Target("localhost", 1, "").encode(each.body, workload.endpoint) for each in requests(workload)]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of each hop of one load, and of all of them."""

    load: str
    hops: dict[str, float]
    total: float


async def measure(options: argparse.Namespace) -> list[Figure]:
    """Every load, round after round."""
    rounds: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-path-") as place, ThreadPoolExecutor(1) as threads:
        folder, run_dir = make_folder(SHAPES[options.shape], Path(place)), Path(place) / "run"
        run_dir.mkdir(mode=0o700)
        host = Host(folder, run_dir, threads)
        host.scheduler()
        host.run_step()
        await host.settle()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for turn in range(options.rounds):
                for load, medians in (await one_round(host, options, turn)).items():
                    rounds.setdefault(load, []).append(medians)
                gc.collect()
        finally:
            gc.enable()
            gc.unfreeze()
    return [figure(name, medians) for name, medians in rounds.items()]


async def one_round(host: Host, options: argparse.Namespace, turn: int) -> dict[str, list[float]]:
    """Median seconds of each hop, by load."""
    found = {workload.name: await first_tokens(host, workload) for workload in first_loads(options, turn)}
    for streams in options.streams:
        tokens = options.steps + SPARE
        many = Workload(name=f"a step of {streams}", requests=streams, output=(tokens, tokens), vocab=options.vocab,
                        seed=turn)  # fmt: skip
        found[many.name] = await steps_of_many(host, many, options.steps)
    return found


def first_loads(options: argparse.Namespace, turn: int) -> list[Workload]:
    """Requests alone: prompts as ids, and chats."""
    found = [
        Workload(name=f"first token, {count} ids", requests=options.requests, input=(count, count), output=(2, 2),
                 vocab=options.vocab, seed=turn) for count in options.prompts
    ]  # fmt: skip
    chat = Workload(name="first token, chat of 128 words", requests=options.requests, output=(2, 2), endpoint="chat",
                    seed=turn)  # fmt: skip
    return [*found, chat]


def figure(load: str, rounds: Sequence[Sequence[float]]) -> Figure:
    names = HOPS if len(rounds[0]) == len(HOPS) else STEP_HOPS
    hops = {name: round(1e6 * min(column), 1) for name, column in zip(names, zip(*rounds, strict=True), strict=True)}
    return Figure(load=load, hops=hops, total=round(sum(hops.values()), 1))


def text(found: Figure) -> str:
    """A load's figures for the eye."""
    lines = [f"  {name:<20} {value:9.1f}" for name, value in found.hops.items()]
    return "\n".join([f"{found.load}: {found.total:.1f} µs", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_path", description=__doc__.partition("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--vocab", type=int, default=90000, help="ids of prompts are below")
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 1024, 8192], help="tokens of prompts")
    parser.add_argument("--requests", type=int, default=100, help="of each load, one after the other")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64, 256], help="streams of a step")
    parser.add_argument("--steps", type=int, default=100, help="of each load")
    parser.add_argument("--rounds", type=int, default=5, help="each of all loads")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    found = uvloop.run(measure(options))
    print("\n".join(map(text, found)), flush=True)
    if options.output:
        report.write(options.output, "host_path", {"loads": found}, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
