"""Which code one streamed chat and one decode step pass through: `python -m benchmarks.walks [chat|step]`.

A walk lists the files of this repository that were entered and the functions called in each, and counts the changes of
file: how often a call is in another file than the call before it. Fewer files and changes mean less to read for whoever
follows a request or a step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import logging
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import msgspec
import numpy as np
import torch
import uvloop
import zmq

from benchmarks.shapes import SMOKE, make_folder
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.loading import load
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.config import ApiConfig, Config, RunConfig
from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.links import TEXT, Role, shared_hash
from penstock.protocol.messages import Finish, Sampling, SubmitText, SubmitTokens
from penstock.protocol.outputs import TextBatch, TextExtra
from penstock.protocol.steps import StepPlan
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Arrival, Joined, Link
from penstock.services.openai import api_server as api
from penstock.services.supervisor.options import sized

Call = tuple[str, str]  # file and function
ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("services", "engine_core", "kernels", "protocol")
PARTS = ("comp>", "<genexpr>")  # code of its own to the interpreter, and to a reader a part of its function
WARM = 3  # chats before those that are measured: imports, caches and connections are then there
CHATS = 5  # that are measured; a timer of the process that ran in the midst of one makes it larger
# What carries bytes on both sides of the application.
ENDS = (
    "services/http/connection.py", "services/links/async_link.py", "services/links/link.py",
)  # fmt: skip
LIMIT = 60.0  # seconds, after which something hangs
POLL = 0.02  # seconds between two questions whether the process is ready
TOKENS = ("one", " two", " three")
BODY = {"model": "smoke", "messages": [{"role": "user", "content": "Count."}], "stream": True}
STEPS = 24  # decode steps; the walk is one in the middle, between two block boundaries
MIDDLE = 12
PROMPT = 16
BLOCK = 64


class Figures(msgspec.Struct, frozen=True):
    """What a walk comes to."""

    files: int
    functions: int
    changes: int

    def __str__(self) -> str:
        return f"{self.files} files, {self.functions} functions, {self.changes} changes of file"


@cache
def place(path: str) -> str:
    """The file's path in this repository; empty for a file of another package."""
    real = Path(path).resolve()
    if not real.is_relative_to(ROOT):
        return ""
    relative = real.relative_to(ROOT)
    return str(relative) if relative.parts[0] in PRODUCT else ""


class Walk:
    """The calls between `start` and `stop`, on the thread that calls them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._known: dict[CodeType, Call] = {}

    def start(self) -> None:
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)

    def without(self, files: Sequence[str]) -> Walk:
        """The same walk, less the calls in `files`."""
        walk = Walk()
        walk.calls = [call for call in self.calls if call[0] not in files]
        return walk

    @property
    def functions(self) -> dict[str, list[str]]:
        """Functions by file, both in the order of their first call."""
        found: dict[str, dict[str, None]] = {}
        for file, function in self.calls:
            found.setdefault(file, {})[function] = None
        return {file: list(functions) for file, functions in found.items()}

    @property
    def figures(self) -> Figures:
        functions = self.functions
        changes = sum(before[0] != after[0] for before, after in itertools.pairwise(self.calls))
        return Figures(len(functions), sum(map(len, functions.values())), changes)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._known:
            self._known[code] = place(code.co_filename), code.co_qualname
        call = self._known[code]
        if call[0] and not call[1].endswith(PARTS):
            self.calls.append(call)


def text_of(name: str, walk: Walk) -> str:
    """The figures and the functions by file."""
    lines = [f"{name}: {walk.figures}"]
    if name == "chat":
        lines.append(f"  without connection and link: {walk.without(ENDS).figures}")
    lines += [f"  {file} ({len(found)}): {', '.join(found)}" for file, found in walk.functions.items()]
    return "\n".join(lines)


def chat() -> Walk:
    """A streamed chat through an api process over a loopback connection; the smallest of several."""
    with tempfile.TemporaryDirectory(prefix="penstock-walk-") as directory, quiet():
        run_dir = Path(directory) / "run"
        run_dir.mkdir(mode=0o700)
        model = ModelConfig(model=str(make_folder(SMOKE, Path(directory))), served_model_name=str(BODY["model"]))
        config = Config(model=model, run=RunConfig(run_dir=str(run_dir)), api=ApiConfig(uds=str(run_dir / "api.sock")))
        walks = uvloop.run(in_api(sized(config, cores=1)))
    return min(walks, key=lambda walk: msgspec.structs.astuple(walk.figures))


async def in_api(config: Config) -> list[Walk]:
    """Serve on this thread while another one plays the client and the tokenizer."""
    serving = asyncio.create_task(api.serve(config, 0))
    try:
        with ThreadPoolExecutor(1) as threads:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, asyncio.run, in_client(config, loop))
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


async def in_client(config: Config, server: asyncio.AbstractEventLoop) -> list[Walk]:
    """Ask for one chat after another; the walks of those that count."""
    walks = []
    async with asyncio.timeout(LIMIT):
        tokenizer = Tokenizer(config)
        try:
            await tokenizer.joined.wait()
            while not await ready(config.api.uds):  # noqa: ASYNC110 (a socket file makes no event)
                await asyncio.sleep(POLL)
            reader, writer = await asyncio.open_unix_connection(config.api.uds)
            for _ in range(WARM):
                await one_chat(reader, writer, tokenizer)
            for _ in range(CHATS):
                walk = Walk()
                await on(server, walk.start)
                await one_chat(reader, writer, tokenizer)
                await on(server, walk.stop)
                walks.append(walk)
            writer.close()
        finally:
            tokenizer.close()
    return walks


async def ready(uds: str) -> bool:
    """Whether the process listens and would serve a request."""
    try:
        reader, writer = await asyncio.open_unix_connection(uds)
    except OSError:
        return False
    writer.write(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200 ")


async def on(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Do `work` on the thread of another loop."""
    done = threading.Event()

    def call() -> None:
        work()
        done.set()

    loop.call_soon_threadsafe(call)
    await asyncio.to_thread(done.wait, LIMIT)


async def one_chat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokenizer: Tokenizer) -> None:
    """Each token is sent when the one before it has arrived, so that no two share a write."""
    body = json.dumps(BODY).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    number = await tokenizer.asked.get()
    for index, token in enumerate(TOKENS):
        tokenizer.say(number, index)
        await reader.readuntil(f'"content":"{token}"'.encode())
    await reader.readuntil(b"\r\n0\r\n\r\n")
    await asyncio.sleep(0.05)  # the request's task ends behind its last write


class Tokenizer:
    """The other end of the text link: takes requests, and says what it is told to say."""

    def __init__(self, config: Config) -> None:
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.joined = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        me = Identity(Role.TOKENIZER, 0, 1, shared_hash(config.model))
        self._link = AsyncLink(Link.bind(self._context, TEXT, me, Path(config.run.run_dir)))
        self._link.start(self._arrived)

    def say(self, number: int, index: int) -> None:
        """One token of the answer to a request."""
        last = index == len(TOKENS) - 1
        batch = TextBatch(
            ids=struct.pack("<q", number), choices=bytes(2), text=(TOKENS[index],), tokens=struct.pack("<i", 1),
            token_ids=struct.pack("<i", 5 + index), finish=bytes([Finish.STOP if last else Finish.NONE]),
            extras=(TextExtra(row=0, prompt_tokens=5, cached_tokens=0),) if index == 0 else (),
        )  # fmt: skip
        self._link.send(self._link.peers[0], batch)

    def close(self) -> None:
        self._link.close()
        self._context.term()

    def _arrived(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            match arrival.message:
                case Joined():
                    self._link.send(arrival.peer, STATUS)
                    self.joined.set()
                case SubmitText() as request:
                    self.asked.put_nowait(request.id)


STATUS = EngineStatus(
    time=time.time(), epoch=1, ready=True, step=1, step_age=0.0, running=0, waiting=0, blocks=100, blocks_free=100,
    blocks_idle=0, block_size=16, max_model_len=512, max_num_seqs=8, device="cpu", dtype="float32", prompt_tokens=0,
    cached_tokens=0, output_tokens=0, finished=0, aborted=0, failed=0, preemptions=0, drain_rate=0.0,
)  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """Log as a process does, with the lines thrown away; and leave the garbage collector as it was."""
    root, log = logging.getLogger(), logging.getLogger("penstock")
    level, thresholds, handler = log.level, gc.get_threshold(), logging.NullHandler()
    root.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.propagate = True
        log.setLevel(level)
        root.removeHandler(handler)
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def step() -> Walk:
    """One decode step of two requests, in the middle of their answers."""
    with tempfile.TemporaryDirectory(prefix="penstock-walk-") as directory:
        folder = make_folder(SMOKE, Path(directory))
        spec, device = read_spec(folder), torch.device("cpu")
        model = build(spec, torch.float32, device, spec.max_position)
        load(model, folder, "dummy", 0)
    scheduler = Scheduler(
        SchedulingOptions(
            blocks=16, block_size=BLOCK, max_model_len=spec.max_position, max_num_seqs=8, max_num_batched_tokens=256,
            vocab_size=spec.vocab_size,
        )
    )  # fmt: skip
    options = RunnerOptions(
        device=device, dtype=torch.float32, blocks=16, block_size=BLOCK, max_model_len=spec.max_position,
        max_num_seqs=8,
    )  # fmt: skip
    runner = Runner(model, spec, options)
    prompt = np.arange(10, 10 + PROMPT, dtype=np.int32)
    for number in range(2):
        sampling = Sampling(max_tokens=STEPS + 2)
        scheduler.submit(SubmitTokens(id=number, token_ids=(prompt + number).tobytes(), sampling=sampling), 0, 0.0)
    walk = Walk()
    for number in range(STEPS):
        if number == MIDDLE:
            walk.start()
        try:
            one_step(scheduler, runner, 0.01 * number)
        finally:
            if number == MIDDLE:
                walk.stop()
        scheduler.outputs(0)
    return walk


def one_step(scheduler: Scheduler, runner: Runner, now: float) -> None:
    plan = scheduler.plan(now)
    assert isinstance(plan, StepPlan)
    scheduler.apply(runner.collect(runner.launch(plan)), now)


WALKS = {"chat": chat, "step": step}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, epilog=HELP)  # fmt: skip
    parser.add_argument("walk", nargs="*", choices=(*WALKS, []), help="which walk; both without a word")
    parser.add_argument("--output", type=Path, help="JSON file for the walks")
    options = parser.parse_args(arguments)
    walks = {name: WALKS[name]() for name in options.walk or WALKS}
    print("\n".join(text_of(name, walk) for name, walk in walks.items()))
    if options.output:
        reports = {name: {"figures": walk.figures, "functions": walk.functions} for name, walk in walks.items()}
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n")
    return 0


HELP = """\
chat: one streamed chat of three tokens, without tools, in a whole api process (links, HTTP connection and application)
that is warm, from the first byte of the request to the end of its task. A tokenizer that says three fixed tokens is at
the other end of the text link. The second line counts the application alone, between connection and link. Of several
chats the one that passes the fewest files counts: a timer of the process that goes off in the midst of a chat is no
part of it.

step: one decode step of two requests on the CPU, by the scheduler and the runner in one process: plan, begin, finish,
collect and apply, without drafts, masks and log-probabilities."""

if __name__ == "__main__":
    sys.exit(main())
