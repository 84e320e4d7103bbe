"""A server that streams made-up completions, for the client's tests and for measuring the client itself.

It answers every POST with `max_tokens` chunks of one token each. How it does so, and how it fails, is data.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType

import msgspec


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """How the fake server answers."""

    chunked: bool = True  # else the body ends with the connection
    cut: int = 0  # bytes per write; 0: one write per event
    hold: int = 0  # nobody is answered until so many requests are here
    tick: float = 0.0  # seconds between tokens; 0: as fast as the socket takes them
    line: str = "\n"
    comment: bool = False  # a comment before every event
    status: int = 200
    fail_after: int = -1  # tokens until the failure; -1: never
    failure: str = "disconnect"  # or error (an error event), garbage, truncate (no [DONE]), hang
    usage: bool = True
    missing: int = 0  # tokens that usage claims too many
    ids: bool = False
    close: bool = False  # close the connection after each response


class Fake:
    """The server, on a port of its own while it is entered."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.bodies: list[dict[str, object]] = []
        self.connections = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._enough = asyncio.Event()

    async def __aenter__(self) -> Fake:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:  # fmt: skip
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._answer(reader, writer) and not self.behaviour.close:
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client left, as clients do, or the server is closing; either way this connection is done
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One response; whether the connection may carry another."""
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        body = json.loads(await reader.readexactly(size)) if size else {}
        self.bodies.append(body)
        how = self.behaviour
        if len(self.bodies) >= how.hold:
            self._enough.set()
        await self._enough.wait()
        if how.status != 200:
            text = b'{"error": {"message": "no"}}'
            writer.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (how.status, len(text), text))
            await writer.drain()
            return True
        kind = "Transfer-Encoding: chunked" if how.chunked else "Connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{kind}\r\n\r\n".encode())
        tokens = int(body.get("max_tokens", 16))
        for index in range(tokens):
            if index == how.fail_after:
                return await self._fail(writer)
            await self._send(writer, json.dumps(chunk(index, "length" if index == tokens - 1 else None, ids=how.ids)))
            if how.tick:
                await asyncio.sleep(how.tick)
        if how.usage:
            prompt = body.get("prompt")
            count = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else 1,
                     "completion_tokens": tokens + how.missing,
                     "prompt_tokens_details": {"cached_tokens": 1}}  # fmt: skip
            await self._send(writer, json.dumps({"choices": [], "usage": count}))
        if how.failure != "truncate":
            await self._send(writer, "[DONE]")
        if how.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return how.chunked

    async def _fail(self, writer: asyncio.StreamWriter) -> bool:
        match self.behaviour.failure:
            case "error":
                await self._send(writer, json.dumps({"error": {"message": "engine failed"}}))
                await self._send(writer, "[DONE]")
                writer.write(b"0\r\n\r\n")
                return True
            case "garbage":
                writer.write(b"not a chunk\r\n\r\n")
            case "hang":
                await asyncio.Event().wait()
        return False

    async def _send(self, writer: asyncio.StreamWriter, data: str) -> None:
        how = self.behaviour
        event = (f": ping{how.line}{how.line}" if how.comment else "") + f"data: {data}{how.line}{how.line}"
        payload = event.encode()
        if how.chunked:
            payload = b"%x\r\n%s\r\n" % (len(payload), payload)
        for start in range(0, len(payload), how.cut or len(payload)):
            writer.write(payload[start : start + (how.cut or len(payload))])
            if how.cut:
                await asyncio.sleep(0)
        await writer.drain()


def chunk(index: int, finish: str | None, *, ids: bool) -> dict[str, object]:
    choice: dict[str, object] = {"index": 0, "text": f" w{index}", "logprobs": None, "finish_reason": finish}
    if ids:
        choice["token_ids"] = [index]
    return {"id": "cmpl-fake", "object": "text_completion", "created": 0, "model": "fake", "choices": [choice]}
