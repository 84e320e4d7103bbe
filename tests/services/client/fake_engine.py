"""A pipeline in memory for the api's tests: a tokenizer that answers what a test scripted, without sockets."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.engine_core.folder import Generation
from penstock.engine_core.histogram import Histogram
from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.control import EngineStatus
from penstock.protocol.links import TEXT, Role, Welcome
from penstock.protocol.message import Message
from penstock.protocol.messages import Abort, Detokenize, Detokenized, Finish, SubmitText, Tokenize, Tokenized
from penstock.protocol.outputs import ParsedRow, Piece, PositionLogprobs, TextBatch, TextExtra, TokenLogprob
from penstock.services.client.adapters import AdapterNames
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import BodyBudget, RequestContext
from penstock.services.http.security import OPERATOR, Keys
from penstock.services.http.server import ConnectionLimiter
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Arrival, Joined, Left, Peer, SocketStatistics
from penstock.services.metrics.definitions import LAG
from penstock.services.metrics.exporter import Exporter, collect_api
from penstock.services.metrics.requests import Traffic
from penstock.services.openai.app_state import AppState
from penstock.services.openai.media_fetcher import MediaFetcher
from penstock.services.openai.responses.endpoint import BackgroundWork
from penstock.services.openai.responses.store import ResponseStore
from penstock.services.openai.routes import application
from penstock.services.supervisor.options import sized
from penstock.services.tracing.tracer import Tracer

LIMIT = 60.0  # seconds, after which something has hung; a loaded machine needs some of them
VOCABULARY = 1000
MAX_MODEL_LEN = 512
MODEL = ModelInfo(
    names=("demo", "demo-alias"), max_model_len=MAX_MODEL_LEN, vocab_size=VOCABULARY, created=1_700_000_000
)


class Row(msgspec.Struct, kw_only=True):
    """One row that the fake tokenizer sends."""

    text: str = ""
    tokens: int = 1
    choice: int = 0
    finish: Finish = Finish.NONE
    token_ids: bytes = b""  # int32; zeros
    extra: dict[str, Any] = {}
    pieces: tuple[Piece, ...] = ()


def status(**changes: Any) -> EngineStatus:
    fields: dict[str, Any] = {
        "time": time.time(), "epoch": 1, "ready": True, "step": 7, "step_age": 0.25, "running": 1, "waiting": 0,
        "blocks": 100, "blocks_free": 60, "blocks_idle": 30, "block_size": 16, "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8, "device": "cpu", "dtype": "float32", "prompt_tokens": 11, "cached_tokens": 3,
        "output_tokens": 22, "finished": 2, "aborted": 1, "failed": 0, "preemptions": 0, "drain_rate": 4.0,
    }  # fmt: skip
    return EngineStatus(**{**fields, **changes})


def new_peer(index: int = 0) -> Peer:
    welcome = Welcome(version=1, role="tokenizer", index=index, incarnation=1, pid=0, epoch=0)
    return Peer(b"", welcome, TEXT.window, 0.0)


class FakeLink:
    """The connector's end of a link whose tokenizer is `script`: called with each message that the api sends."""

    def __init__(self, script: Callable[[FakeLink, Message], None], index: int = 0) -> None:
        self.peer: Peer | None = new_peer(index)
        self.script = script
        self.sent: list[Message] = []
        self.deliver: Callable[[list[Arrival]], None] = lambda arrivals: None

    @property
    def peers(self) -> tuple[Peer, ...]:
        return (self.peer,) if self.peer is not None else ()

    def send(self, peer: Peer, message: Message) -> bool:
        if peer is not self.peer or peer.credit <= 0:
            return False
        peer.credit -= 1
        self.sent.append(message)
        self.script(self, message)
        return True

    def arrive(self, *messages: Message | Joined | Left) -> None:
        assert self.peer is not None
        self.deliver([Arrival(self.peer, message) for message in messages])

    def lose(self) -> None:
        peer, self.peer = self.peer, None
        assert peer is not None
        self.deliver([Arrival(peer, Left("process 1 ended"))])

    def send_each(self, peers: Iterable[Peer], message: Message) -> bool:
        sent = [self.send(peer, message) for peer in peers]
        return all(sent)

    def statistics(self) -> SocketStatistics:
        return SocketStatistics(len(self.peers), 0, len(self.sent), 0, 0, 0, 0)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def batch(rows: Sequence[tuple[int, Row]]) -> TextBatch:
    """A TextBatch of (request id, row)."""
    count = len(rows)
    return TextBatch(
        ids=struct.pack(f"<{count}q", *(number for number, _ in rows)),
        choices=struct.pack(f"<{count}H", *(row.choice for _, row in rows)),
        text=tuple(row.text for _, row in rows),
        tokens=struct.pack(f"<{count}i", *(row.tokens for _, row in rows)),
        token_ids=b"".join(row.token_ids or bytes(4 * row.tokens) for _, row in rows),
        finish=bytes(row.finish for _, row in rows),
        extras=tuple(TextExtra(row=index, **row.extra) for index, (_, row) in enumerate(rows) if row.extra),
        parsed=tuple(ParsedRow(index, row.pieces) for index, (_, row) in enumerate(rows) if row.pieces),
    )


def silent(port: FakeLink, message: Message) -> None:
    """A tokenizer that never answers."""


def answering(make: Callable[[SubmitText], Sequence[Sequence[Row]]]) -> Callable[[FakeLink, Message], None]:
    """A tokenizer that sends the batches that `make` gives for a request, one per turn of the loop."""

    def script(port: FakeLink, message: Message) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, SubmitText):
            steps = list(make(message))
            stopped: list[bool] = []

            def step() -> None:
                if port.peer is None or Abort(message.id) in port.sent:
                    stopped.append(True)
                    return
                port.arrive(batch([(message.id, row) for row in steps.pop(0)]))
                if steps:
                    loop.call_soon(step)

            loop.call_soon(step)
        elif isinstance(message, Tokenize):
            ids = [ord(character) % VOCABULARY for character in message.prompt or "chat"]
            strings = tuple(message.prompt or "chat") if message.with_strings else None
            loop.call_soon(port.arrive, Tokenized(message.id, struct.pack(f"<{len(ids)}i", *ids), strings))
        elif isinstance(message, Detokenize):
            ids = list(struct.unpack(f"<{len(message.token_ids) // 4}i", message.token_ids))
            loop.call_soon(port.arrive, Detokenized(message.id, "".join(map(chr, ids))))

    return script


def words(*texts: str, prompt_tokens: int = 5, n: int | None = None) -> Callable[[SubmitText], list[list[Row]]]:
    """Each choice says `texts`, one per step, and stops."""

    def make(request: SubmitText) -> list[list[Row]]:
        steps = [[Row(text=text, choice=choice) for choice in range(request.n)] for text in texts]
        for row in steps[0]:
            row.extra = {"prompt_tokens": prompt_tokens, "cached_tokens": 2}
        for row in steps[-1]:
            row.finish = Finish.STOP
        return steps

    return make


def position(token: str, token_id: int, offset: int, top: int = 0, value: float = -0.5) -> PositionLogprobs:
    """Log-probabilities of `token`, it and its rivals in order."""
    chosen = TokenLogprob(token, token_id, value, token.encode())
    rivals = tuple(TokenLogprob(f"r{k}", 900 + k, value - k, f"r{k}".encode()) for k in range(1, top))
    return PositionLogprobs(chosen, 1, (chosen, *rivals)[:top], offset)


def app_state(
    port: FakeLink | Sequence[FakeLink],
    *,
    generation: Generation | None = None,
    wrong_output: tuple[str, ...] = (),
    adapters: AdapterNames | None = None,
    images: int = 0,
    media: dict[str, Any] | None = None,
    media_timeout: float = LIMIT,
    **options: Any,
) -> AppState:
    """An api's parts over fake ports, with an engine that is ready. `media` stands for the system's network."""
    ports = [port] if isinstance(port, FakeLink) else list(port)
    options.setdefault("allowed_hosts", "*")
    config = sized(Config(api=ApiConfig(**options)), cores=1)
    engine_client = EngineClient(ports, 0, 1, config.api.max_queued_requests, LIMIT, processes=1)
    for each in ports:
        each.deliver = lambda arrivals: engine_client.receive(arrivals, time.monotonic())
    ports[0].arrive(status())
    model = msgspec.structs.replace(
        MODEL, generation=generation or Generation(), wrong_output=wrong_output, adapters=adapters, images=images
    )
    responses = ResponseStore(Path(config.run.run_dir), 0, 1, config.api)
    traffic, limiter, run_dir = Traffic(), ConnectionLimiter(), Path(config.run.run_dir)
    collector = partial(collect_api, [engine_client], ports, traffic, limiter, responses)
    me = Identity(Role.API, 0, 1, 7)
    exporter = Exporter(me, run_dir, Histogram(LAG), collector, Tracer(), remote=engine_client.remote)
    background = BackgroundWork(traffic)
    fetcher = MediaFetcher(config.api, media_timeout, traffic.images, **(media or {}))
    keys = Keys(config.api)
    operators = Keys(config.api, OPERATOR) if config.api.admin_address else None
    return AppState(
        config, 0, model, engine_client, traffic, exporter, keys, responses, background, fetcher,
        limiter=limiter, operators=operators,
    )  # fmt: skip


def request_context(
    *headers: tuple[bytes, bytes], receive: Any = None, send: Any = None, options: ApiConfig | None = None, **scope: Any
) -> RequestContext:
    """A request as an endpoint gets it."""
    fields = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "client": ("10.0.0.1", 1)}
    return RequestContext(
        {**fields, "headers": list(headers), **scope}, receive, send, BodyBudget(options or ApiConfig())
    )


def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """What winds the running loop's clock on by some seconds."""
    loop, ahead = asyncio.get_running_loop(), [0.0]
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + sum(ahead))
    return ahead.append


@asynccontextmanager
async def client(
    parts: AppState, *, served: Callable[[AppState], Any] = application, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the application, in this process; `served`: of another listener's."""
    transport = httpx.ASGITransport(served(parts), raise_app_exceptions=True)
    asking = httpx.AsyncClient(transport=transport, base_url="http://api", **options)
    async with asyncio.timeout(LIMIT), asking as found:
        yield found
