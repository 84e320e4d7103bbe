"""A real HTTP server over an engine that a test plays: requests arrive here, and answers are said here."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import uvicorn

from penstock.protocol.message import Message
from penstock.protocol.messages import Abort, Finish, PieceKind, SubmitText
from penstock.protocol.outputs import Piece
from penstock.services.openai.routes import application
from tests.services.client.fake_engine import LIMIT, FakeLink, Row, app_state, batch, status

BEAT = 0.3  # seconds between the engine's signs of life


class Engine:
    """The requests that came, and the answers to them, token by token. Called from the test's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.url = url
        self.link = FakeLink(self._arrived)
        self._loop = loop
        self._asked: list[SubmitText] = []
        self._aborted: set[int] = set()
        self._told: set[int] = set()  # requests whose first row was sent
        self._news = threading.Condition()

    def _arrived(self, link: FakeLink, message: Message) -> None:
        assert link.peer is not None
        link.peer.credit += 1
        with self._news:
            if isinstance(message, SubmitText):
                self._asked.append(message)
            elif isinstance(message, Abort):
                self._aborted.add(message.id)
            self._news.notify_all()

    def until(self, done: Callable[[], Any]) -> None:
        with self._news:
            assert self._news.wait_for(done, LIMIT), "what the test waits for did not come"

    def request(self, count: int) -> list[dict[str, Any]]:
        """The messages of the request that makes `count` of them, which is waited for; no more may have come."""
        self.until(lambda: len(self._asked) >= count)
        assert len(self._asked) == count
        found: list[dict[str, Any]] = msgspec.json.decode(self._asked[-1].messages or b"null")
        valid(found)
        return found

    @property
    def latest(self) -> SubmitText:
        return self._asked[-1]

    def aborted(self) -> None:
        """Wait until the latest request was ended by who made it."""
        self.until(lambda: self.latest.id in self._aborted)

    def say(self, text: str = "", *pieces: Piece, finish: Finish = Finish.NONE) -> None:
        """The next token of the latest request."""
        number = self.latest.id
        row = Row(text=text, pieces=pieces, finish=finish, extra={} if number in self._told else {"prompt_tokens": 5})
        self._told.add(number)
        self._loop.call_soon_threadsafe(self.link.arrive, batch([(number, row)]))

    def think(self, text: str) -> None:
        self.say("", Piece(PieceKind.REASONING, text))

    def call(self, name: str, *arguments: str) -> None:
        """A call, its arguments in these parts."""
        self.say("", Piece(PieceKind.CALL, name), *(Piece(PieceKind.ARGUMENTS, part) for part in arguments))

    def end(self, text: str = "") -> None:
        self.say(text, finish=Finish.STOP)

    def answer(self, request: SubmitText, text: str) -> None:
        """All of an answer to a request that is not the latest."""
        row = Row(text=text, finish=Finish.STOP, extra={"prompt_tokens": 5})
        self._loop.call_soon_threadsafe(self.link.arrive, batch([(request.id, row)]))

    def fail(self, reason: str) -> None:
        """The executor found an error in the latest request."""
        row = Row(tokens=0, finish=Finish.ERROR, extra={"error": reason})
        self._loop.call_soon_threadsafe(self.link.arrive, batch([(self.latest.id, row)]))


def valid(messages: list[dict[str, Any]]) -> None:
    """Fail unless every chat template takes these messages: roles alternate, nothing is empty, each call has its result
    right behind it."""
    rest = [message for message in messages if message["role"] != "system"]
    assert len(messages) - len(rest) <= 1
    assert messages[0]["role"] == "system" or len(messages) == len(rest)
    assert rest[0]["role"] == "user"
    assert rest[-1]["role"] in ("user", "tool")
    open_calls: list[str] = []
    for before, message in zip([{"role": "assistant"}, *rest], rest, strict=False):
        assert message["content"] or message.get("tool_calls")
        if message["role"] == "tool":
            assert message["tool_call_id"] == open_calls.pop(0)
            continue
        assert open_calls == []
        assert {message["role"], before["role"]} in ({"user", "assistant"}, {"assistant", "tool"}, {"user", "tool"})
        for call in message.get("tool_calls", ()):
            assert isinstance(msgspec.json.decode(call["function"]["arguments"]), dict)
            open_calls.append(call["id"])
    assert open_calls == []


@contextmanager
def scripted(**options: Any) -> Iterator[Engine]:
    """An engine behind a real server on a free port of loopback, with these options of the api process."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready: list[tuple[Engine, uvicorn.Server]] = []
    started = threading.Event()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        engine = Engine(loop, f"http://127.0.0.1:{listener.getsockname()[1]}")
        parts = app_state(engine.link, **options)
        config = uvicorn.Config(application(parts), ws="none", lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(config)

        def beat() -> None:
            if engine.link.peer is not None:
                engine.link.arrive(status(time=time.time()))
            loop.call_later(BEAT, beat)

        beat()
        ready.append((engine, server))
        started.set()
        await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(LIMIT)
    engine, server = ready[0]
    try:
        yield engine
    finally:
        server.should_exit = server.force_exit = True
        thread.join(LIMIT)
        assert not thread.is_alive()
